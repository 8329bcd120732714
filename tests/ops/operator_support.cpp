#include "ops/operator_support.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <ostream>

namespace heddle::ops::testing {

void PrintTo(const Kernel& kernel, std::ostream* out) {
  *out << kernel.name << " in " << c10::toString(kernel.dtype);
}

namespace {

std::string own_kernel(const std::string& op, c10::ScalarType dtype, Platform on) {
  for (const auto& [info, functions, rules] : builtin_registry().entries()) {
    if (info.op == op && std::ranges::find(info.platforms, on) != info.platforms.end() &&
        std::ranges::find(info.dtypes, dtype) != info.dtypes.end() && !info.only_by_name &&
        !info.only_for) {
      return info.name;
    }
  }
  return "reference";
}

}  // namespace

KernelTable table_of(const OpRequest& request, const std::string& name, c10::ScalarType dtype,
                     const Target& on) {
  KernelPolicy policy;
  policy.named[request.op] = name == kOwn ? own_kernel(request.op, dtype, on.platform) : name;
  return KernelTable::choose(builtin_registry(), on, dtype, {request}, policy);
}

at::Tensor randn(at::IntArrayRef sizes, c10::ScalarType dtype, std::uint64_t seed) {
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randn(sizes, generator, at::TensorOptions().dtype(at::kDouble)).to(dtype).to(device());
}

at::Tensor with_poisoned_gaps(const at::Tensor& x, std::int64_t gap) {
  std::vector<std::int64_t> sizes = x.sizes().vec();
  sizes.back() += gap;
  at::Tensor storage = at::full(sizes, std::numeric_limits<double>::quiet_NaN(), x.options());
  at::Tensor view = storage.narrow(-1, gap / 2, x.size(-1));
  view.copy_(x);
  return view;
}

::testing::AssertionResult close(const at::Tensor& actual, const at::Tensor& expected,
                                 double tolerance) {
  if (!actual.defined() || !expected.defined()) {
    return actual.defined() == expected.defined()
               ? ::testing::AssertionSuccess()
               : ::testing::AssertionFailure() << "one of the tensors is undefined";
  }
  if (actual.sizes() != expected.sizes()) {
    return ::testing::AssertionFailure()
           << "shape " << actual.sizes() << ", expected " << expected.sizes();
  }
  if (actual.numel() == 0) return ::testing::AssertionSuccess();
  const at::Tensor a = actual.cpu().to(at::kDouble), e = expected.cpu().to(at::kDouble);
  const double scale = e.abs().max().item().toDouble();
  const double error = (a - e).abs().max().item().toDouble();
  if (error <= tolerance * std::max(scale, 1e-3)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "largest error " << error << " at magnitude " << scale
                                       << ", allowed relative " << tolerance;
}

double tolerance_of(c10::ScalarType dtype) {
  if (dtype == c10::ScalarType::Double) return 1e-12;
  return dtype == c10::ScalarType::Float ? 3e-6 : 1e-2;
}

::testing::AssertionResult identical(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.cpu().contiguous(), y = b.cpu().contiguous();
  if (x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() &&
      (x.nbytes() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0)) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "the bits differ";
}

namespace {

at::Tensor weight_of(const at::Tensor& output, std::size_t index) {
  return randn(output.sizes(), at::kDouble, 7000 + index).to(output.device(), output.scalar_type());
}

double objective(const Tensors& outputs) {
  double total = 0;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].defined()) continue;
    total += at::sum(outputs[i].to(at::kDouble) * weight_of(outputs[i], i)).item().toDouble();
  }
  return total;
}

}  // namespace

Tensors gradients_of(const std::function<Tensors(const Tensors&)>& f, const Tensors& inputs) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) {
    leaves.push_back(input.detach());
    leaves.back().requires_grad_();
  }
  const Tensors outputs = f(leaves);
  Tensors roots, seeds;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].defined()) continue;
    roots.push_back(outputs[i]);
    seeds.push_back(weight_of(outputs[i], i));
  }
  run_backward(roots, seeds);
  Tensors gradients;
  for (const at::Tensor& leaf : leaves) gradients.push_back(leaf.grad());
  return gradients;
}

::testing::AssertionResult gradients_match(const std::function<Tensors(const Tensors&)>& f,
                                           const Tensors& inputs, double tolerance) {
  const Tensors gradients = gradients_of(f, inputs);
  const NoGradient guard;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!gradients[i].defined()) {
      return ::testing::AssertionFailure() << "input " << i << " has no gradient";
    }
    const at::Tensor exact = inputs[i].detach().cpu().reshape({-1});
    at::Tensor numeric = at::ones_like(exact);
    Tensors arguments = inputs;
    arguments[i] = inputs[i].detach().clone(at::MemoryFormat::Contiguous);
    const at::Tensor flat = arguments[i].view({-1});
    constexpr double kStep = 1e-5;
    for (std::int64_t j = 0; j < flat.numel(); ++j) {
      const double original = exact.const_data_ptr<double>()[j];
      flat[j].fill_(original + kStep);
      const double above = objective(f(arguments));
      flat[j].fill_(original - kStep);
      const double below = objective(f(arguments));
      flat[j].fill_(original);
      numeric.mutable_data_ptr<double>()[j] = (above - below) / (2 * kStep);
    }
    const auto result = close(gradients[i].reshape({-1}), numeric, tolerance);
    if (!result) return ::testing::AssertionFailure() << "input " << i << ": " << result.message();
  }
  return ::testing::AssertionSuccess();
}

}  // namespace heddle::ops::testing
