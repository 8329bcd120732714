// heddle bench of single operators, on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "cli/run_command.h"

namespace heddle::cli {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

const std::vector<std::string> kOnCpu = {"--json", "device=cpu", "model.dtype=float32",
                                         "device.threads=1"};

json bench(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "bench");
  arguments.insert(arguments.end(), kOnCpu.begin(), kOnCpu.end());
  const Outcome outcome = run_command(arguments);
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  return json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
}

std::vector<std::string> names_of(const json& calls) {
  std::vector<std::string> names;
  for (const json& call : calls) {
    names.push_back(call["name"]);
    EXPECT_GT(call["ms"], 0);
    EXPECT_GT(call["roofline"], 0);
  }
  return names;
}

TEST(BenchOperators, TimesForwardAndBackward) {
  const json result = bench({"gdn", "--preset", "small-10m", "--batch", "2", "--length", "40",
                             "train.deterministic=true", "kernels.fallback=allow"});
  ASSERT_EQ(result["cases"].size(), 1u);
  EXPECT_EQ(result["cases"][0]["name"], "4/8 heads of 64, 2 x 40");
  EXPECT_EQ(names_of(result["cases"][0]["calls"]),
            (std::vector<std::string>{"forward", "backward", "inference"}));
}

TEST(BenchOperators, TimesThePublishedShapesThatAreChosen) {
  const json result = bench({"gdn", "--heads", "2/8", "--layout", "1 x 2048"});
  ASSERT_EQ(result["cases"].size(), 1u);
  EXPECT_EQ(result["cases"][0]["name"], "2/8 heads of 128, 1 x 2048");
}

TEST(BenchOperators, ShowsErrorsAgainstDouble) {
  const json preset = bench({"gdn", "--preset", "small-10m", "--check", "--length", "100"});
  const json heads = bench({"gdn", "--heads", "2/4", "--check", "--length", "100"});
  EXPECT_EQ(preset["errors"][0]["heads"], "4/8");
  EXPECT_EQ(preset["errors"][0]["head_dim"], 64);
  EXPECT_EQ(heads["errors"][0]["heads"], "2/4");
  EXPECT_EQ(heads["errors"][0]["head_dim"], 128);
  for (const json& result : {preset, heads}) {
    ASSERT_EQ(result["errors"].size(), 4u);
    std::vector<std::string> data;
    for (const json& one : result["errors"]) {
      data.push_back(one["data"]);
      EXPECT_EQ(one["length"], 100);
      ASSERT_EQ(one["error"].size(), 7u);
      for (const char* name : {"o", "dq", "dk", "dv", "dg", "dbeta", "dS0"}) {
        EXPECT_LT(one["error"][name], 1e-4) << data.back() << " " << name;
        EXPECT_GT(one["error"][name], 0) << data.back() << " " << name;
      }
    }
    EXPECT_EQ(data, (std::vector<std::string>{"logsigmoid/16", "no decay", "strong gate",
                                              "correlated keys"}));
  }
}

TEST(BenchOperators, TakesEveryWork) {
  const std::vector<std::string> shape = {"--preset", "small-10m", "--batch",
                                          "2",        "--length",  "40"};
  const auto at_shape = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), shape.begin(), shape.end());
    return bench(arguments);
  };
  EXPECT_EQ(at_shape({"gemm"})["cases"].size(), 6u);
  EXPECT_EQ(at_shape({"head"})["cases"].size(), 1u);
  const json ragged = at_shape({"attention", "--median", "9"});
  EXPECT_THAT(ragged["cases"][0]["name"].get<std::string>(), HasSubstr("80 tokens in "));
  const json adapters = at_shape({"lora", "adapter.rank=4"});
  ASSERT_EQ(adapters["cases"].size(), 6u);
  EXPECT_THAT(adapters["cases"][0]["name"].get<std::string>(), HasSubstr(", rank 4"));
  EXPECT_EQ(names_of(adapters["cases"][0]["calls"]),
            (std::vector<std::string>{"forward", "input gradient", "adapter gradients, library",
                                      "adapter gradients"}));
  const json adamw = bench({"adamw", "--preset", "small-10m"});
  ASSERT_EQ(adamw["cases"].size(), 1u);
  EXPECT_EQ(names_of(adamw["cases"][0]["calls"]), (std::vector<std::string>{"step"}));
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

/// A shape that does not fit is timed on its first layers: three of four are of the gated delta
/// rule.
TEST(BenchStep, TrainsTheFirstLayersOfAShape) {
  const auto step = [](const std::string& layers) {
    return run_command({"bench", "step", "--json", "--preset", "small-moe", "--layers", layers,
                        "--length", "16", "--steps", "1", "--warmup", "0", "device.threads=1"});
  };
  const Outcome three = step("3"), eight = step("8");
  ASSERT_EQ(three.status, 0) << three.err;
  ASSERT_EQ(eight.status, 0) << eight.err;
  EXPECT_EQ(json::parse(three.out)["layers"], 3);
  EXPECT_THAT(three.out, ::testing::Not(HasSubstr("\"attention: ")));
  EXPECT_THAT(eight.out, HasSubstr("\"attention: "));
  const Outcome nine = step("9");
  EXPECT_EQ(nine.status, 2);
  EXPECT_THAT(nine.err, HasSubstr("bench step: --layers 9: small-moe has 8"));
}

