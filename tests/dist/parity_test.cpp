// P1 of the parallel engine: every layout gives the numbers of one rank. The table, half an hour on
// two cores:
//   heddle_dist_test --gtest_filter=SlowParityTest.Table
// Every variant in every layout takes hours: SlowParityTest.All*.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <iostream>

#include "dist/launched_run.h"
#include "dist/parity_cases.h"

namespace heddle {
namespace {

using namespace parity;
using testing::LaunchedRuns;
using Words = std::vector<std::string>;

bool has_experts(const Variant& variant) { return std::string(variant.model).ends_with("moe"); }

double relative(double a, double b) { return std::abs(a - b) / std::max(std::abs(b), 1e-30); }

/// One LaunchedRuns for all tests: its models are made once.
class ParityTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { runs_ = std::make_unique<LaunchedRuns>(); }
  static void TearDownTestSuite() { runs_.reset(); }
  /// Steps of each run: beyond the one after which some evaluate and save.
  static inline std::size_t steps_ = 6;

  /// Each layout of a variant runs once.
  static const std::vector<LaunchedRuns::Step>& steps_of(const Variant& variant,
                                                         const Layout& layout,
                                                         const Precision& precision) {
    const auto [entry, is_new] = results_.try_emplace(
        fmt::format("{}/{}/{}/{}", variant.name, layout.name, layout.simulation, precision.name));
    auto& steps = entry->second;
    if (!is_new) return steps;
    const std::string run = fmt::format("run-{}", results_.size());
    EXPECT_EQ(runs_->run(run, layout.ranks, variant.model, words(variant, layout, precision),
                         environment(layout)),
              0)
        << variant.name << ", " << layout.name << ":\n"
        << runs_->printed(run);
    steps = runs_->metrics(run);
    EXPECT_EQ(steps.size(), steps_);
    return steps;
  }

  /// How far roundings alone take the gradient norm of these steps: that of a layout in float32
  /// from its own in float64. Other kernels round otherwise and cannot be asked to be nearer.
  static double norm_of_rounding(const Variant& variant, const Layout& layout) {
    const auto& exact = steps_of(variant, layout, kFloat64);
    const auto& steps = steps_of(variant, layout, kFloat32);
    double norm = 0;
    for (std::size_t i = 0; i < std::min(steps.size(), exact.size()); ++i)
      norm = std::max(norm, relative(steps[i].grad_norm, exact[i].grad_norm));
    return norm;
  }

  /// Prints a row of the table and asserts its bound.
  static void compare(const Variant& variant, const Layout& layout, const Precision& precision,
                      const Layout& reference = kOneRank) {
    const auto& expected = steps_of(variant, reference, precision);
    const auto& steps = steps_of(variant, layout, precision);
    ASSERT_EQ(steps.size(), expected.size());
    ASSERT_FALSE(steps.empty());
    double loss = 0, norm = 0, others = 0;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      loss = std::max(loss, relative(steps[i].loss, expected[i].loss));
      norm = std::max(norm, relative(steps[i].grad_norm, expected[i].grad_norm));
      EXPECT_EQ(steps[i].tokens, expected[i].tokens);
      EXPECT_EQ(steps[i].expert_load, expected[i].expert_load);
      if (expected[i].entropy != 0)
        others = std::max(others, relative(steps[i].entropy, expected[i].entropy));
      if (expected[i].eval_loss != 0)
        others = std::max(others, relative(steps[i].eval_loss, expected[i].eval_loss));
      if (expected[i].aux_loss != 0)
        others = std::max(others, relative(steps[i].aux_loss, expected[i].aux_loss));
      // A cosine near 0 has the rounding of its vectors.
      others = std::max(others, std::abs(steps[i].grad_cos_prev - expected[i].grad_cos_prev));
    }
    const double first_norm = relative(steps[0].grad_norm, expected[0].grad_norm);
    std::cout << fmt::format(
                     "{:<38} {:<14} {:<8} loss {:.1e}  gradient norm {:.1e}, first step {:.1e}\n",
                     variant.name, layout.name, precision.name, loss, norm, first_norm)
              << std::flush;
    EXPECT_LT(loss, precision.bound) << variant.name << ", " << layout.name;
    const bool is_contrastive = std::string(variant.rows) == "pairs.jsonl";
    const bool is_sensitive = is_contrastive || has_experts(variant);
    EXPECT_LT(first_norm, is_contrastive ? precision.sensitive_norm_bound : precision.norm_bound)
        << variant.name << ", " << layout.name;
    double bound = is_sensitive ? precision.sensitive_norm_bound : precision.norm_bound;
    const bool has_other_kernels = layout.simulation != reference.simulation;
    if (norm >= bound && has_other_kernels && std::string(precision.name) == "float32")
      bound = norm_of_rounding(variant, reference);
    EXPECT_LT(norm, bound) << variant.name << ", " << layout.name;
    EXPECT_LT(others, precision.bound) << variant.name << ", " << layout.name;
  }

