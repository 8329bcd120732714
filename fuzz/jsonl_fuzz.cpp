// From the bytes of a data file to batches: decompression, lines, JSON, row formats, rendering,
// loss masks.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "data/batch.h"
#include "data/readers/jsonl_reader.h"
#include "data/rendering/renderer.h"
#include "data/tokenizer/tokenizer.h"

namespace {

using namespace heddle::data;

class MemorySource : public ByteSource {
 public:
  MemorySource(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
  std::size_t read(char* into, std::size_t count) override {
    // Small pieces, so that lines and compressed blocks are cut everywhere.
    count = std::min({count, size_ - at_, std::size_t{7}});
    if (count > 0) std::memcpy(into, data_ + at_, count);
    at_ += count;
    return count;
  }
  std::uint64_t bytes_consumed() const override { return at_; }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
  std::size_t at_ = 0;
};

constexpr const char* kTemplate =
    "{%- for m in messages -%}\n"
    "{%- set content = m.content -%}\n"
    "{%- if m.role == 'assistant' and not loop.last -%}\n"
    "{%- set content = content.split('</think>')[-1] -%}{%- endif -%}\n"
    "{{- '<|im_start|>' + m.role + '\\n' -}}\n"
    "{%- if m.role == 'assistant' and loop.last -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif "
    "-%}\n"
    "{{- content + '<|im_end|>\\n' -}}{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}";

/// Bytes as tokens, without merges.
std::shared_ptr<const Tokenizer> make_tokenizer() {
  using Json = nlohmann::ordered_json;
  Json vocab = Json::object();
  int shifted = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    const int code = printable ? byte : shifted++;
    std::string spelled;
    if (code < 0x80) {
      spelled = static_cast<char>(code);
    } else {
      spelled = {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
    }
    vocab[spelled] = byte;
  }
  Json added = Json::array();
  int id = 256;
  for (const char* token : {"<|im_start|>", "<|im_end|>", "<|endoftext|>"}) {
    added.push_back({{"id", id++}, {"content", token}, {"special", true}});
  }
  const Json file = {
      {"added_tokens", added},
      {"normalizer", {{"type", "NFC"}}},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array()}}}};
  const Json config = {{"eos_token", "<|endoftext|>"}, {"chat_template", kTemplate}};
  return Tokenizer::parse(file.dump(), config.dump());
}

void require(bool holds) {
  if (!holds) std::abort();
}

void check_row(const Tokenizer& tokenizer, const Renderer& renderer, const Row& row) {
  const TokenizedRow tokens = renderer.tokenize(row);
  if (!tokens.kept()) return;
  require(tokens.labels.size() == tokens.tokens.size() &&
          tokens.weights.size() == tokens.tokens.size());
  if (row.form == Row::Form::kConversation && tokens.fate == TokenizedRow::Fate::kKept) {
    const RenderedText rendered = renderer.render(row);
    require(tokens.tokens == tokenizer.encode(rendered.text));
    for (const LossSpan& span : rendered.spans) {
      require(0 <= span.begin && span.begin <= span.end &&
              span.end <= static_cast<std::int64_t>(rendered.text.size()));
    }
  }
  const SequenceView view = {tokens.tokens, tokens.labels, tokens.weights, 0, tokens.target};
  const Batch batch = Batch::from_sequences(std::span(&view, 1), {}, row.target.has_value());
  require(batch.loss_rows == tokens.loss_rows);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto tokenizer = make_tokenizer();
  static const Renderer plain(*tokenizer, {});
  static const Renderer cut(*tokenizer, {.max_length = 16, .truncation = Truncation::kKeepEnd});
  if (size == 0) return 0;
  ReaderOptions options;
  options.task = static_cast<Task>(data[0] % 4);
  try {
    LineReader lines(
        ByteSource::decompress(std::make_unique<MemorySource>(data + 1, size - 1), "fuzz"), "fuzz",
        1 << 16);
    std::string line;
    while (true) {
      try {
        if (!lines.next(line)) break;
      } catch (const UnusableRow&) {
        continue;
      }
      try {
        const Row row = parse_line(line, {lines.name(), lines.line()}, options);
        check_row(*tokenizer, plain, row);
        check_row(*tokenizer, cut, row);
      } catch (const heddle::DataError&) {
        // A bad row; the reader goes on.
      }
    }
  } catch (const heddle::DataError&) {
  }
  return 0;
}
