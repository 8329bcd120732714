#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <fmt/format.h>

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

std::optional<std::string> refuse(const Dims& dims) {
  const auto over = [&](const char* name, std::int64_t most) {
    const auto found = dims.find(name);
    return found != dims.end() && found->second > most;
  };
  if (over("num_experts", cuda::kMostRoutedExperts) || over("top_k", cuda::kMostChosenExperts)) {
    return fmt::format("it takes {} of {} experts at most", cuda::kMostChosenExperts,
                       cuda::kMostRoutedExperts);
  }
  return std::nullopt;
}

}  // namespace

void add(Registry& registry) {
  registry.add<MoeRoute>({.op = "",
                          .name = "cuda.warp",
                          .device = c10::DeviceType::CUDA,
                          .dtypes = {c10::ScalarType::BFloat16, c10::ScalarType::Float},
                          .is_reference = false,
                          .refuse = refuse,
                          .on_chip_bytes = {}},
                         {forward, backward});
}

}  // namespace heddle::ops::moe_route_cuda
