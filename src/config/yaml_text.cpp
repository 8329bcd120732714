#include "config/yaml_text.h"

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <cstddef>
#include <sstream>
#include <string>

namespace heddle::config {
namespace {

bool is_forbidden(unsigned char c) {
  return (c < 0x20 && c != '\t' && c != '\n' && c != '\r') || c == 0x7f;
}

/// Bytes of the character that begins with `c`; 0 for none.
std::size_t length_of(unsigned char c) {
  if (c < 0x80) return 1;
  if (c >= 0xc2 && c < 0xe0) return 2;
  if (c >= 0xe0 && c < 0xf0) return 3;
  return c >= 0xf0 && c < 0xf5 ? 4 : 0;
}

[[noreturn]] void fail(std::string_view before, const std::string& message) {
  YAML::Mark mark;
  mark.line = static_cast<int>(std::count(before.begin(), before.end(), '\n'));
  throw YAML::ParserException(mark, message);
}

/// Takes a document and keeps nothing of it.
class Passing final : public YAML::EventHandler {
  using Mark = YAML::Mark;
  using Anchor = YAML::anchor_t;
  using Text = std::string;
  void OnDocumentStart(const Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const Mark&, Anchor) override {}
  void OnAlias(const Mark&, Anchor) override {}
  void OnScalar(const Mark&, const Text&, Anchor, const Text&) override {}
  void OnSequenceStart(const Mark&, const Text&, Anchor, YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const Mark&, const Text&, Anchor, YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}
};

}  // namespace

bool has_second_document(const std::string& text) {
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  Passing passing;
  return parser.HandleNextDocument(passing) && parser.HandleNextDocument(passing);
}

void require_yaml_text(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const auto c = static_cast<unsigned char>(text[at]);
    const std::size_t length = length_of(c);
    const std::string_view rest =
        text.substr(at + 1, std::min(length == 0 ? 0 : length - 1, text.size() - at - 1));
    const bool is_whole =
        length > 0 && rest.size() == length - 1 &&
        std::ranges::all_of(rest, [](unsigned char part) { return (part & 0xc0U) == 0x80; });
    if (!is_whole) fail(text.substr(0, at), fmt::format("byte {:#04x} is not UTF-8 text", c));
    if (is_forbidden(c)) fail(text.substr(0, at), fmt::format("a control character, {:#04x}", c));
    at += length;
  }
}

}  // namespace heddle::config
