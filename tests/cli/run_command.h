#pragma once

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "cli/application.h"

namespace heddle::cli {

struct Outcome {
  int status = 0;
  std::string out;
  std::string err;
};

/// Runs a command line inside the test.
inline Outcome run_command(const std::vector<std::string>& arguments) {
  std::ostringstream out;
  const Session session{out};
  ::testing::internal::CaptureStderr();
  Outcome outcome;
  outcome.status = run(arguments, session);
  outcome.err = ::testing::internal::GetCapturedStderr();
  outcome.out = out.str();
  return outcome;
}

}  // namespace heddle::cli
