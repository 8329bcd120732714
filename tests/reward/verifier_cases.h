#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "reward/verifiers.h"

namespace heddle::reward::testing {

/// One line of a table: what was printed, the truth as JSON, and whether it is right.
struct Case {
  std::string completion, truth;
  double reward;
};

inline double judged(const std::string& verifier, const std::string& parameters, const Case& one) {
  Sample sample;
  sample.completion = one.completion;
  sample.truth = Json::parse(one.truth);
  const Score score = make_verifier(verifier, Json::parse(parameters), "test")->judge(sample);
  EXPECT_FALSE(score.error) << *score.error;
  return score.reward;
}

inline void expect_all(const std::string& verifier, const std::string& parameters,
                       const std::vector<Case>& cases) {
  for (const Case& one : cases) {
    EXPECT_DOUBLE_EQ(judged(verifier, parameters, one), one.reward)
        << verifier << ' ' << parameters << ": '" << one.completion << "' for " << one.truth;
  }
}

}  // namespace heddle::reward::testing
