#pragma once

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <string>

#include "base/quote.h"

/// Checks of options' values. CLI11's own, CLI::PositiveNumber and CLI::NonNegativeNumber, write
/// their upper bound into the error, which has 309 digits, and it reads -1 as 2^64 - 1 where a
/// number has no sign.
namespace heddle::cli {

inline CLI::Validator above_zero() {
  return {[](const std::string& word) -> std::string {
            double number = 0;
            if (CLI::detail::lexical_cast(word, number) && number > 0) return "";
            return fmt::format("expected a number above 0, found {}", text::shown(word));
          },
          "POSITIVE"};
}

inline CLI::Validator not_below_zero() {
  return {[](const std::string& word) -> std::string {
            double number = 0;
            if (CLI::detail::lexical_cast(word, number) && number >= 0) return "";
            return fmt::format("expected 0 or a number above it, found {}", text::shown(word));
          },
          "NONNEGATIVE"};
}

inline CLI::Validator not_empty() {
  return {[](const std::string& word) -> std::string {
            return word.empty() ? "expected a text, found none" : "";
          },
          ""};
}

}  // namespace heddle::cli
