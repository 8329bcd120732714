#include "ops/decode_step/decode_step.h"

#include <algorithm>

#include "ops/builtin.h"

namespace heddle::ops {

bool can_decode_in_one_step(const KernelTable& kernels) {
  return std::ranges::any_of(kernels.choices(),
                             [](const auto& choice) { return choice.op == DecodeStep::kName; }) &&
         kernels.get<DecodeStep>().exchange != nullptr;
}

at::Tensor decode_step_exchange(const KernelTable& kernels, const DecodeStep::Model& model,
                                std::int64_t rows) {
  return kernels.get<DecodeStep>().exchange(kernels, model, rows);
}

at::Tensor decode_step(const KernelTable& kernels, const DecodeStep::Model& model,
                       const at::Tensor& tokens, const CacheRows& rows,
                       const std::pair<at::Tensor, at::Tensor>& rotary,
                       const at::Tensor& exchange) {
  TORCH_CHECK(tokens.dim() == 1 && exchange.defined() && tokens.size(0) == rows.count(),
              "decode_step: tokens of ", tokens.sizes(), " for ", rows.count(),
              " sequences, with the memory of decode_step_exchange");
  return kernels.get<DecodeStep>().forward(model, tokens, rows, rotary, exchange);
}

void register_decode_step(Registry& registry) {
  KernelInfo info;
  info.name = "layer_by_layer";
  info.dtypes = KernelInfo::reference().dtypes;
  registry.add<DecodeStep>(info, {});
}

}  // namespace heddle::ops
