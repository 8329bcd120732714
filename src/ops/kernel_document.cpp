#include "ops/kernel_document.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/text.h"

namespace heddle::ops {
namespace {

std::string dtype_name(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return "fp32";
    case c10::ScalarType::BFloat16:
      return "bf16";
    case c10::ScalarType::Half:
      return "fp16";
    case c10::ScalarType::Double:
      return "fp64";
    default:
      return c10::toString(dtype);
  }
}

std::string platforms_of(const KernelInfo& info) {
  std::vector<std::string> names;
  for (const Platform platform : info.platforms) names.emplace_back(to_string(platform));
  return names.empty() ? "all" : text::join(names, ", ");
}

std::string rules_of(const KernelInfo& info) {
  std::vector<std::string> rules;
  if (info.is_reference) rules.emplace_back("comes last");
  if (info.only_by_name) rules.push_back(fmt::format("only by `kernels.{}`", info.op));
  if (info.only_for)
    rules.emplace_back(*info.only_for == Use::kTraining ? "training alone" : "generation alone");
  if (!info.falls_back.empty()) rules.push_back("leaves to " + info.falls_back);
  return text::join(rules, "; ");
}

std::string row_of(const KernelInfo& info) {
  std::vector<std::string> dtypes;
  for (const c10::ScalarType dtype : info.dtypes) dtypes.push_back(dtype_name(dtype));
  const std::string rules = rules_of(info);
  return fmt::format("| {} | `{}` | {} | {} |{}|\n", info.op, info.name, platforms_of(info),
                     text::join(dtypes, ", "), rules.empty() ? " " : " " + rules + " ");
}

}  // namespace

std::string kernel_document(const Registry& registry) {
  std::vector<std::string> operators;
  for (const Registry::Entry& entry : registry.entries()) operators.push_back(entry.info.op);
  std::ranges::sort(operators);
  operators.erase(std::unique(operators.begin(), operators.end()), operators.end());
  std::string text = "| operator | kernel | on | dtypes | rule |\n|---|---|---|---|---|\n";
  for (const std::string& op : operators) {
    for (const bool is_reference : {false, true}) {
      for (const Registry::Entry& entry : registry.entries()) {
        if (entry.info.op == op && entry.info.is_reference == is_reference)
          text += row_of(entry.info);
      }
    }
  }
  return text;
}

}  // namespace heddle::ops
