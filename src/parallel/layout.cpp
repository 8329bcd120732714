#include "parallel/layout.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"

namespace heddle::parallel {
namespace {

using Counts = std::vector<std::pair<std::string, std::int64_t>>;

/// What the ranks along tp must divide.
Counts divided_by_tp(const models::qwen3_5::Config& model) {
  const auto any = [](const std::vector<bool>& flags, bool value) {
    return std::find(flags.begin(), flags.end(), value) != flags.end();
  };
  Counts counts;
  if (any(model.full_attention, true)) {
    counts.emplace_back("num_attention_heads", model.num_attention_heads);
    counts.emplace_back("num_key_value_heads", model.num_key_value_heads);
  }
  if (any(model.full_attention, false))
    counts.emplace_back("linear_num_key_heads", model.linear_num_key_heads);
  if (any(model.sparse_mlp, false))
    counts.emplace_back("intermediate_size", model.intermediate_size);
  if (any(model.sparse_mlp, true)) {
    counts.emplace_back("shared_expert_intermediate_size", model.shared_expert_intermediate_size);
  }
  return counts;
}

/// What the ranks along tp and cp together must divide when heads move to ranks; key/value heads
/// are repeated where they are too few.
Counts divided_by_ulysses(const models::qwen3_5::Config& model) {
  return {{"num_attention_heads", model.num_attention_heads},
          {"linear_num_key_heads", model.linear_num_key_heads}};
}

bool divides_all(std::int64_t degree, const Counts& counts) {
  return std::all_of(counts.begin(), counts.end(),
                     [&](const auto& count) { return count.second % degree == 0; });
}

std::vector<std::string> not_divided(std::int64_t degree, const Counts& counts) {
  std::vector<std::string> wrong;
  for (const auto& [name, count] : counts) {
    if (count % degree != 0) wrong.push_back(fmt::format("{} {}", name, count));
  }
  return wrong;
}

/// The legal degree closest to the one that was asked for, the smaller of two.
std::int64_t nearest_degree(std::int64_t wanted, const Counts& counts) {
  std::int64_t nearest = 1;
  for (std::int64_t degree = 1; degree <= counts.front().second; ++degree) {
    if (divides_all(degree, counts) && std::abs(degree - wanted) < std::abs(nearest - wanted))
      nearest = degree;
  }
  return nearest;
}

}  // namespace

void check_layout(const comm::Mesh& mesh, const models::qwen3_5::Config& model,
                  ops::ContextMethod context_method) {
  const std::int64_t tp = mesh.size(comm::Dim::kTp), cp = mesh.size(comm::Dim::kCp);
  if (const Counts counts = divided_by_tp(model); !divides_all(tp, counts)) {
    throw_error<ConfigError>(
        "parallel.tp is {}: it must divide {}; the nearest degree that does is {}", tp,
        fmt::join(not_divided(tp, counts), " and "), nearest_degree(tp, counts));
  }
  if (cp == 1 || context_method != ops::ContextMethod::kUlysses) return;
  Counts counts = divided_by_ulysses(model);
  if (divides_all(tp * cp, counts)) return;
  const std::vector<std::string> wrong = not_divided(tp * cp, counts);
  for (auto& [name, count] : counts) count /= tp;
  throw_error<ConfigError>(
      "parallel.cp is {} with parallel.cp_method ulysses: tp x cp, {}, must divide {}; the nearest "
      "degree that does is {}, and cp_method state takes any",
      cp, tp * cp, fmt::join(wrong, " and "), nearest_degree(cp, counts));
}

}  // namespace heddle::parallel
