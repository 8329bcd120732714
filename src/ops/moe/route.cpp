#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "device/upload.h"
#include "ops/autograd.h"
#include "ops/collectives.h"
#include "ops/compute_type.h"
#include "ops/context_parallel/context_parallel.h"
#include "ops/moe/kernels.h"
#include "ops/moe/moe.h"
#include "ops/moe/occurrences.h"

namespace heddle::ops {
namespace {

/// The k largest of one row in falling order; of equals, and of NaN, the lower index comes first.
template <class C>
void top_k_of_row(const C* row, std::int64_t width, std::int64_t k, std::int64_t* best) {
  std::int64_t found = 0;
  for (std::int64_t i = 0; i < width; ++i) {
    std::int64_t at = found;
    while (at > 0 && row[i] > row[best[at - 1]]) --at;
    if (at == k) continue;
    found = std::min(found + 1, k);
    for (std::int64_t j = found - 1; j > at; --j) best[j] = best[j - 1];
    best[at] = i;
  }
}

at::Tensor top_k_indices(const at::Tensor& values, std::int64_t k) {
  if (!values.is_cpu()) {
    // A stable sort keeps the lower index first among equals; topk promises nothing.
    return std::get<1>(at::sort(values, /*stable=*/true, -1, /*descending=*/true))
        .narrow(1, 0, k)
        .contiguous();
  }
  const at::Tensor rows = values.contiguous();
  at::Tensor indices = at::zeros({rows.size(0), k}, at::kLong);
  std::int64_t* const out = indices.mutable_data_ptr<std::int64_t>();
  const std::int64_t width = rows.size(1);
  const auto run = [&](const auto* data) {
    at::parallel_for(0, rows.size(0), 64, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t)
        top_k_of_row(data + t * width, width, k, out + t * k);
    });
  };
  if (rows.scalar_type() == at::kDouble) {
    run(rows.const_data_ptr<double>());
  } else {
    run(rows.const_data_ptr<float>());
  }
  return indices;
}

/// [real_tokens] which sequence of the batch each token is of.
at::Tensor sequence_of_token(const Sequences& sequences, std::int64_t real_tokens,
                             const ContextParallel* context, c10::Device device) {
  if (context == nullptr) {
    // By the device alone, so that a recorded step holds no memory of the host: the sequences that
    // ended before each token.
    const at::Tensor ends = sequences.cu_seqlens.narrow(0, 1, sequences.count()).to(at::kLong);
    return at::cumsum(occurrences(ends, sequences.total() + 1), 0).narrow(0, 0, real_tokens);
  }
  std::vector<std::int64_t> numbers, lengths;
  for (std::int64_t s = 0; s < sequences.count(); ++s) {
    const std::int64_t begin = std::min<std::int64_t>(sequences.cu_seqlens_host[s], real_tokens),
                       end = std::min<std::int64_t>(sequences.cu_seqlens_host[s + 1], real_tokens);
    numbers.push_back(context->plan.fragments()[s].sequence);
    lengths.push_back(end - begin);
  }
  return at::repeat_interleave(device::upload(numbers, device), device::upload(lengths, device),
                               /*dim=*/0, /*output_size=*/real_tokens);
}

}  // namespace

namespace moe_route_reference {

MoeRouting forward(const MoeRoute::Inputs& in) {
  MoeRouting routing;
  routing.probabilities = at::softmax(in.logits, -1, compute_type(in.logits));
  routing.experts =
      in.chosen.defined() ? in.chosen : top_k_indices(routing.probabilities, in.top_k);
  at::Tensor kept = at::gather(routing.probabilities, 1, routing.experts);
  if (in.normalize) kept = kept / at::sum(kept, {1}, /*keepdim=*/true);
  routing.weights = kept.to(in.logits.scalar_type());
  return routing;
}

at::Tensor backward(const MoeRoute::Inputs& in, const MoeRouting& routing,
                    const at::Tensor& grad_weights, const at::Tensor& grad_probabilities) {
  const at::Tensor& p = routing.probabilities;
  at::Tensor dp = grad_probabilities.defined() ? grad_probabilities.clone() : at::zeros_like(p);
  if (grad_weights.defined()) {
    at::Tensor dw = grad_weights.to(p.scalar_type());
    if (in.normalize) {
      const at::Tensor kept = at::gather(p, 1, routing.experts);
      const at::Tensor sum = at::sum(kept, {1}, /*keepdim=*/true);
      dw = (dw - at::sum(dw * kept, {1}, /*keepdim=*/true) / sum) / sum;
    }
    dp.scatter_add_(1, routing.experts, dw);
  }
  return (p * (dp - at::sum(dp * p, {1}, /*keepdim=*/true))).to(in.logits.scalar_type());
}

}  // namespace moe_route_reference

namespace {

MoeRouting route(const MoeRoute::Functions& functions, const at::Tensor& logits, std::int64_t top_k,
                 bool normalize, const at::Tensor& chosen) {
  TORCH_CHECK(logits.dim() == 2 && top_k >= 1 && top_k <= logits.size(1), "moe_route: top_k ",
              top_k, " of logits ", logits.sizes(), " [T,E]");
  TORCH_CHECK(!chosen.defined() || (chosen.dim() == 2 && chosen.size(0) == logits.size(0) &&
                                    chosen.size(1) == top_k && chosen.scalar_type() == at::kLong),
              "moe_route: the choice to replay is ", chosen.sizes(), ", expected int64 [",
              logits.size(0), ", ", top_k, "]");
  const MoeRoute::Inputs inputs{detached(logits), top_k, normalize, chosen};
  MoeRouting routing = run_without_gradient([&] { return functions.forward(inputs); });
  if (!needs_gradient({logits})) return routing;
  const Tensors outputs =
      with_gradient("moe_route", {logits}, {routing.weights, routing.probabilities},
                    [backward = functions.backward, inputs,
                     saved = MoeRouting{{}, routing.experts, detached(routing.probabilities)}](
                        const Tensors& grads) -> Tensors {
                      return {backward(inputs, saved, grads[0], grads[1])};
                    });
  routing.weights = outputs[0];
  routing.probabilities = outputs[1];
  return routing;
}

}  // namespace

