#include <ATen/ops/cat.h>

#include "ops/collectives.h"
#include "ops/context_parallel/context_parallel.h"

namespace heddle::ops {
namespace {

/// Tokens of each rank.
std::vector<std::int64_t> token_counts(const ContextPlan& plan) {
  std::vector<std::int64_t> counts;
  for (std::int64_t rank = 0; rank < plan.ranks(); ++rank) counts.push_back(plan.tokens(rank));
  return counts;
}

std::vector<std::int64_t> own_count_for_each(const ContextPlan& plan) {
  return std::vector<std::int64_t>(plan.ranks(), plan.tokens(plan.rank()));
}

}  // namespace

std::vector<at::Tensor> tokens_to_heads(const std::vector<at::Tensor>& parts,
                                        const ContextParallel& context) {
  const ContextPlan& plan = context.plan;
  const std::int64_t n = plan.ranks(), T = plan.tokens(plan.rank());
  std::vector<at::Tensor> columns;
  std::vector<std::int64_t> widths;
  for (const at::Tensor& part : parts) {
    TORCH_CHECK(part.dim() == 2 && part.size(0) == T && part.size(1) % n == 0,
                "tokens_to_heads: ", part.sizes(), " must be [", T, ", a multiple of ", n, "]");
    widths.push_back(part.size(1) / n);
    columns.push_back(part.reshape({T, n, widths.back()}));
  }
  // [n, T, C/n]: what goes to each rank lies together.
  const at::Tensor outgoing = at::cat(columns, 2).transpose(0, 1);
  const at::Tensor all =
      all_to_all_rows(outgoing.reshape({n * T, outgoing.size(2)}), own_count_for_each(plan),
                      token_counts(plan), context.group);
  return all.split_with_sizes(widths, 1);
}

at::Tensor heads_to_tokens(const at::Tensor& x, const ContextParallel& context) {
  const ContextPlan& plan = context.plan;
  const std::int64_t n = plan.ranks(), T = plan.tokens(plan.rank());
  const at::Tensor own =
      all_to_all_rows(x, token_counts(plan), own_count_for_each(plan), context.group);
  return own.view({n, T, x.size(1)}).transpose(0, 1).reshape({T, n * x.size(1)});
}

}  // namespace heddle::ops
