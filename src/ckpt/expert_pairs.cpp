#include "ckpt/expert_pairs.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "base/errors.h"
#include "ckpt/checked_tensor.h"

namespace heddle::ckpt {
namespace {

/// "model.layers.0.mlp.experts.3.up_proj" in its parts.
struct ExpertProjection {
  std::string experts;  ///< "model.layers.0.mlp.experts"
  std::int64_t index = 0;
  std::string projection;
};

std::optional<ExpertProjection> parse(const std::string& module) {
  constexpr std::string_view kExperts = ".experts.";
  const std::size_t at = module.rfind(kExperts), dot = module.rfind('.');
  if (at == std::string::npos || dot < at + kExperts.size()) return std::nullopt;
  ExpertProjection parts{module.substr(0, at + kExperts.size() - 1), 0, module.substr(dot + 1)};
  const char* const begin = module.data() + at + kExperts.size();
  const char* const end = module.data() + dot;
  const auto [stop, error] = std::from_chars(begin, end, parts.index);
  const bool is_known = parts.projection == "gate_proj" || parts.projection == "up_proj" ||
                        parts.projection == "down_proj";
  if (error != std::errc() || stop != end || parts.index < 0 || !is_known) return std::nullopt;
  return parts;
}

bool is_down(const LoraPair& pair) { return pair.module.ends_with("down_proj"); }
bool is_up(const LoraPair& pair) { return pair.module.ends_with("up_proj"); }

}  // namespace

std::vector<StackedExperts> stack_experts(std::vector<const LoraPair*>& pairs) {
  std::map<std::string, StackedExperts> by_name;
  std::map<std::string, std::int64_t> gate_rank, up_rank;
  std::erase_if(pairs, [&](const LoraPair* pair) {
    const auto parts = pair->parameter.empty() ? parse(pair->module) : std::nullopt;
    if (!parts) return false;
    const std::string parameter = is_down(*pair) ? "down_proj" : "gate_up_proj";
    const std::string name = parts->experts + "." + parameter;
    StackedExperts& stacked = by_name[name];
    stacked.module = parts->experts;
    stacked.parameter = parameter;
    stacked.pairs.push_back(pair);
    std::int64_t& rank = is_up(*pair) ? up_rank[name] : gate_rank[name];
    rank = std::max(rank, pair->rank);
    return true;
  });
  std::vector<StackedExperts> result;
  for (auto& [name, stacked] : by_name) {
    stacked.rank = gate_rank[name] + up_rank[name];
    result.push_back(std::move(stacked));
  }
  return result;
}

std::pair<at::Tensor, at::Tensor> StackedExperts::factors(std::int64_t experts, std::int64_t out,
                                                          std::int64_t in) const {
  at::Tensor a = at::zeros({experts, rank, in}, at::kDouble),
             b = at::zeros({experts, out, rank}, at::kDouble);
  for (const LoraPair* pair : pairs) {
    const std::int64_t expert = parse(pair->module)->index;
    const std::int64_t rows = is_down(*pair) ? out : out / 2;
    if (expert >= experts || pair->a.shape[1] != in || pair->b.shape[0] != rows) {
      throw_error<ModelError>(
          "the adapter of '{}' has A [{}] and B [{}]: this model has {} experts, of [{}, {}]",
          pair->module, fmt::join(pair->a.shape, ", "), fmt::join(pair->b.shape, ", "), experts,
          rows, in);
    }
    // Gate takes the first ranks and rows, up the last ones.
    const std::int64_t first = is_up(*pair) ? rank - pair->rank : 0;
    const std::int64_t first_row = is_up(*pair) ? out - rows : 0;
    a.select(0, expert).narrow(0, first, pair->rank).copy_(read_finite_tensor(pair->a));
    b.select(0, expert)
        .narrow(0, first_row, rows)
        .narrow(1, first, pair->rank)
        .copy_(read_finite_tensor(pair->b, at::kDouble) * pair->scaling);
  }
  return {a, b};
}

}  // namespace heddle::ckpt
