#include "data/tokenizer/normalizer.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uniset.h>

#include <map>
#include <memory>

#include "base/errors.h"
#include "data/tokenizer/unicode_classes.h"

namespace heddle::data {
namespace {

void check(UErrorCode status, const char* what) {
  if (U_FAILURE(status)) throw_error<InternalError>("ICU: {}: {}", what, u_errorName(status));
}

/// ICU's normalisers restricted to Unicode 9.
struct Normalizers {
  Normalizers() {
    UErrorCode status = U_ZERO_ERROR;
    known = std::make_unique<icu::UnicodeSet>(UNICODE_STRING_SIMPLE("[:age=9.0:]"), status);
    check(status, "age set");
    known->freeze();
    const icu::Normalizer2* all[] = {
        icu::Normalizer2::getNFCInstance(status), icu::Normalizer2::getNFDInstance(status),
        icu::Normalizer2::getNFKCInstance(status), icu::Normalizer2::getNFKDInstance(status)};
    check(status, "normaliser");
    for (int i = 0; i < 4; ++i)
      forms[i] = std::make_unique<icu::FilteredNormalizer2>(*all[i], *known);
  }
  std::unique_ptr<icu::UnicodeSet> known;
  std::unique_ptr<icu::FilteredNormalizer2> forms[4];
};

const Normalizers& normalizers() {
  static const Normalizers all;
  return all;
}

bool is_ascii(std::string_view text) {
  for (const char c : text) {
    if (static_cast<unsigned char>(c) >= 0x80) return false;
  }
  return true;
}

}  // namespace

bool parse_normal_form(std::string_view name, NormalForm& form) {
  if (name == "NFC")
    form = NormalForm::kNfc;
  else if (name == "NFD")
    form = NormalForm::kNfd;
  else if (name == "NFKC")
    form = NormalForm::kNfkc;
  else if (name == "NFKD")
    form = NormalForm::kNfkd;
  else
    return false;
  return true;
}

bool normalize(const std::vector<NormalForm>& forms, std::string_view text, std::string& out) {
  bool changed = false;
  for (const NormalForm form : forms) {
    const std::string_view source = changed ? std::string_view(out) : text;
    if (form == NormalForm::kNfc ? !may_change_under_nfc(source) : is_ascii(source)) continue;
    UErrorCode status = U_ZERO_ERROR;
    std::string result;
    icu::StringByteSink<std::string> sink(&result, static_cast<std::int32_t>(source.size()));
    normalizers().forms[static_cast<int>(form)]->normalizeUTF8(
        0, icu::StringPiece(source.data(), static_cast<std::int32_t>(source.size())), sink, nullptr,
        status);
    check(status, "normalise");
    out = std::move(result);
    changed = true;
  }
  return changed;
}

}  // namespace heddle::data
