#include "ops/linear/linear.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <algorithm>

#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/linear/few_rows.h"
#include "ops/linear/kernels.h"

namespace heddle::ops {
namespace {

at::Tensor library_product(const at::Tensor& a, const at::Tensor& b) { return at::mm(a, b.t()); }

at::Tensor cpu_product(const at::Tensor& a, const at::Tensor& b) {
  return few_rows_fits(a, b) ? few_rows_product(a, b) : library_product(a, b);
}

template <at::Tensor (*product)(const at::Tensor&, const at::Tensor&)>
Tensors outputs(const std::vector<Products>& sums) {
  Tensors results;
  for (const Products& terms : sums) {
    at::Tensor y = product(terms[0].a, terms[0].b);
    for (std::size_t i = 1; i < terms.size(); ++i) y.addmm_(terms[i].a, terms[i].b.t());
    results.push_back(std::move(y));
  }
  return results;
}

}  // namespace

namespace linear_reference {

Tensors forward(const std::vector<Products>& sums) { return outputs<library_product>(sums); }

at::Tensor backward(const Products& terms) {
  at::Tensor dx = at::mm(terms[0].a, terms[0].b);
  for (std::size_t i = 1; i < terms.size(); ++i) dx.addmm_(terms[i].a, terms[i].b);
  return dx;
}

Linear::Functions::LowRankGradients low_rank_backward(const std::vector<LowRankChange>& changes) {
  std::int64_t ranks = 0, first = 0;
  for (const LowRankChange& change : changes) ranks += change.low.size(1);
  Linear::Functions::LowRankGradients result;
  result.d_low = at::empty({changes[0].low.size(0), ranks}, changes[0].low.options());
  for (const auto& [dy, b, low] : changes) {
    at::Tensor d_low = result.d_low.narrow(1, first, low.size(1));
    first += low.size(1);
    at::mm_out(d_low, dy, b);
    result.d_b.push_back(wide_product(dy, low));
  }
  return result;
}

}  // namespace linear_reference

at::Tensor wide_product(const at::Tensor& dy, const at::Tensor& x, double scale) {
  if (!dy.is_cuda()) {
    at::Tensor product = at::mm(dy.t(), x);
    return scale == 1 ? product : product.mul_(scale);
  }
  const c10::ScalarType type = compute_type(dy);
  if (scale == 1) return at::mm(dy.t(), x, type);
  // The library multiplies its sums; with a factor of zero it does not read what it adds to.
  at::Tensor product = at::empty({dy.size(1), x.size(1)}, x.options().dtype(type));
  return at::addmm_out(product, product, dy.t(), x, type, /*beta=*/0, /*alpha=*/scale);
}

void register_linear(Registry& registry) {
  registry.add<Linear>(KernelInfo::cpu("cpu"),
                       {outputs<cpu_product>, linear_reference::forward_onto<outputs<cpu_product>>,
                        linear_reference::backward, linear_reference::low_rank_backward,
                        linear_reference::dropped_low, linear_reference::dropped_gradient,
                        linear_reference::add_dropped});
  registry.add<Linear>(
      KernelInfo::reference(),
      {linear_reference::forward, linear_reference::forward_onto<linear_reference::forward>,
       linear_reference::backward, linear_reference::low_rank_backward,
       linear_reference::dropped_low, linear_reference::dropped_gradient,
       linear_reference::add_dropped});
}

}  // namespace heddle::ops
