#include "ops/gates.h"

#include <vector>

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softplus.h>

namespace heddle::ops {
namespace {

/// Elements of all vectors that libtorch's kernels compute at a time, of any type and processor.
constexpr std::int64_t kVectors = 64;
/// Elements that libtorch leaves to one thread: half of its grain.
constexpr std::int64_t kOneThread = 16384;

template <class Function>
at::Tensor by_whole_vectors(const at::Tensor& x, Function function) {
  if (!x.is_cpu()) return function(x);
  const std::int64_t size = x.numel(), missing = (kVectors - size % kVectors) % kVectors;
  const at::Tensor padded = at::constant_pad_nd(x.reshape({-1}), {0, missing});
  std::vector<at::Tensor> parts;
  for (const at::Tensor& part : padded.split(kOneThread)) parts.push_back(function(part));
  return (parts.size() == 1 ? parts[0] : at::cat(parts)).narrow(0, 0, size).view(x.sizes());
}

}  // namespace

at::Tensor sigmoid(const at::Tensor& x) {
  return by_whole_vectors(x, [](const at::Tensor& part) { return at::sigmoid(part); });
}

at::Tensor softplus(const at::Tensor& x) {
  // A threshold beyond any input: softplus becomes the identity only where it rounds to it.
  return by_whole_vectors(x, [](const at::Tensor& part) { return at::softplus(part, 1, 40); });
}

}  // namespace heddle::ops