MoeRouting moe_route(const KernelTable& kernels, const at::Tensor& logits, std::int64_t top_k,
                     bool normalize, const at::Tensor& chosen) {
  return route(kernels.get<MoeRoute>(), logits, top_k, normalize, chosen);
}

MoeRouting moe_route(const at::Tensor& logits, std::int64_t top_k, bool normalize,
                     const at::Tensor& chosen) {
  return route({moe_route_reference::forward, moe_route_reference::backward}, logits, top_k,
               normalize, chosen);
}

at::Tensor is_likeliest(const at::Tensor& probabilities, const at::Tensor& experts) {
  return run_without_gradient([&] {
    const std::int64_t k = experts.size(1);
    const at::Tensor least = std::get<0>(at::topk(probabilities, k)).narrow(1, k - 1, 1);
    return at::gather(probabilities, 1, experts) >= least;
  });
}

at::Tensor moe_auxiliary_loss(const at::Tensor& probabilities, const at::Tensor& experts,
                              const Sequences& sequences, std::int64_t real_tokens,
                              const TokenSharing& sharing) {
  const std::int64_t tokens = probabilities.size(0), expert_count = probabilities.size(1);
  const ContextParallel* const context = sharing.context;
  const Rows own =
      sharing.rows == nullptr ? Rows{0, tokens} : own_rows(sequences.total(), *sharing.rows);
  TORCH_CHECK(experts.dim() == 2 && experts.size(0) == tokens && own.count == tokens &&
                  real_tokens >= 0 && real_tokens <= sequences.total(),
              "moe_auxiliary_loss: probabilities ", probabilities.sizes(), ", experts ",
              experts.sizes(), ", cu_seqlens ending at ", sequences.total(), " and ", real_tokens,
              " real tokens do not fit together");
  // loss = sum over tokens and experts of p[t,e] * E * count[s(t),e] / n[s(t)]: linear in p.
  at::Tensor coefficient;
  const std::int64_t real = real_rows(own, real_tokens);
  {
    const NoGradient guard;
    const at::Tensor sequence = sequence_of_token(sequences, real_tokens, context, experts.device())
                                    .narrow(0, std::min(own.first, real_tokens), real);
    const std::int64_t count = context != nullptr ? context->sequences.count() : sequences.count();
    const at::Tensor keys =
        (sequence.unsqueeze(1) * expert_count + experts.narrow(0, 0, real)).reshape({-1});
    at::Tensor counts = occurrences(keys, count * expert_count)
                            .view({count, expert_count})
                            .to(compute_type(probabilities));
    if (sharing.rows != nullptr) sharing.rows->all_reduce_sum(counts);
    if (context != nullptr) context->group.all_reduce_sum(counts);
    // Every token is assigned to k experts.
    const at::Tensor length =
        (at::sum(counts, {1}, /*keepdim=*/true) / static_cast<double>(experts.size(1)))
            .clamp_min(1);
    coefficient = (counts * static_cast<double>(expert_count) / length).index_select(0, sequence);
  }
  at::Tensor loss =
      run_without_gradient([&] { return at::sum(probabilities.narrow(0, 0, real) * coefficient); });
  return with_gradient("moe_auxiliary_loss", {probabilities}, {loss},
                       [coefficient, real, sizes = probabilities.sizes().vec(),
                        options = probabilities.options()](const Tensors& grads) -> Tensors {
                         if (!grads[0].defined()) return {{}};
                         at::Tensor dp = at::zeros(sizes, options);
                         dp.narrow(0, 0, real).copy_(coefficient * grads[0]);
                         return {dp};
                       })[0];
}

MoeLoad moe_load(const at::Tensor& probabilities, const at::Tensor& experts,
                 std::int64_t real_tokens) {
  TORCH_CHECK(probabilities.dim() == 2 && experts.dim() == 2 &&
                  experts.size(0) == probabilities.size(0) && real_tokens >= 0 &&
                  real_tokens <= probabilities.size(0),
              "moe_load: probabilities ", probabilities.sizes(), ", experts ", experts.sizes(),
              " and ", real_tokens, " real tokens do not fit together");
  MoeLoad load;
  const at::Tensor sum = run_without_gradient([&] {
    const at::Tensor chosen = experts.narrow(0, 0, real_tokens).reshape({-1});
    load.assignments = occurrences(chosen, probabilities.size(1)).to(compute_type(probabilities));
    return at::sum(probabilities.narrow(0, 0, real_tokens), {0});
  });
  load.probabilities = with_gradient(
      "moe_load", {probabilities}, {sum},
      [real_tokens, sizes = probabilities.sizes().vec(),
       options = probabilities.options()](const Tensors& grads) -> Tensors {
        if (!grads[0].defined()) return {{}};
        at::Tensor dp = at::zeros(sizes, options);
        dp.narrow(0, 0, real_tokens).copy_(grads[0].unsqueeze(0).expand({real_tokens, sizes[1]}));
        return {dp};
      })[0];
  return load;
}

}  // namespace heddle::ops
