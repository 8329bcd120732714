#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <tuple>

#include "ops/autograd.h"
#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/gated_delta_net/gated_delta_net.h"
#include "ops/gated_delta_net/kernels.h"

namespace heddle::ops {

void check_heads(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const at::Tensor& g, const at::Tensor& beta) {
  TORCH_CHECK(q.dim() == 3 && q.sizes() == k.sizes(), op, ": q ", q.sizes(), " and k ", k.sizes(),
              " must be [T,Hk,K]");
  TORCH_CHECK(v.dim() == 3 && v.size(0) == q.size(0) && v.size(1) % q.size(1) == 0, op, ": v ",
              v.sizes(), " must be [T,Hv,V] with T and a multiple of the heads of q ", q.sizes());
  TORCH_CHECK(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(), op,
              ": q, k, v must share a dtype, they are ", q.scalar_type(), ", ", k.scalar_type(),
              ", ", v.scalar_type());
  TORCH_CHECK(
      g.dim() == 2 && g.size(0) == v.size(0) && g.size(1) == v.size(1) && beta.sizes() == g.sizes(),
      op, ": g ", g.sizes(), " and beta ", beta.sizes(), " must be [T,Hv] = [", v.size(0), ",",
      v.size(1), "]");
  for (const at::Tensor& gate : {g, beta}) {
    TORCH_CHECK(gate.scalar_type() == compute_type(q), op, ": g and beta must be ", compute_type(q),
                " for inputs of ", q.scalar_type(), ", found ", gate.scalar_type());
  }
}

namespace {

/// The one matrix [T, columns] whose columns x, y, z are, or an undefined tensor if they are not.
at::Tensor joined(const at::Tensor& x, const at::Tensor& y, const at::Tensor& z) {
  const std::int64_t T = x.size(0), row = x.stride(0);
  const std::int64_t nx = x.size(1) * x.size(2), ny = y.size(1) * y.size(2),
                     nz = z.size(1) * z.size(2);
  const auto packed = [&](const at::Tensor& t, std::int64_t offset) {
    return t.storage().unsafeGetStorageImpl() == x.storage().unsafeGetStorageImpl() &&
           t.stride(2) == 1 && t.stride(1) == t.size(2) && t.stride(0) == row &&
           t.storage_offset() == x.storage_offset() + offset;
  };
  if (T == 0 || row < nx + ny + nz || !packed(x, 0) || !packed(y, nx) || !packed(z, nx + ny)) {
    return {};
  }
  return x.as_strided({T, nx + ny + nz}, {row, 1}, x.storage_offset());
}

}  // namespace

GatedDeltaRuleResult gated_delta_rule(const KernelTable& kernels,
                                      const GatedDeltaRule::Inputs& in) {
  check_heads("gated_delta_rule", in.q, in.k, in.v, in.g, in.beta);
  const std::int64_t T = in.q.size(0), S = in.sequences.count();
  TORCH_CHECK(in.sequences.total() == T, "gated_delta_rule: cu_seqlens ends at ",
              in.sequences.total(), ", q has ", T, " tokens");
  if (in.initial_state.defined()) {
    const std::vector<std::int64_t> expected{S, in.v.size(1), in.q.size(2), in.v.size(2)};
    TORCH_CHECK(in.initial_state.sizes() == at::IntArrayRef(expected) &&
                    in.initial_state.scalar_type() == compute_type(in.q),
                "gated_delta_rule: initial_state ", in.initial_state.sizes(), " ",
                in.initial_state.scalar_type(), " must be [S,Hv,K,V] = ", at::IntArrayRef(expected),
                " ", compute_type(in.q));
  }
  const GatedDeltaRule::Functions functions = kernels.get<GatedDeltaRule>();
  const Tensors inputs{in.q, in.k, in.v, in.g, in.beta, in.initial_state};
  const bool keep = needs_gradient(inputs);
  GatedDeltaRule::Inputs saved{detached(in.q), detached(in.k),    detached(in.v),
                               detached(in.g), detached(in.beta), detached(in.initial_state),
                               in.sequences,   in.options,        in.qkv_again};
  GatedDeltaRuleForward out = run_without_gradient([&] { return functions.forward(saved, keep); });
  if (!keep) return {out.o, out.final_state};
  const Tensors outputs{out.o, out.final_state};
  // The outputs will carry this closure: keep only what the backward reads.
  out.o = at::Tensor();
  out.final_state = at::Tensor();
  if (saved.qkv_again) saved.q = saved.k = saved.v = at::Tensor();
  const Tensors recorded = with_gradient(
      "gated_delta_rule", inputs, outputs,
      [functions, saved = std::move(saved), out = std::move(out)](const Tensors& grads) -> Tensors {
        if (!grads[0].defined() && !grads[1].defined()) return Tensors(6);
        GatedDeltaRule::Inputs all = saved;
        if (all.qkv_again) std::tie(all.q, all.k, all.v) = std::tuple_cat(all.qkv_again());
        GatedDeltaRuleGradients d = functions.backward(all, out, grads[0], grads[1]);
        return {d.q, d.k, d.v, d.g, d.beta, d.initial_state};
      });
  return {recorded[0], recorded[1]};
}

std::array<at::Tensor, 3> split_qkv(const at::Tensor& qkv, std::int64_t num_k_heads,
                                    std::int64_t head_k_dim, std::int64_t num_v_heads,
                                    std::int64_t head_v_dim) {
  const std::int64_t k_columns = num_k_heads * head_k_dim, v_columns = num_v_heads * head_v_dim;
  TORCH_CHECK(qkv.dim() == 2 && qkv.size(1) == 2 * k_columns + v_columns && qkv.stride(1) == 1,
              "split_qkv: qkv ", qkv.sizes(), " must be [T, 2*", num_k_heads, "*", head_k_dim,
              " + ", num_v_heads, "*", head_v_dim, "] with unit column stride");
  const std::int64_t T = qkv.size(0), row = qkv.stride(0);
  const auto columns = [&](std::int64_t first, std::int64_t heads, std::int64_t dim) {
    // Not a view of autograd's kind: the three share one backward.
    return at::empty({0}, qkv.options())
        .set_(qkv.storage(), qkv.storage_offset() + first, {T, heads, dim}, {row, dim, 1});
  };
  const Tensors parts = run_without_gradient([&]() -> Tensors {
    return {columns(0, num_k_heads, head_k_dim), columns(k_columns, num_k_heads, head_k_dim),
            columns(2 * k_columns, num_v_heads, head_v_dim)};
  });
  const Tensors out = with_gradient(
      "split_qkv", {qkv}, parts,
      [T,
       sizes = std::array{std::array{num_k_heads, head_k_dim}, std::array{num_k_heads, head_k_dim},
                          std::array{num_v_heads, head_v_dim}},
       options = qkv.options().requires_grad(false)](const Tensors& grads) -> Tensors {
        Tensors d(grads);
        for (std::size_t i = 0; i < 3; ++i) {
          if (!d[i].defined()) d[i] = at::zeros({T, sizes[i][0], sizes[i][1]}, options);
        }
        const at::Tensor whole = joined(d[0], d[1], d[2]);
        if (whole.defined()) return {whole};
        return {at::cat({d[0].flatten(1), d[1].flatten(1), d[2].flatten(1)}, 1)};
      });
  return {out[0], out[1], out[2]};
}

}  // namespace heddle::ops