 private:
  static std::map<std::string, std::string> environment(const Layout& layout) {
    if (layout.simulation.empty()) return {};
    return {{"HEDDLE_SIM_NPU", layout.simulation}};
  }
  static Words words(const Variant& variant, const Layout& layout, const Precision& precision) {
    Words more = layout.overrides;
    // Experts are balanced within a micro-batch, which is therefore one pack in every layout.
    if (has_experts(variant)) {
      more.emplace_back("train.micro_batch_tokens=48");
      more.emplace_back("train.global_batch_size=4");
    }
    more.insert(more.end(), variant.overrides.begin(), variant.overrides.end());
    if (!layout.simulation.empty()) more.push_back("device.name=npu");
    more.push_back(std::string("model.dtype=") + precision.name);
    more.push_back(fmt::format("train.max_steps={}", steps_));
    more.push_back("data.train=" + (runs_->directory() / variant.rows).string());
    more.push_back("data.eval=" + runs_->first_rows(variant.rows).string());
    return more;
  }

  static inline std::unique_ptr<LaunchedRuns> runs_;
  static inline std::map<std::string, std::vector<LaunchedRuns::Step>> results_;
};

template <class Entry>
const Entry& named(const std::vector<Entry>& all, const char* name) {
  for (const Entry& entry : all) {
    if (std::string(entry.name) == name) return entry;
  }
  throw std::out_of_range(name);
}

const Variant& variant(const char* name) { return named(kVariants, name); }
const Layout& layout(const char* name) { return named(kLayouts, name); }
const Layout& experts(const char* name) { return named(kExpertLayouts, name); }

TEST_F(ParityTest, OfPipelines) {
  compare(variant("dense, full, unpacked, accumulated"), layout("pp2"), kFloat64);
  compare(variant("dense, full, unpacked, accumulated"), layout("pp2 interleaved"), kFloat64);
  compare(variant("dense, some frozen, evaluated"), layout("pp4"), kFloat64);
  compare(variant("dense, some frozen, evaluated"), layout("pp2 interleaved"), kFloat64);
  compare(variant("dense, LoRA and the tied embedding"), layout("pp2"), kFloat64);
  compare(variant("dense, LoRA of attention alone"), layout("pp4"), kFloat64);
  compare(variant("dense, the end frozen"), layout("pp4"), kFloat64);
  compare(variant("dense, LoRA"), layout("pp2 x cp2"), kFloat64);
  compare(variant("moe, full, accumulated, recomputed"), layout("pp2 x fsdp2"), kFloat64);
}

TEST_F(ParityTest, OfContextParallelism) {
  compare(variant("dense, full"), layout("cp3"), kFloat64);
  compare(variant("dense, full"), layout("cp2"), kFloat32);
  compare(variant("dense, some frozen, evaluated"), layout("ulysses2"), kFloat64);
  for (const char* name : {"cp3", "ulysses2"})
    compare(variant("classification, full, evaluated"), layout(name), kFloat64);
  compare(variant("moe, full, accumulated, recomputed"), layout("cp2 x dp2"), kFloat64);
  compare(variant("moe, LoRA, accumulated"), layout("ulysses2 x tp2"), kFloat64);
}

