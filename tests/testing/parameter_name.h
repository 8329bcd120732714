#pragma once

#include <cctype>
#include <string>

#include <gtest/gtest.h>

namespace heddle::testing {

/// Names each case of a parameterised suite as its parameter prints (a type of our own needs a
/// PrintTo); what the name of a test may not hold becomes an underscore.
struct ParameterName {
  template <class T>
  std::string operator()(const ::testing::TestParamInfo<T>& info) const {
    std::string name;
    for (const char c : ::testing::PrintToString(info.param)) {
      const bool is_plain = std::isalnum(static_cast<unsigned char>(c)) != 0;
      if (is_plain) {
        name += c;
      } else if (!name.empty() && name.back() != '_') {
        name += '_';
      }
    }
    if (name.ends_with('_')) name.pop_back();
    return name;
  }
};

}  // namespace heddle::testing
