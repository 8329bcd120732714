#pragma once

#include <string>
#include <utility>
#include <vector>

#include "config/run_config.h"
#include "rl/prompts.h"

namespace heddle::rl {

/// Names and values, in an order of their own.
using Facts = std::vector<std::pair<std::string, std::string>>;

/// Facts that trainers and rollouts must share, as a text that they compare: prompts and
/// configuration; of two jobs facts_of_job().
std::string facts_of_run(const config::RunConfig& config, const Prompts& prompts);

/// Facts that two jobs must share to meet: prompts, contents of model and tokenizer, and the keys
/// that decide how completions are drawn, judged and sent. Those of the trainer alone (optim.*,
/// parallel.*, ckpt.* and so on) may differ. Throws as ckpt::ModelDirectory::open().
Facts facts_of_job(const config::RunConfig& config, const Prompts& prompts);

/// "rl.mode is sync in the trainer's job and async in the rollouts'": up to three facts that
/// differ; "" if none does.
std::string difference(const Facts& trainers, const Facts& rollouts);

}  // namespace heddle::rl
