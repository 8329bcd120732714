#pragma once

#include <string>
#include <vector>

#include "config/config.h"

namespace heddle::plan {

/// A step of a policy in bf16: 16 groups of 8 completions of up to 4096 tokens, with `settings`.
inline config::RunConfig policy_config(std::vector<std::string> settings) {
  settings.insert(settings.begin(),
                  {"model.dtype=bfloat16", "data.max_length=4096", "train.micro_batch_tokens=4096",
                   "train.objective=policy", "rl.reward.verifiers.exact=1", "rl.groups_per_step=16",
                   "rl.samples_per_group=8", "train.recompute=full", "rollout.max_sequences=64"});
  return config::parse("", "test", settings, config::Completeness::kPartial);
}

}  // namespace heddle::plan
