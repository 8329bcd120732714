// Joins the changes of rows whose sets stand in tables with ATen.
#include "ops/grouped_low_rank/cuda/slot_tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "ops/cuda/tensor.h"

namespace heddle::ops::grouped_low_rank_cuda {

static_assert(LowRankSlots::kMostRows == cuda::kMostSlotRows);

cuda::SlotLayers slot_layers(const LowRankSlots& slots) {
  TORCH_CHECK(slots.layers.size() <= cuda::kMostSlotLayers, "slots of ", slots.layers.size(),
              " layers that share an input, at most ", cuda::kMostSlotLayers, " have a launch");
  TORCH_CHECK(slots.runs.scalar_type() == at::kInt && slots.runs.is_contiguous() &&
                  slots.runs.dim() == 2 && slots.runs.size(1) == 4,
              "runs of rows are [N,4] of int32, contiguous, not ", slots.runs.sizes());
  cuda::SlotLayers all;
  for (const at::Tensor& layer : slots.layers) {
    TORCH_CHECK(layer.scalar_type() == at::kLong && layer.is_contiguous() && layer.size(-1) == 3,
                "slots of a layer are [slots,3] of int64, contiguous, not ", layer.sizes());
    all.layers[all.count++] = static_cast<const cuda::SlotFactors*>(layer.const_data_ptr());
  }
  all.runs = static_cast<const cuda::SlotRun*>(slots.runs.const_data_ptr());
  all.run_count = static_cast<int>(slots.runs.size(0));
  all.rank = static_cast<int>(slots.rank);
  return all;
}

at::Tensor empty_slot_lows(const at::Tensor& x, const LowRankSlots& slots) {
  return at::empty({x.size(0), static_cast<std::int64_t>(slots.layers.size()) * slots.rank},
                   x.options());
}

at::Tensor slot_lows(const at::Tensor& x, const LowRankSlots& slots) {
  TORCH_CHECK(cuda::has_rows_of_16_bytes(x) && x.size(1) % 8 == 0, "slots of an input of ",
              x.sizes(), " whose rows do not begin on 16 bytes");
  const cuda::OnDevice on(x);
  const at::Tensor lows = empty_slot_lows(x, slots);
  // Few CTAs that nothing waits for until the layers' own products are there.
  cuda::slot_lows(slot_layers(slots), x.const_data_ptr(), x.stride(0), static_cast<int>(x.size(1)),
                  lows.mutable_data_ptr(), slots.columns,
                  cuda::SideStream::current().fork(on.stream()));
  return lows;
}

namespace {

cuda::SlotOutput output_of(const at::Tensor& y) {
  TORCH_CHECK(y.scalar_type() == at::kBFloat16 && y.stride(1) == 1, "slots of an output of ",
              y.sizes(), " that is not bf16 with unit stride");
  return {y.mutable_data_ptr(), y.stride(0), static_cast<int>(y.size(1))};
}

}  // namespace

void add_slot_outputs(const Tensors& outputs, const at::Tensor& lows, const LowRankSlots& slots) {
  const cuda::OnDevice on(lows);
  cuda::SideStream::current().join(on.stream());
  std::vector<cuda::SlotOutput> into;
  for (const at::Tensor& y : outputs) into.push_back(output_of(y));
  cuda::add_slot_outputs(slot_layers(slots), lows.const_data_ptr(), into, on.stream());
}

at::Tensor gated_slot_outputs(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& lows,
                              const LowRankSlots& slots) {
  const cuda::OnDevice on(lows);
  cuda::SideStream::current().join(on.stream());
  const at::Tensor gated = at::empty_strided(gate.sizes(), gate.strides(), gate.options());
  cuda::gated_slot_outputs(slot_layers(slots), lows.const_data_ptr(), output_of(gate),
                           output_of(up), gated.mutable_data_ptr(), on.stream());
  return gated;
}

}  // namespace heddle::ops::grouped_low_rank_cuda
