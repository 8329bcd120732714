// Input: tokenizer.json, a zero byte, tokenizer_config.json, a zero byte, and a text to encode.
// Without a zero byte all of it is text for a fixed tokenizer, whose ids must decode to the text
// again.
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/errors.h"
#include "base/log.h"
#include "data/tokenizer/byte_level.h"
#include "data/tokenizer/tokenizer.h"
#include "data/tokenizer/utf8.h"

namespace {

using heddle::data::Tokenizer;

/// All bytes, a few merges, and added tokens of each kind.
std::string fixed_tokenizer() {
  std::string vocab;
  for (int byte = 0; byte < 256; ++byte) {
    std::string spelling = heddle::data::byte_level::spelling(static_cast<unsigned char>(byte));
    if (spelling == "\"" || spelling == "\\") spelling.insert(0, "\\");
    vocab += "\"" + spelling + "\":" + std::to_string(byte) + ",";
  }
  return R"({"model":{"type":"BPE","vocab":{)" + vocab +
         R"("aa":256,"aaaa":257,"ab":258,"Ġa":259,"ĠĠ":260,"aab":261},"merges":["a a",["aa","aa"],"a b","Ġ a","Ġ Ġ","aa b"]},
      "pre_tokenizer":{"type":"Sequence","pretokenizers":[{"type":"Split","behavior":"Isolated","invert":false,"pattern":{"Regex":
      "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"}},
      {"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]},
      "added_tokens":[{"id":262,"content":"<|x|>","special":true},{"id":263,"content":"word","single_word":true,"normalized":false},
      {"id":264,"content":"norm","normalized":true},{"id":265,"content":"<|x","normalized":false}]})";
}

void round_trip(std::string_view text) {
  static const auto tokenizer = Tokenizer::parse(fixed_tokenizer());
  const std::vector<std::int32_t> ids = tokenizer->encode(text);
  const std::string decoded = tokenizer->decode(ids);
  if (decoded != heddle::data::utf8::replace_invalid(text)) std::abort();
  heddle::data::StreamDecoder stream(tokenizer, false);
  std::string streamed;
  for (const std::int32_t id : ids) streamed += stream.push(id);
  if (streamed + stream.finish() != decoded) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  heddle::log::set_level(heddle::log::Level::kError);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t zero = input.find('\0');
  if (zero == std::string_view::npos) {
    round_trip(input);
    return 0;
  }
  const std::string_view file = input.substr(0, zero);
  input.remove_prefix(zero + 1);
  const std::size_t second = input.find('\0');
  const std::string_view config =
      second == std::string_view::npos ? std::string_view() : input.substr(0, second);
  const std::string_view text = second == std::string_view::npos ? input : input.substr(second + 1);
  try {
    const auto tokenizer = Tokenizer::parse(file, config);
    tokenizer->decode(tokenizer->encode(text, {.add_special_tokens = true}), true);
  } catch (const heddle::DataError&) {
  }
  return 0;
}
