// Generation and scoring are one pass: what an engine says of its tokens is what scoring says.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>

#include "assembly/model_on_ranks.h"
#include "base/hash.h"
#include "comm/ranks.h"
#include "models/tiny_model.h"
#include "rollout/engine.h"
#include "testing/paths.h"
#include "train/scorer.h"

namespace heddle::rollout {
namespace {

bool has_experts(const std::string& model_type) {
  return model_type != "qwen3_5_text" && model_type != "qwen3";
}

/// Random weights; adapters with numbers that depend on name and place alone.
assembly::ModelOnRanks place(const std::string& model_type, c10::ScalarType dtype, bool adapted,
                             const comm::Mesh& mesh, double weight_range = 0.06) {
  runtime::Context context;
  context.dtype = dtype;
  context.mesh = mesh;
  context.seed = testing::kTinySeed;
  assembly::ModelRecipe recipe;
  recipe.config = testing::tiny_config(has_experts(model_type), model_type);
  recipe.config.initializer_range = weight_range;
  recipe.purpose = assembly::Purpose::kGenerate;
  recipe.weights = assembly::Weights::kRandom;
  if (adapted) {
    assembly::NewAdapters adapters;
    adapters.targets = {"all-linear"};
    if (has_experts(model_type))
      adapters.target_parameters = {"experts.gate_up_proj", "experts.down_proj"};
    adapters.options.rank = 4;
    recipe.adapters = adapters;
  }
  assembly::ModelOnRanks placed = assembly::place(recipe, context);
  if (!placed.adapters) return placed;
  placed.adapters->visit_parameters([](nn::Parameter& factor) {
    if (factor.name().find("lora_B") == std::string::npos) return;
    std::int64_t count = 1;
    for (const std::int64_t size : factor.global_shape()) count *= size;
    const auto first = static_cast<double>(hash::of(factor.name()) % 1000);
    factor.write_owned(
        (at::sin(at::arange(count, at::kDouble).add(first)) * 0.1).view(factor.global_shape()));
  });
  return placed;
}

/// Prompts around the borders of the gated delta rule's chunks, and sequences that cross them.
std::vector<Request> requests() {
  std::vector<Request> all;
  for (const int length : {63, 64, 65, 129, 1}) {
    Request request;
    for (int t = 0; t < length; ++t) request.prompt.push_back((7 * length + t * t) % 97);
    request.max_new_tokens = 5;
    request.sampling.seed = static_cast<std::uint64_t>(length);
    all.push_back(std::move(request));
  }
  return all;
}

std::shared_ptr<const data::Tokenizer> tokenizer() {
  return data::Tokenizer::load(testing::source_path("examples/tokenizer-4k"));
}

std::vector<Completion> complete(assembly::ModelOnRanks& placed) {
  // Prompts in pieces, and slots that change hands.
  return generate(placed, tokenizer(), requests(), {.max_sequences = 3, .prefill_tokens = 100});
}

/// The largest difference between the log-probabilities of completions and those that `judge`
/// gives the same tokens.
double difference(const std::vector<Completion>& completions, const assembly::ModelOnRanks& judge) {
  std::vector<std::vector<std::int32_t>> rows;
  const std::vector<Request> all = requests();
  for (std::size_t i = 0; i < all.size(); ++i) {
    rows.push_back(all[i].prompt);
    rows[i].insert(rows[i].end(), completions[i].output_ids.begin(),
                   completions[i].output_ids.end());
  }
  const std::vector<train::RowScore> scores = train::Scorer(judge).score(rows, {});
  double largest = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(completions[i].logprobs.size(), 5u);
    for (std::size_t t = 0; t < completions[i].logprobs.size(); ++t) {
      const double scored = scores[i].logprobs[all[i].prompt.size() + t];
      EXPECT_TRUE(std::isfinite(scored));
      largest = std::max(largest, std::abs(completions[i].logprobs[t] - scored));
    }
  }
  return largest;
}

struct Case {
  std::string name;
  std::string model_type;
  bool adapted;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class GeneratedLogprobs : public ::testing::TestWithParam<Case> {};

/// Bound of the difference of a token's log-probability between two passes in bfloat16 that round
/// in different places: docs/generate.md derives it.
double bf16_bound(models::Model& model) {
  constexpr double kUnitRoundoff = 1.0 / 256, kDeviations = 5;
  const double roundings = 2 * static_cast<double>(model.layers().size()) + 1;
  const at::Tensor head = model.head_weight().value().to(at::kDouble);
  const double logits = head.norm().item<double>() / std::sqrt(static_cast<double>(head.size(0)));
  return kDeviations * logits * kUnitRoundoff * std::sqrt(2.0 / 3 * roundings);
}

TEST_P(GeneratedLogprobs, AreThoseOfScoring) {
  const auto& [name, model_type, adapted] = GetParam();
  // Weights far larger than a model's, in double, show that both are one function, up to the
  // engine's last rounding: it takes logits in float32. Sizes that models have show what rounding
  // leaves of it.
  for (const auto& [dtype, weight_range] :
       {std::pair{at::kDouble, 0.2}, std::pair{at::kFloat, 0.06}, std::pair{at::kBFloat16, 0.06}}) {
    assembly::ModelOnRanks placed =
        place(model_type, dtype, adapted, comm::Mesh::single(), weight_range);
    const double bound = dtype == at::kDouble  ? 1e-6
                         : dtype == at::kFloat ? 1e-5
                                               : bf16_bound(*placed.model);
    const double found = difference(complete(placed), placed);
    EXPECT_LE(found, bound) << c10::toString(dtype);
    ::testing::Test::RecordProperty(c10::toString(dtype), fmt::format("{} of {}", found, bound));
  }
}

TEST_P(GeneratedLogprobs, OfSeveralRanksAreThoseThatOneScores) {
  const auto& [name, model_type, adapted] = GetParam();
  const assembly::ModelOnRanks one = place(model_type, at::kFloat, adapted, comm::Mesh::single());
  struct Layout {
    std::string name;
    comm::Mesh::Sizes sizes;
    std::int64_t ep;
  };
  std::vector<Layout> layouts = {{"tp", {2, 1, 1, 1, 1}, 1}, {"pp", {1, 1, 1, 1, 2}, 1}};
  if (has_experts(model_type)) {
    layouts.push_back({"ep", {1, 1, 2, 1, 1}, 2});
  } else {
    layouts.push_back({"dp", {1, 1, 1, 2, 1}, 1});
  }
  for (const Layout& layout : layouts) {
    std::vector<std::vector<Completion>> completions(2);
    const auto errors = testing::run_ranks(2, [&](const std::shared_ptr<comm::World>& world) {
      assembly::ModelOnRanks placed =
          place(model_type, at::kFloat, adapted, comm::Mesh(layout.sizes, world, layout.ep));
      completions[static_cast<std::size_t>(world->rank())] = complete(placed);
    });
    for (const std::string& error : errors) ASSERT_EQ(error, "") << layout.name;
    for (std::size_t i = 0; i < completions[0].size(); ++i) {
      EXPECT_EQ(completions[0][i].output_ids, completions[1][i].output_ids) << layout.name;
      EXPECT_EQ(completions[0][i].logprobs, completions[1][i].logprobs) << layout.name;
    }
    EXPECT_LE(difference(completions[0], one), 1e-5) << layout.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GeneratedLogprobs,
                         ::testing::Values(Case{"dense", "qwen3_5_text", false},
                                           Case{"dense_adapted", "qwen3_5_text", true},
                                           Case{"experts", "qwen3_5_moe_text", false},
                                           Case{"experts_adapted", "qwen3_5_moe_text", true},
                                           Case{"qwen3_next", "qwen3_next", false},
                                           Case{"qwen3", "qwen3", false},
                                           Case{"qwen3_adapted", "qwen3", true},
                                           Case{"qwen3_moe", "qwen3_moe", false}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace heddle::rollout
