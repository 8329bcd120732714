// Text of requests.
#include <limits>

#include "base/quote.h"
#include "serve/http/request.h"
#include "serve/tinker/inputs.h"

namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

std::vector<std::int32_t> tokens_of(const json& list, const std::string& where) {
  if (!list.is_array()) throw_http(422, "{} must be a list of token ids", where);
  std::vector<std::int32_t> tokens;
  tokens.reserve(list.size());
  for (const json& token : list) {
    if (!token.is_number_integer() || token.get<std::int64_t>() < 0 ||
        token.get<std::int64_t>() > std::numeric_limits<std::int32_t>::max())
      throw_http(422, "{} must be a list of token ids, found {}", where,
                 text::shown(token.dump(-1, ' ', false, json::error_handler_t::replace), 40));
    tokens.push_back(token.get<std::int32_t>());
  }
  return tokens;
}

/// Old clients leave `type` out.
Chunk chunk_of(const json& value, const std::string& where) {
  const Fields fields(value, where, known::kAny);
  const std::string type = fields.text("type", fields.find("tokens") != nullptr ? "encoded_text"
                                               : fields.find("dmel") != nullptr ? "dmel"
                                                                                : "image");
  // Others are refused, whatever they hold.
  if (type == "encoded_text") fields.require_known(known::kTextChunk);
  if (type == "encoded_text")
    return {Chunk::Kind::kText, tokens_of(fields.list("tokens"), where + ".tokens")};
  return {type == "dmel" ? Chunk::Kind::kDmel : Chunk::Kind::kImage, {}};
}

}  // namespace

std::vector<Chunk> chunks_of(const Fields& model_input) {
  std::vector<Chunk> chunks;
  for (const json& value : model_input.list("chunks"))
    chunks.push_back(chunk_of(value, model_input.where() + ".chunks"));
  return chunks;
}

void check_token(std::int64_t token, const ModelFacts& facts, const std::string& where) {
  if (token < 0 || token >= facts.vocabulary)
    throw_http(400, "{} has token {}: the vocabulary has ids 0 to {}", where, token,
               facts.vocabulary - 1);
}

std::vector<std::int32_t> text_of(const std::vector<Chunk>& chunks, const std::string& where) {
  std::vector<std::int32_t> tokens;
  for (const Chunk& chunk : chunks) {
    if (chunk.kind != Chunk::Kind::kText)
      throw_http(400, "{} has an image or audio chunk: this server takes text only", where);
    tokens.insert(tokens.end(), chunk.tokens.begin(), chunk.tokens.end());
  }
  return tokens;
}

std::vector<std::int32_t> prompt_of(const Fields& model_input) {
  return text_of(chunks_of(model_input), "the prompt");
}

}  // namespace heddle::serve::tinker
