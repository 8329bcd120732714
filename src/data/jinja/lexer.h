#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace heddle::data::jinja {

struct Token {
  enum class Type {
    kData,
    kBlockBegin,
    kBlockEnd,
    kVariableBegin,
    kVariableEnd,
    kName,
    kString,
    kInteger,
    kFloat,
    kOperator,
    kEnd,
  };
  Type type;
  int line;
  std::string text;  // of an operator or name its spelling; of a string its value
  std::int64_t integer = 0;
  double real = 0;
};

/// Cuts a template into tokens with trim_blocks and lstrip_blocks on, as transformers sets them,
/// and without the last line end. Throws DataError with name and line.
std::vector<Token> tokenize(std::string_view source, const std::string& name);

}  // namespace heddle::data::jinja
