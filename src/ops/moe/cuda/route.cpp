#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <fmt/format.h>

#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/moe/cuda/route.h"
#include "ops/moe/kernels.h"

namespace heddle::ops::moe_route_cuda {
namespace {

cuda::Router router_of(const MoeRoute::Inputs& in) {
  return {in.logits.size(0), in.logits.size(1), in.top_k, in.normalize,
          in.logits.scalar_type() == at::kBFloat16 ? cuda::Element::kBFloat16
                                                   : cuda::Element::kFloat32};
}

MoeRouting forward(const MoeRoute::Inputs& in) {
  const cuda::OnDevice on(in.logits);
  const at::Tensor logits = in.logits.contiguous();
  const at::Tensor chosen = in.chosen.defined() ? in.chosen.contiguous() : in.chosen;
  const std::vector<std::int64_t> sizes = {logits.size(0), in.top_k};
  const MoeRouting routing{at::empty(sizes, logits.options()),
                           at::empty(sizes, logits.options().dtype(at::kLong)),
                           at::empty_like(logits, logits.options().dtype(at::kFloat))};
  cuda::route_forward(router_of(in), logits.const_data_ptr(),
                      chosen.defined() ? chosen.const_data_ptr<std::int64_t>() : nullptr,
                      routing.probabilities.mutable_data_ptr<float>(),
                      routing.experts.mutable_data_ptr<std::int64_t>(),
                      routing.weights.mutable_data_ptr(), on.stream());
  return routing;
}

at::Tensor backward(const MoeRoute::Inputs& in, const MoeRouting& routing,
                    const at::Tensor& grad_weights, const at::Tensor& grad_probabilities) {
  const cuda::OnDevice on(in.logits);
  const auto whole = [](const at::Tensor& x) { return x.defined() ? x.contiguous() : x; };
  const at::Tensor dw = whole(grad_weights), dp = whole(grad_probabilities);
  const at::Tensor p = routing.probabilities.contiguous(), experts = routing.experts.contiguous();
  at::Tensor gradient = at::empty(in.logits.sizes(), in.logits.options());
  cuda::route_backward(router_of(in), p.const_data_ptr<float>(),
                       experts.const_data_ptr<std::int64_t>(),
                       dw.defined() ? dw.const_data_ptr() : nullptr,
                       dp.defined() ? dp.const_data_ptr<float>() : nullptr,
                       gradient.mutable_data_ptr(), on.stream());
  return gradient;
}

std::optional<std::string> refuse(const MoeRoute::Dims& dims) {
  if (dims.num_experts <= cuda::kMostRoutedExperts && dims.top_k <= cuda::kMostChosenExperts)
    return std::nullopt;
  return fmt::format("it takes {} of {} experts at most", cuda::kMostChosenExperts,
                     cuda::kMostRoutedExperts);
}

}  // namespace

}  // namespace heddle::ops::moe_route_cuda

namespace heddle::ops::cuda {

void add_moe_route(Registry& registry) {
  using namespace moe_route_cuda;
  registry.add<MoeRoute>(
      KernelInfo::cuda("cuda.warp", {c10::ScalarType::BFloat16, c10::ScalarType::Float}),
      {forward, backward}, {.refuse = refuse});
}

}  // namespace heddle::ops::cuda