// P15.
TEST_F(ParityTest, OfRanksWhoseTokensCarryNoLoss) {
  for (const char* name : {"cp3", "ulysses2"})
    compare(variant("dense, full, loss at the end alone"), layout(name), kFloat64);
  compare(variant("moe, full, loss at the end alone"), experts("cp2 ep2"), kFloat64);
}

TEST_F(ParityTest, OfEveryKindOne) {
  compare(variant("dense, full"), kLayouts[0], kFloat64);
  compare(variant("dense, full"), kLayouts[3], kFloat32);
  compare(variant("dense, LoRA"), kLayouts[2], kFloat64);
  compare(variant("moe, full"), kLayouts[1], kFloat64);
  compare(variant("moe, full, accumulated, recomputed"), kLayouts[2], kFloat64);
  compare(variant("moe, LoRA, accumulated"), kLayouts[1], kFloat32);
  compare(variant("moe, full, summed with every micro-batch"), layout("tp2 x fsdp2"), kFloat64);
  compare(variant("dense, full, fewer rows than ranks"), kLayouts[0], kFloat64);
  compare(variant("dense, some frozen, evaluated"), kLayouts[1], kFloat64);
  compare(variant("dense, full"), layout("tp2"), kFloat64);
  compare(variant("dense, LoRA"), layout("tp2"), kFloat64);
  compare(variant("moe, LoRA, accumulated"), layout("tp2 x fsdp2"), kFloat64);
}

TEST_F(ParityTest, OfTensorParallelism) {
  compare(variant("dense, full, elementwise recomputed"), layout("tp2"), kFloat64);
  compare(variant("dense, LoRA and the tied embedding"), layout("tp2"), kFloat64);
  compare(variant("dense, full, long prompts"), layout("tp2"), kFloat64);
  compare(variant("dense, full, recomputed"), layout("tp2 x pp2"), kFloat64);
  compare(variant("classification, full, evaluated"), layout("tp2"), kFloat64);
  compare(variant("moe, LoRA of router and shared expert, elementwise recomputed"), layout("tp2"),
          kFloat64);
  compare(variant("moe, full, accumulated, recomputed"), layout("tp2 x cp2"), kFloat64);
}

TEST_F(ParityTest, OfMoreTensorRanksThanKeyValueHeads) {
  compare(variant("dense, full"), layout("tp4"), kFloat64);
  compare(variant("dense, LoRA"), layout("tp4"), kFloat64);
  compare(variant("moe, LoRA, accumulated"), layout("tp4"), kFloat64);
}

TEST_F(ParityTest, OfEmbeddings) {
  compare(variant("embedding, full, evaluated"), layout("dp2 x fsdp2"), kFloat64);
  compare(variant("embedding, full, evaluated"), layout("cp2"), kFloat64);
  compare(variant("embedding, full, evaluated"), layout("pp2 x cp2"), kFloat32);
  compare(variant("embedding, LoRA, fewer rows than ranks"), layout("tp2 x fsdp2"), kFloat64);
  compare(variant("embedding, LoRA, fewer rows than ranks"), layout("dp2 x fsdp2"), kFloat64);
}

TEST_F(ParityTest, OfPreferences) {
  compare(variant("dpo, full, evaluated"), layout("dp2 x fsdp2"), kFloat64);
  compare(variant("dpo, full, evaluated"), layout("tp2 x cp2"), kFloat64);
  compare(variant("dpo, full, evaluated"), layout("pp2 x cp2"), kFloat64);
  compare(variant("dpo, LoRA, fewer rows than ranks"), layout("tp2 x fsdp2"), kFloat64);
  compare(variant("dpo, LoRA, fewer rows than ranks"), layout("cp3"), kFloat64);
  compare(variant("moe, dpo, LoRA"), experts("fsdp2 ep2"), kFloat64);
  compare(variant("orpo, full, evaluated"), layout("tp2 x cp2"), kFloat64);
  compare(variant("orpo, full, evaluated"), layout("dp2 x fsdp2"), kFloat64);
  compare(variant("orpo, full, evaluated"), layout("pp2 x cp2"), kFloat64);
  compare(variant("moe, simpo, LoRA, fewer rows than ranks"), experts("fsdp2 ep2"), kFloat64);
  compare(variant("reward, full, evaluated"), layout("tp2 x cp2"), kFloat64);
  compare(variant("reward, full, evaluated"), layout("pp2 interleaved"), kFloat64);
}

