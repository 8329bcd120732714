// heddle bench of single operators, on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/run_command.h"

namespace heddle::cli {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

json bench(const std::string& work, const std::vector<std::string>& arguments = {}) {
  std::vector<std::string> all = {
      "bench", work,     "--preset",   "small-10m",           "--batch",         "2", "--length",
      "40",    "--json", "device=cpu", "model.dtype=float32", "device.threads=1"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  const Outcome outcome = run_command(all);
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  return json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
}

TEST(BenchOperators, TimesForwardAndBackwardAndShowsErrors) {
  const json result = bench("gdn", {"--check"});
  ASSERT_EQ(result["cases"].size(), 1u);
  EXPECT_EQ(result["cases"][0]["name"], "4/8 heads of 64, 2 x 40");
  std::vector<std::string> names;
  for (const json& call : result["cases"][0]["calls"]) {
    names.push_back(call["name"]);
    EXPECT_GT(call["ms"], 0);
    EXPECT_GT(call["roofline"], 0);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"forward", "backward", "inference"}));
  for (const char* data : {"logsigmoid/16", "no decay", "strong gate", "correlated keys"}) {
    for (const char* name : {"o", "dq", "dk", "dv", "dg", "dbeta"})
      EXPECT_LT(result["error"][data][name], 1e-4) << data << " " << name;
  }
}

TEST(BenchOperators, TakesEveryWork) {
  EXPECT_EQ(bench("gemm")["cases"].size(), 6u);
  EXPECT_EQ(bench("head")["cases"].size(), 1u);
  const json ragged = bench("attention", {"--median", "9"});
  EXPECT_THAT(ragged["cases"][0]["name"], HasSubstr("80 tokens in "));
}

TEST(BenchStep, TrainsOnPacksWithDropout) {
  const Outcome outcome =
      run_command({"bench", "step", "--json", "--preset", "small-10m", "--batch", "2", "--length",
                   "40", "--median", "9", "--steps", "1", "--warmup", "1", "train.method=lora",
                   "adapter.dropout=0.1", "train.recompute=elementwise", "device.threads=1"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json result = json::parse(outcome.out);
  EXPECT_EQ(result["median"], 9);
  EXPECT_EQ(result["tokens_per_step"], 80);
  EXPECT_NEAR(result["loss"][0], result["loss"][1], 0.5);
}

TEST(BenchOperators, SaysWhatIsWrong) {
  EXPECT_THAT(run_command({"bench", "gdm"}).err, HasSubstr("expected step, gdn, gemm"));
  EXPECT_THAT(run_command({"bench", "gemm"}).err, HasSubstr("bench gemm: --preset is missing"));
  const Outcome dense = run_command({"bench", "experts", "--preset", "small-10m"});
  EXPECT_EQ(dense.status, 2);
  EXPECT_THAT(dense.err, HasSubstr("the preset has no experts"));
}

}  // namespace
}  // namespace heddle::cli
