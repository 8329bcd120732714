#include <algorithm>
#include <array>
#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/rng.h"
#include "reward/verifiers.h"

namespace heddle::reward {
namespace {

/// Texts that verifiers look for, and texts that break readers.
constexpr std::array<std::string_view, 72> kFragments{
    "\\boxed{",  "{",       "}",        "\\frac",    "\\frac{1}{2}",
    "(",         ")",       "[",        "]",         "\\{",
    "\\}",       "\\left",  "\\right",  "\\text{",   "cm",
    "\\sqrt",    "\\sqrt[", "^",        "_",         "^{",
    "1",         "2",       "17",       "1,000",     ",",
    ".",         ".5",      "1e9",      "1e999",     "-",
    "\u2212",    "+",       "*",        "/",         "=",
    "x",         "y",       "\\pi",     "\\sin",     "\\log_",
    "|",         "!",       "%",        "\\%",       "$",
    "####",      "\n",      " ",        "\t",        "<answer>",
    "</answer>", "<think>", "</think>", "answer is", "A",
    "(B)",       "C, D",    "```json",  "```",       "\"",
    ":",         "null",    "\\cup",    "\\infty",   "\\binom",
    "\\in",      "\\",      "\xff",     "\u00e9",    "e\u0301",
    "aaaa",      "0"};

class Inputs {
 public:
  explicit Inputs(std::uint64_t seed) : random_(seed, "verifier inputs") {}
  std::uint64_t below(std::uint64_t bound) { return random_.below(drawn_++, bound); }

  std::string text(bool may_be_long) {
    std::string text;
    // One in a thousand repeats something up to the length that is looked at.
    if (may_be_long && below(1000) == 0) {
      const std::string piece = pieces(1 + below(4));
      while (text.size() < kBytesLookedAt) text += piece;
      return text + pieces(below(4));
    }
    return pieces(below(below(8) == 0 ? 200 : 20));
  }

 private:
  std::string pieces(std::uint64_t count) {
    std::string text;
    for (std::uint64_t k = 0; k < count; ++k) text += kFragments[below(kFragments.size())];
    return text;
  }

  CounterRng random_;
  std::uint64_t drawn_ = 0;
};

std::vector<std::unique_ptr<Verifier>> verifiers() {
  std::vector<std::unique_ptr<Verifier>> all;
  for (const auto& [name, parameters] : std::vector<std::pair<std::string, std::string>>{
           {"exact", R"({"ignore_case": true})"},
           {"contains", "{}"},
           {"numeric", "{}"},
           {"numeric", R"({"from": "last"})"},
           {"math", "{}"},
           {"math", R"({"from": "whole"})"},
           {"choice", "{}"},
           {"regex", R"j({"pattern": "(x+x+)+y|answer is (\\w)"})j"},
           {"regex", R"j({"pattern": "[^:]+: .*", "match": "full"})j"},
           {"json", "{}"},
           {"format", "{}"},
           {"repetition", "{}"},
           // Back-tracks to its bound for nearly every text.
           {"regex", R"j({"pattern": "([^}]*)+\\}$"})j"}}) {
    all.push_back(make_verifier(name, Json::parse(parameters), "fuzz"));
  }
  return all;
}

/// Rewards are 0 to 1, the same again, and there within 50 ms of this thread's own time.
void judge_inputs(std::uint64_t count) {
  const auto all = verifiers();
  Inputs inputs(1);
  double slowest = 0;
  for (std::uint64_t k = 0; k < count; ++k) {
    const std::size_t which =
        inputs.below(1000) == 0 ? all.size() - 1 : inputs.below(all.size() - 1);
    Sample sample;
    sample.completion = inputs.text(true);
    std::string truth = inputs.text(false);
    if (inputs.below(4) == 0 && sample.completion.size() < 200) truth = sample.completion;
    // A truth is read from a file of JSON, so it is UTF-8.
    std::replace(truth.begin(), truth.end(), '\xff', '?');
    sample.truth = truth;
    timespec begin{}, end{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
    const Score score = all[which]->judge(sample);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    const double seconds = static_cast<double>(end.tv_sec - begin.tv_sec) +
                           1e-9 * static_cast<double>(end.tv_nsec - begin.tv_nsec);
    slowest = std::max(slowest, seconds);
    ASSERT_LT(seconds, 0.05) << "verifier " << which << ", " << sample.completion.size()
                             << " bytes: " << sample.completion.substr(0, 300) << " for " << truth;
    ASSERT_TRUE(score.reward >= 0 && score.reward <= 1);
    if (k % 64 == 0) {
      ASSERT_EQ(all[which]->judge(sample).reward, score.reward);
    }
    if ((k + 1) % 1'000'000 == 0) {
      std::printf("%llu inputs, the slowest took %.1f ms\n", static_cast<unsigned long long>(k + 1),
                  slowest * 1000);
      std::fflush(stdout);
    }
  }
}

TEST(Verifiers, AnswerRandomInputs) { judge_inputs(5'000); }

TEST(FuzzVerifiers, AnswerTenMillionInputs) { judge_inputs(10'000'000); }

}  // namespace
}  // namespace heddle::reward
