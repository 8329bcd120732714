#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "data/rendering/renderer.h"
#include "data/tokenizer/tokenizer.h"

namespace heddle::rollout {

/// Where generation ends: the eos of generation_config.json or, if that names none, of config.json,
/// the tokenizer's, and the chat turn end. `source` may be null.
std::vector<std::int32_t> end_tokens(const data::Tokenizer& tokenizer,
                                     const ckpt::ModelDirectory* source);

/// The positions that config.json says the model was made for (max_position_embeddings); 0: it says
/// nothing.
std::int64_t longest_context(const ckpt::ModelDirectory& source);

/// Greedy answers to prompts, through the chat template if there is one, rendered as the run
/// renders its data: the samples of a training run.
std::vector<std::string> answer_prompts(assembly::ModelOnRanks& placed,
                                        const std::shared_ptr<const data::Tokenizer>& tokenizer,
                                        const std::vector<std::string>& prompts,
                                        std::int64_t max_new_tokens,
                                        const data::RenderOptions& rendering);

}  // namespace heddle::rollout
