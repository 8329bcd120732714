#include "ops/swiglu/swiglu.h"

#include "ops/builtin.h"
#include "ops/compute_type.h"
#include "ops/gated_product.h"
#include "ops/swiglu/kernels.h"

namespace heddle::ops {

at::Tensor swiglu(const KernelTable& kernels, const at::Tensor& gate, const at::Tensor& up,
                  OutputAgain again) {
  TORCH_CHECK(
      gate.dim() == 2 && gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(),
      "swiglu: gate ", gate.sizes(), " ", gate.scalar_type(), " and up ", up.sizes(), " ",
      up.scalar_type(), " must be equal [T,F]");
  return gated_product("swiglu", kernels.get<Swiglu>(), gate, up, std::move(again));
}

void register_swiglu(Registry& registry) {
  registry.add<Swiglu>(KernelInfo::cpu("cpu"), {swiglu_cpu::forward, swiglu_cpu::backward});
  registry.add<Swiglu>(KernelInfo::reference(),
                       {swiglu_reference::forward, swiglu_reference::backward});
}

}  // namespace heddle::ops