TEST_F(ParityTest, OfExperts) {
  compare(variant("moe, full"), experts("dp2 ep2"), kFloat64);
  compare(variant("moe, full"), experts("fsdp2 x dp2 ep4"), kFloat32);
  compare(variant("moe, full"), experts("tp2 ep2"), kFloat64);
  compare(variant("moe, full, accumulated, recomputed"), experts("fsdp2 x dp2 ep2"), kFloat64);
  compare(variant("moe, LoRA on experts, recomputed"), experts("cp2 ep2"), kFloat64);
  compare(variant("moe, LoRA on experts, recomputed"), experts("pp2 x fsdp2 ep2"), kFloat64);
  for (const char* name : {"tp2 ep2", "fsdp2 ep2", "pp2 x fsdp2 ep2"})
    compare(variant("moe, LoRA on experts that share factors"), experts(name), kFloat64);
  compare(variant("moe, LoRA on experts that share factors"), layout("tp2 x fsdp2"), kFloat64);
}

// Matrices come together from what the ranks hold of them; noise, rates, skipped steps and cosines
// of gradients are those of one rank.
TEST_F(ParityTest, OfTrainingOptions) {
  for (const char* name : {"dp2", "tp2 x fsdp2", "tp4", "pp2 x cp2"})
    compare(variant("dense, Muon, noisy embeddings, rates by group"), layout(name), kFloat64);
  for (const char* name : {"fsdp2 ep2", "tp2 x dp2 ep4"})
    compare(variant("moe, Muon, noisy embeddings, untied rates"), experts(name), kFloat64);
  compare(variant("dense, LoRA+ by Muon"), layout("tp2 x pp2"), kFloat64);
  const auto& cosines = steps_of(variant("dense, LoRA+ by Muon"), kOneRank, kFloat64);
  ASSERT_EQ(cosines.size(), steps_);
  EXPECT_EQ(cosines[0].grad_cos_prev, 0);
  for (std::size_t i = 1; i < cosines.size(); ++i) EXPECT_NE(cosines[i].grad_cos_prev, 0) << i;
}

// A family without Gated DeltaNet, output gates and shared experts.
TEST_F(ParityTest, OfQwen3) {
  for (const char* name : {"tp4", "pp2 x cp2", "ulysses2 x dp2"})
    compare(variant("qwen3, full"), layout(name), kFloat64);
  compare(variant("qwen3, LoRA, recomputed"), layout("tp2 x fsdp2"), kFloat64);
  compare(variant("qwen3_vl, full"), layout("tp2 x fsdp2"), kFloat64);
  compare(variant("qwen3_vl, full"), layout("pp2 x cp2"), kFloat64);
  compare(variant("qwen3_moe, full"), experts("tp2 ep2"), kFloat64);
  compare(variant("qwen3_moe, full"), layout("pp2 x fsdp2"), kFloat64);
  compare(variant("qwen3_moe, LoRA on experts, recomputed"), experts("cp2 ep2"), kFloat64);
}

// Over all ranks the statistics of one rank with the same step in one micro-batch.
TEST_F(ParityTest, OfPooledBalance) {
  compare(kPooledBalance, layout("dp2 x fsdp2"), kFloat64);
  compare(kPooledBalance, layout("tp2 x cp2"), kFloat64);
  compare(kPooledBalance, experts("fsdp2 ep2"), kFloat64);
  compare(kPooledBalance, layout("pp2 x fsdp2"), kFloat64);
  // Stages alone cut nothing.
  Variant several = kPooledBalance;
  several.name = "moe, full, pooled balance, accumulated";
  several.overrides[2] = "train.micro_batch_tokens=64";
  compare(several, layout("pp2 interleaved"), kFloat64);
  compare(several, layout("pp4"), kFloat64);
}

