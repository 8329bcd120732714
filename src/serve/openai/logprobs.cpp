#include "serve/openai/logprobs.h"

#include <algorithm>
#include <cmath>

namespace heddle::serve::openai {
namespace {

/// JSON has no infinity; clients expect a number.
double bounded(double logprob) { return std::max(logprob, -9999.0); }

}  // namespace

std::size_t characters(std::string_view text) {
  return static_cast<std::size_t>(std::ranges::count_if(
      text, [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }));
}

std::string Logprobs::text(std::int32_t id) const {
  if (as_ids_) return fmt::format("token_id:{}", id);
  // Embedding rows beyond the tokenizer are padding: they stand for no text.
  if (id >= tokenizer_.vocab_size()) return "";
  return tokenizer_.decode(std::vector{id});
}

std::string Logprobs::key(std::int32_t id) const {
  constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
  std::string written = text(id);
  if (as_ids_ || id >= tokenizer_.vocab_size() || written.find(kReplacement) == std::string::npos)
    return written;
  const std::string_view bytes = tokenizer_.bytes_of(id);
  if (bytes == written) return written;
  written = "bytes:";
  for (const char byte : bytes)
    written += fmt::format("\\x{:02x}", static_cast<unsigned char>(byte));
  return written;
}

Json Logprobs::chat_token(std::int32_t id, double logprob) const {
  Json bytes = Json::array();
  for (const char byte : tokenizer_.bytes_of(id)) bytes.push_back(static_cast<unsigned char>(byte));
  return {{"token", text(id)}, {"logprob", bounded(logprob)}, {"bytes", std::move(bytes)}};
}

Json Logprobs::chat_entry(std::int32_t id, double logprob,
                          const std::vector<TokenLogprob>& top) const {
  Json entry = chat_token(id, logprob);
  entry["top_logprobs"] = Json::array();
  for (const TokenLogprob& other : top)
    entry["top_logprobs"].push_back(chat_token(other.id, other.logprob));
  return entry;
}

Json Logprobs::empty_table() {
  return {{"tokens", Json::array()},
          {"token_logprobs", Json::array()},
          {"top_logprobs", Json::array()},
          {"text_offset", Json::array()}};
}

void Logprobs::append(Json& table, std::int32_t id, double logprob,
                      const std::vector<TokenLogprob>& top, std::size_t& offset) const {
  table["tokens"].push_back(key(id));
  table["text_offset"].push_back(offset);
  if (id < tokenizer_.vocab_size() && !tokenizer_.is_special(id))
    offset += characters(tokenizer_.bytes_of(id));
  if (std::isnan(logprob)) {
    table["token_logprobs"].push_back(nullptr);
    table["top_logprobs"].push_back(nullptr);
    return;
  }
  table["token_logprobs"].push_back(bounded(logprob));
  Json others = Json::object();
  for (const TokenLogprob& other : top) others[key(other.id)] = bounded(other.logprob);
  others[key(id)] = bounded(logprob);
  table["top_logprobs"].push_back(std::move(others));
}

Json Logprobs::prompt_table(const std::vector<std::int32_t>& prompt,
                            const GenerationResult& result) const {
  Json table = Json::array();
  for (std::size_t i = 0; i < prompt.size() && i < result.prompt_logprobs.size(); ++i) {
    if (std::isnan(result.prompt_logprobs[i])) {
      table.push_back(nullptr);
      continue;
    }
    Json entry = Json::object();
    const auto put = [&](std::int32_t id, double logprob, Json rank) {
      entry[std::to_string(id)] = {
          {"logprob", bounded(logprob)}, {"rank", std::move(rank)}, {"decoded_token", text(id)}};
    };
    put(prompt[i], result.prompt_logprobs[i], nullptr);
    if (i < result.prompt_top.size()) {
      const std::vector<TokenLogprob>& top = result.prompt_top[i];
      for (std::size_t rank = 0; rank < top.size(); ++rank)
        put(top[rank].id, top[rank].logprob, rank + 1);
    }
    table.push_back(std::move(entry));
  }
  return table;
}

}  // namespace heddle::serve::openai
