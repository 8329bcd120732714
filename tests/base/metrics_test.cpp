#include "base/metrics.h"

#include <set>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "base/files.h"
#include "testing/paths.h"

namespace heddle {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> names_of(const Metrics& metrics) {
  std::vector<std::string> names;
  for (const Metrics::Entry& entry : metrics) names.push_back(entry.name);
  return names;
}

TEST(Metrics, KeepTheOrderAndTheLastValue) {
  Metrics metrics;
  metrics.set(metric::kKl, 1);
  metrics.set(metric::kEntropy, 2);
  metrics.set(metric::kKl, 3);
  EXPECT_THAT(names_of(metrics), ElementsAre("kl", "entropy"));
  EXPECT_EQ(metrics.at(metric::kKl), 3);
  EXPECT_EQ(metrics.find(metric::kAuxLoss), nullptr);
  EXPECT_THROW(metrics.at(metric::kAuxLoss), InternalError);
}

TEST(Metrics, NamePartsAndEvaluations) {
  Metrics held_out, metrics;
  held_out.set(metric::kAccuracy, 0.5);
  metrics.set(metric::kRewardPart, "format", 0.25);
  metrics.add_evaluation(held_out);
  EXPECT_THAT(names_of(metrics), ElementsAre("reward_format", "eval_accuracy"));
  EXPECT_EQ(metrics.begin()->metric, &metric::kRewardPart);
  EXPECT_THROW(metrics.set(metric::kLoss, "part", 1), InternalError);
}

TEST(Metrics, AreEachDeclaredOnce) {
  std::set<std::string_view> names;
  for (const Metric* metric : all_metrics()) {
    EXPECT_TRUE(names.insert(metric->name).second) << metric->name;
    EXPECT_FALSE(metric->meaning.empty()) << metric->name;
  }
}

/// docs/metrics.md is what the program prints.
TEST(Metrics, AreDocumented) {
  EXPECT_EQ(files::read(testing::source_path("docs/metrics.md")), metrics_document());
}

}  // namespace
}  // namespace heddle
