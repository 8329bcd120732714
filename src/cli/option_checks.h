#pragma once

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <string>
#include <system_error>

#include "base/quote.h"
#include "data/tokenizer/utf8.h"

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

/// A text with something in it, in UTF-8.
inline CLI::Validator not_empty() {
  return {[](const std::string& word) -> std::string {
            if (word.empty()) return "expected a text, found none";
            if (data::utf8::valid_prefix(word) == word.size()) return "";
            return fmt::format("expected UTF-8, found {}", text::shown(word));
          },
          ""};
}

/// CLI11 takes the largest seed for one beyond it.
inline CLI::Validator seed_of_64_bits() {
  return {[](const std::string& word) -> std::string {
            std::uint64_t seed = 0;
            const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), seed);
            if (error == std::errc() && end == word.data() + word.size()) return "";
            return fmt::format("expected a whole number from 0 to 2^64 - 1, found {}",
                               text::shown(word));
          },
          ""};
}

}  // namespace heddle::cli
