#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "serve/model/backend.h"
#include "serve/model/generation.h"
#include "serve/tinker/fields.h"
#include "serve/tinker/wire.h"

/// From the types of the API to those of the model.
namespace heddle::serve::tinker {

/// The place of a request as far as its body can be read, be it broken, cut or beyond the limits.
Place read_place(std::string_view body, bool is_proto);

/// The JSON form of a forward or forward_backward of older SDKs; `forward_only` by its address.
/// Throws HttpError 422.
ForwardBackwardRequest read_forward_backward(const std::string& body, const Known& known,
                                             const char* input);

/// The work of a request, without its set. Throws HttpError 400 that names datum, input and what
/// was expected: a loss that is not known, inputs that are no text, shapes that do not fit, datums
/// that are longer than the model's context.
tenants::Work work_of(const ForwardBackwardRequest& request, const ModelFacts& facts);

/// Chunks of a model_input. Throws HttpError 422.
std::vector<Chunk> chunks_of(const Fields& model_input);
/// Their tokens. Throws HttpError 400 for what is no text; `where` names them.
std::vector<std::int32_t> text_of(const std::vector<Chunk>& chunks, const std::string& where);
/// Throws HttpError 400 for an id outside the vocabulary.
void check_token(std::int64_t token, const ModelFacts& facts, const std::string& where);

/// Tokens of a prompt {chunks}. Throws HttpError 400 for what is no text.
std::vector<std::int32_t> prompt_of(const Fields& model_input);

/// Request of an asample, without its weights. Throws HttpError 400 and 422 naming the field:
/// options that are not built are refused, never ignored.
struct SampleRequest {
  /// Tokens whose log-probabilities in a place of the prompt are asked for.
  struct Targets {
    Tensor layout;                                 ///< The answer's, without values.
    std::vector<std::vector<std::int64_t>> cells;  ///< [prompt - 1]; -1: none is asked for.
  };
  Generation generation;
  bool wants_prompt_logprobs = false;
  std::int64_t topk_prompt = 0;
  /// Tokens at the prompt's end that have log-probabilities; unset: all.
  std::optional<std::int64_t> prompt_logprobs_last;
  std::optional<Targets> targets;
};
SampleRequest read_sample(const Fields& fields, const ModelFacts& facts);
/// The targets of a prompt with so many tokens.
SampleRequest::Targets read_targets(const Fields& tensor, std::int64_t prompt_tokens,
                                    const ModelFacts& facts);
/// Their log-probabilities, as GenerationResult has them.
Tensor tensor_of(const SampleRequest::Targets& targets,
                 const std::vector<std::vector<double>>& logprobs);
/// The answer to it.
SampleResponse response_of(const SampleRequest& request, const GenerationResult& result);

/// Parameters of an optim_step. Throws HttpError 400 for another optimizer than AdamW.
tenants::AdamParams read_adam(const Fields& fields);

}  // namespace heddle::serve::tinker
