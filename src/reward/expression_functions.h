#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <string_view>

/// Functions of one number that expressions may call.
namespace heddle::reward {

using Function = double (*)(double);

struct Named {
  std::string_view name;
  Function function;
};
/// A node's `call` is kFirstFunction + the index here.
inline constexpr char kFirstFunction = 1;

inline double cot(double x) { return 1 / std::tan(x); }
inline double sec(double x) { return 1 / std::cos(x); }
inline double csc(double x) { return 1 / std::sin(x); }
inline const std::array<Named, 20> kFunctions{
    {{"arcsin", std::asin}, {"arccos", std::acos}, {"arctan", std::atan}, {"sinh", std::sinh},
     {"cosh", std::cosh},   {"tanh", std::tanh},   {"asin", std::asin},   {"acos", std::acos},
     {"atan", std::atan},   {"sqrt", std::sqrt},   {"sin", std::sin},     {"cos", std::cos},
     {"tan", std::tan},     {"cot", cot},          {"sec", sec},          {"csc", csc},
     {"exp", std::exp},     {"log", std::log10},   {"ln", std::log},      {"abs", std::fabs}}};

}  // namespace heddle::reward
