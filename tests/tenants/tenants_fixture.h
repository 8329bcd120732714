#pragma once

#include <cstdint>

#include <gtest/gtest.h>

#include "assembly/model_on_ranks.h"
#include "models/tiny_model.h"
#include "tenants/trainer.h"

namespace heddle::tenants {

/// A tiny model, placed for tenants.
class Tenants : public ::testing::Test {
 protected:
  void place(bool moe, c10::ScalarType dtype = at::kFloat) {
    assembly::ModelRecipe recipe;
    recipe.config = testing::tiny_config(moe);
    recipe.weights = assembly::Weights::kRandom;
    recipe.purpose = assembly::Purpose::kTenants;
    runtime::Context context;
    context.dtype = dtype;
    context.seed = testing::kTinySeed;
    base_ = assembly::place(recipe, context);
    testing::make_lively(*base_.model);
  }

  static Datum datum(int seed, int length) {
    Datum datum;
    for (int t = 0; t < length; ++t) {
      datum.tokens.push_back((seed * 31 + t * t * 7 + t * 3) % 97);
      datum.target_tokens.push_back((seed * 17 + t * 5) % 97);
    }
    return datum;
  }
  /// Sequences of odd lengths, others for every seed.
  static Work work(SetId set, int seed) {
    Work work;
    work.set = set;
    work.loss_fn = "cross_entropy";
    for (const int length : {3 + seed % 5, 17, 1, 65 + seed}) {
      work.data.push_back(datum(seed * 10 + length, length));
      for (int t = 0; t < length; ++t)
        work.data.back().inputs["weights"].push_back(t % 3 == 0 ? 0.0F : 0.25F * (t % 5) - 0.3F);
    }
    return work;
  }
  static AdamParams adam(int seed) {
    return {.lr = 1e-2 / (1 + seed), .weight_decay = 0.01 * seed, .grad_clip_norm = 0.5 * seed};
  }
  static SetOptions options(int seed) {
    return {.rank = 2 + 3 * seed,
            .alpha = 16,
            .seed = static_cast<std::uint64_t>(seed),
            .attn = seed % 3 != 1,
            .mlp = seed % 3 != 2,
            .unembed = seed % 2 == 1,
            .shared_expert_factors = seed % 3 == 0};
  }

  assembly::ModelOnRanks base_;
};

}  // namespace heddle::tenants