Layout on_npus(Layout layout, const char* simulation = "1") {
  layout.simulation = simulation;
  return layout;
}

/// A variant in the layouts of several simulated NPUs in which it is compared.
struct NpuRow {
  const char* variant;
  std::vector<Layout> layouts;
};
const std::vector<NpuRow>& npu_rows() {
  static const std::vector<NpuRow> rows = {
      {"dense, full",
       {layout("tp2"), layout("cp2"), layout("ulysses2"), layout("pp2"), layout("fsdp2")}},
      {"dense, LoRA", {layout("tp2"), layout("cp2")}},
      {"dense, full, unpacked, accumulated", {layout("pp2")}},
      {"moe, full", {experts("dp2 ep2"), experts("cp2 ep2"), layout("tp2"), layout("pp2")}},
      {"moe, LoRA on experts, recomputed", {experts("tp2 ep2")}},
      {"qwen3, full", {layout("tp2")}},
      {"qwen3_moe, full", {experts("cp2 ep2")}},
  };
  return rows;
}

// With the kernels and the process groups of an NPU, against one NPU.
TEST_F(ParityTest, OfSimulatedNpus) {
  for (const NpuRow& row : npu_rows()) {
    for (const Layout& several : row.layouts)
      compare(variant(row.variant), on_npus(several), kLooseFloat32, on_npus(kOneRank));
  }
}

// Values for which a stream has not been waited read as NaN.
TEST_F(ParityTest, OfSimulatedNpusWhoseStreamsAreLate) {
  for (const auto& [name, several] :
       {std::pair{"dense, full", layout("tp2")}, {"moe, full", experts("dp2 ep2")}}) {
    compare(variant(name), on_npus(several, "deferred"), kLooseFloat32, on_npus(kOneRank));
  }
}

// One NPU against one CPU, whose kernels are others. Gradients:
// SimulatedModel.GradientsEqualTheCpus.
TEST_F(ParityTest, OfOneSimulatedNpuAndOneCpu) {
  for (const NpuRow& row : npu_rows())
    compare(variant(row.variant), on_npus(kOneRank), kLooseFloat32);
  compare(variant("dense, full, recomputed"), on_npus(kOneRank), kLooseFloat32);
}

class SlowParityTest : public ParityTest {
 protected:
  static void SetUpTestSuite() {
    ParityTest::SetUpTestSuite();
    steps_ = 10;
  }
};

// The rule of dtypes lifted: NPUs against one CPU.
TEST_F(SlowParityTest, OfSimulatedNpusInFloat64) {
  for (const NpuRow& row : npu_rows()) {
    compare(variant(row.variant), on_npus(kOneRank, "float64"), kFloat64);
    for (const Layout& several : row.layouts)
      compare(variant(row.variant), on_npus(several, "float64"), kFloat64);
  }
}

// Every layout: dense and with experts, full weights and LoRA, packed and not, with accumulation.
TEST_F(SlowParityTest, Table) {
  const auto compare_in = [](const std::vector<Layout>& layouts,
                             std::initializer_list<const char*> variants) {
    for (const Layout& layout : layouts) {
      for (const char* name : variants) compare(variant(name), layout, kFloat64);
      compare(variant(*variants.begin()), layout, kFloat32);
    }
  };
  compare_in(kLayouts, {"dense, full", "dense, LoRA", "moe, full, accumulated, recomputed"});
  compare_in(kExpertLayouts, {"moe, full", "moe, LoRA on experts, recomputed",
                              "moe, LoRA on experts that share factors"});
}

TEST_F(SlowParityTest, AllLayouts) {
  for (const Variant& variant : kVariants) {
    for (const Layout& layout : kLayouts) {
      compare(variant, layout, kFloat64);
      compare(variant, layout, kFloat32);
    }
  }
}

TEST_F(SlowParityTest, AllExpertLayouts) {
  for (const Variant& variant : kVariants) {
    if (!has_experts(variant)) continue;
    for (const Layout& layout : kExpertLayouts) {
      compare(variant, layout, kFloat64);
      compare(variant, layout, kFloat32);
    }
  }
}

}  // namespace
}  // namespace heddle
