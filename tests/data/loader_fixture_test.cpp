#include <fstream>

#include <nlohmann/json.hpp>

#include "base/rng.h"
#include "loader_fixture.h"

namespace heddle::data::testing {
namespace {

/// GPT-2's printable alphabet for bytes.
std::string spelled(int byte) {
  const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  int code = byte;
  if (!printable) {
    code = 256;
    for (int b = 0; b < byte; ++b) {
      const bool shown = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
      code += shown ? 0 : 1;
    }
  }
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
}

}  // namespace

std::shared_ptr<const Tokenizer> make_tokenizer(std::string_view chat_template) {
  using Json = nlohmann::ordered_json;
  Json vocab = Json::object();
  for (int byte = 0; byte < 256; ++byte) vocab[spelled(byte)] = byte;
  Json merges = Json::array();
  int next = 256;
  const auto merge = [&](const std::string& left, const std::string& right) {
    merges.push_back(Json::array({left, right}));
    vocab[left + right] = next++;
  };
  const std::string newline = spelled('\n'), space = spelled(' ');
  merge("h", "e");
  merge(newline, newline);
  merge(space, "t");
  merge(space + "t", "he");
  merge("a", "n");
  merge("an", "s");
  merge("ans", "w");
  Json added = Json::array();
  for (const char* token : {"<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"}) {
    added.push_back({{"id", next++},
                     {"content", token},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", std::string_view(token).starts_with("<|")}});
  }
  const Json file = {
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", added},
      {"normalizer", {{"type", "NFC"}}},
      {"pre_tokenizer",
       {{"type", "Sequence"},
        {"pretokenizers",
         Json::array(
             {{{"type", "Split"},
               {"pattern",
                {{"Regex",
                  R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"}}},
               {"behavior", "Isolated"},
               {"invert", false}},
              {{"type", "ByteLevel"},
               {"add_prefix_space", false},
               {"trim_offsets", false},
               {"use_regex", false}}})}}},
      {"post_processor", nullptr},
      {"decoder",
       {{"type", "ByteLevel"},
        {"add_prefix_space", false},
        {"trim_offsets", false},
        {"use_regex", false}}},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"unk_token", nullptr},
        {"continuing_subword_prefix", ""},
        {"end_of_word_suffix", ""},
        {"fuse_unk", false},
        {"byte_fallback", false},
        {"vocab", vocab},
        {"merges", merges}}}};
  Json config = {{"eos_token", "<|endoftext|>"}, {"pad_token", "<|endoftext|>"}};
  if (!chat_template.empty()) config["chat_template"] = std::string(chat_template);
  return Tokenizer::parse(file.dump(), config.dump());
}

std::string chatml_template() {
  return "{%- for message in messages -%}\n"
         "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}\n"
         "{%- endfor -%}\n"
         "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}";
}

std::string thinking_template() {
  return R"J({%- if tools %}
    {{- '<|im_start|>system\n# Tools\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_question=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}
        {%- set ns.last_question = index %}
    {%- endif %}
{%- endfor %}
{%- if ns.searching %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for message in messages %}
    {%- set content = message.content | trim %}
    {%- if message.role == 'user' or message.role == 'system' %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- set reasoning = reasoning | trim %}
        {%- if loop.index0 > ns.last_question %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning + '\n</think>\n\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {%- if loop.first and not content %}{%- else %}{{- '\n' }}{%- endif %}
                {{- '<tool_call>\n' }}{{- call.function | tojson }}{{- '\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}
    {%- else %}
        {{- '<|im_start|>assistant\n<think>\n' }}
    {%- endif %}
{%- endif %})J";
}

std::filesystem::path write_lines(const std::filesystem::path& path,
                                  const std::vector<std::string>& lines) {
  std::ofstream file(path, std::ios::binary);
  for (const std::string& line : lines) file << line << '\n';
  return path;
}

std::vector<std::string> numbered_rows(int count, int longest, std::uint64_t seed) {
  const CounterRng rng(seed, "rows");
  std::vector<std::string> lines;
  for (int row = 0; row < count; ++row) {
    nlohmann::json ids = nlohmann::json::array();
    const auto length = 2 + rng.below(row, static_cast<std::uint64_t>(longest) - 1);
    for (std::uint64_t t = 0; t < length; ++t) {
      ids.push_back(t % 2 == 0 ? row % 250 : static_cast<int>(t) % 250);
    }
    lines.push_back(nlohmann::json({{"input_ids", ids}}).dump());
  }
  return lines;
}

std::vector<std::int64_t> to_list(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kCPU, at::kLong).contiguous();
  const auto* data = flat.const_data_ptr<std::int64_t>();
  return {data, data + flat.numel()};
}

std::vector<double> to_doubles(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kCPU, at::kDouble).contiguous();
  const auto* data = flat.const_data_ptr<double>();
  return {data, data + flat.numel()};
}

std::shared_ptr<const Dataset> open_rows(const std::filesystem::path& path,
                                         const Tokenizer& tokenizer) {
  DatasetOptions options;
  options.files = {{path.string(), 1}};
  return Dataset::open(options, tokenizer);
}

}  // namespace heddle::data::testing