TEST(BenchOperators, SaysWhatIsWrong) {
  EXPECT_THAT(run_command({"bench", "gdm"}).err, HasSubstr("expected step, generate, gdn, gemm"));
  EXPECT_THAT(run_command({"bench", "gemm"}).err, HasSubstr("bench gemm: --preset is missing"));
  const Outcome dense = run_command({"bench", "experts", "--preset", "small-10m"});
  EXPECT_EQ(dense.status, 2);
  EXPECT_THAT(dense.err, HasSubstr("the preset has no experts"));
  EXPECT_THAT(run_command({"bench", "gdn", "--heads", "3/7"}).err, HasSubstr("found '3/7'"));
  EXPECT_THAT(run_command({"bench", "gdn", "--heads", "3/6"}).err,
              HasSubstr("--heads: no published shape has '3/6'; known: 16/32, "));
  EXPECT_THAT(run_command({"bench", "gdn", "--layout", "1+2"}).err,
              HasSubstr("--layout: no published shape has '1+2'; known: 4 x 8192, "));
  EXPECT_THAT(run_command({"bench", "gdn", "--heads", "2/4", "--layout", "28672+4096"}).err,
              HasSubstr("no published shape has both --heads 2/4 and --layout 28672+4096"));
}

/// Options that a benchmark would ignore are refused, with the benchmarks that take them.
TEST(BenchOperators, RefusesOptionsOfOtherBenchmarks) {
  const auto refused = [](std::vector<std::string> arguments, const std::string& message) {
    arguments.insert(arguments.begin(), "bench");
    const Outcome outcome = run_command(arguments);
    EXPECT_EQ(outcome.status, 2) << message;
    EXPECT_THAT(outcome.err, HasSubstr(message));
  };
  const std::string preset = "--preset=small-10m";
  refused({"head", preset, "--median", "9"},
          "bench head: --median is an option of bench step, gdn, attention");
  refused({"gemm", preset, "--check"}, "bench gemm: --check is an option of bench gdn");
  refused({"step", preset, "--heads", "16/32"}, "bench step: --heads is an option of bench gdn");
  refused({"adamw", preset, "--batch", "2"},
          "bench adamw: --batch is an option of bench step, generate, gdn, gemm");
  for (const char* option :
       {"--layers=2", "--micro-batches=2", "--steps=2", "--warmup=2", "--profile=x"}) {
    const std::string name = std::string(option).substr(0, std::string(option).find('='));
    refused({"attention", preset, option},
            "bench attention: " + name + " is an option of bench step");
  }
  refused({"gdn", "--batch", "2"}, "bench gdn: --batch has no effect without --preset");
  refused({"gdn", "--length", "64"}, "bench gdn: --length has no effect without --preset");
  refused({"gdn", preset, "--layout", "1 x 2048"}, "bench gdn: --layout has no effect beside");
  refused({"gdn", preset, "--check", "--batch", "2"}, "bench gdn: --batch has no effect beside");
  refused({"gemm", preset, "train.method=lora"},
          "bench gemm: train.method has no effect on single operators");
  refused({"gemm", preset, "adapter.rank=8"}, "bench gemm: adapter.rank has no effect");
}

TEST(BenchGenerate, TimesTheFirstTokenAndTheRest) {
  const json result = bench(
      {"generate", "--preset", "small-10m", "--batch", "3", "--length", "9", "--new-tokens", "5"});
  ASSERT_EQ(result["points"].size(), 1u);
  EXPECT_GT(result["points"][0]["first_token_ms"], 0);
  EXPECT_GT(result["points"][0]["tokens_per_s"], 0);
  EXPECT_GT(result["points"][0]["traffic_gb"], 0);
  EXPECT_GT(result["points"][0]["share_of_copy"], 0);
  EXPECT_THAT(result["steps"], HasSubstr("launched"));
  EXPECT_THAT(result["kernels"], ::testing::Contains("attention_decode: cpu"));
}

TEST(BenchGenerate, CountsHalfTheTrafficOfStatesOfBf16) {
  const auto traffic = [](const std::string& dtype) {
    const json result = bench({"generate", "--preset", "small-10m", "--sweep", "1x9x2,33x9x2",
                               "rollout.state_dtype=" + dtype});
    EXPECT_EQ(result["state_dtype"], dtype);
    return result["points"][1]["traffic_gb"].get<double>() -
           result["points"][0]["traffic_gb"].get<double>();
  };
  // Convolutions, keys and values of some tokens are small beside them.
  EXPECT_NEAR(traffic("bfloat16") / traffic("float32"), 0.5, 0.1);
}

TEST(BenchGenerate, SweepsOverPoints) {
  const json result = bench({"generate", "--preset", "small-10m", "--samples", "2", "--top-k", "20",
                             "--sweep", "4x9x5,2x33x3", "model.dtype=float32"});
  ASSERT_EQ(result["points"].size(), 2u);
  EXPECT_EQ(result["points"][1]["length"], 33);
  EXPECT_EQ(result["points"][1]["samples"], 2);
  EXPECT_GT(result["points"][1]["tokens_per_s"], 0);
}

TEST(BenchGenerate, CountsTheExpertsThatAStepReads) {
  const json result =
      bench({"generate", "--preset", "small-moe", "--sweep", "1x9x2,2x9x2,63x9x2,64x9x2"});
  const auto traffic = [&](std::size_t point) {
    return result["points"][point]["traffic_gb"].get<double>();
  };
  // States grow with each sequence alike; the second one chooses experts that the first does not,
  // the last one hardly any that nobody has.
  EXPECT_GT(traffic(1) - traffic(0), 2 * (traffic(3) - traffic(2)));
}

}  // namespace
}  // namespace heddle::cli
