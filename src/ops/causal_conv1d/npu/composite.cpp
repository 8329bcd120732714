// The convolution of operators of libtorch, as many channels at a time as the plan says: at long
// contexts all channels together would hold several gigabytes of fp32 at once.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "device/npu_chip.h"
#include "device/require.h"
#include "ops/causal_conv1d/kernels.h"
#include "ops/causal_conv1d/npu/tile.h"
#include "ops/compute_type.h"
#include "ops/npu/kernels.h"

namespace heddle::ops::causal_conv1d_npu {
namespace {

/// Bound of one fp32 tensor of a pass; a pass has about six at once.
constexpr std::int64_t kPassBytes = std::int64_t{128} << 20;

ConvShape shape_of(const CausalConv1d::Inputs& in) {
  return {in.x.size(0), in.x.size(1), in.weight.size(1),
          static_cast<std::int64_t>(in.x.element_size())};
}

/// Channels of one pass: whole tiles, as many as the memory of a pass allows.
std::int64_t pass_channels(const ConvShape& shape, c10::Device device) {
  const Tile tile = plan_tile(shape, device::kUnifiedBufferBytes);
  device::require_on_chip(device, "causal_conv1d", tile_bytes(tile, shape));
  const std::int64_t column_bytes = std::max<std::int64_t>(1, shape.tokens) * tile.channels * 4;
  return tile.channels * std::max<std::int64_t>(1, kPassBytes / column_bytes);
}

/// Calls f(first channel, count) for each pass.
template <class F>
void for_each_pass(const CausalConv1d::Inputs& in, F&& f) {
  const std::int64_t C = in.x.size(1),
                     step = C == 0 ? 1 : pass_channels(shape_of(in), in.x.device());
  for (std::int64_t first = 0; first < C; first += step) f(first, std::min(step, C - first));
}

at::Tensor channels(const at::Tensor& t, std::int64_t axis, std::int64_t first,
                    std::int64_t count) {
  return t.defined() ? t.narrow(axis, first, count) : t;
}

CausalConv1d::Inputs part(const CausalConv1d::Inputs& in, std::int64_t first, std::int64_t count) {
  CausalConv1d::Inputs some = in;
  some.x = channels(in.x, 1, first, count);
  some.weight = channels(in.weight, 0, first, count);
  some.initial_state = channels(in.initial_state, 1, first, count);
  return some;
}

std::pair<at::Tensor, at::Tensor> forward(const CausalConv1d::Inputs& in) {
  const std::int64_t S = in.sequences.count(), C = in.x.size(1), W = in.weight.size(1);
  at::Tensor y = in.x.new_empty(in.x.sizes()), final_state;
  if (in.want_final_state) final_state = in.x.new_empty({S, C, W - 1});
  for_each_pass(in, [&](std::int64_t first, std::int64_t count) {
    const auto [some, state] = causal_conv1d_reference::forward(part(in, first, count));
    y.narrow(1, first, count).copy_(some);
    if (in.want_final_state) final_state.narrow(1, first, count).copy_(state);
  });
  return {y, final_state};
}

CausalConv1d::Gradients backward(const CausalConv1d::Inputs& in, const at::Tensor& grad_y,
                                 const at::Tensor& grad_final_state) {
  CausalConv1d::Gradients all;
  all.x = in.x.new_empty(in.x.sizes());
  all.weight = at::empty_like(in.weight);
  if (in.initial_state.defined()) all.initial_state = at::empty_like(in.initial_state);
  for_each_pass(in, [&](std::int64_t first, std::int64_t count) {
    const CausalConv1d::Gradients some =
        causal_conv1d_reference::backward(part(in, first, count), channels(grad_y, 1, first, count),
                                          channels(grad_final_state, 1, first, count));
    all.x.narrow(1, first, count).copy_(some.x);
    all.weight.narrow(0, first, count).copy_(some.weight);
    if (all.initial_state.defined())
      all.initial_state.narrow(1, first, count).copy_(some.initial_state);
  });
  return all;
}

/// Bytes of the planned tile; the lengths of a run are not known here, a longer one is cut into
/// equal tiles.
std::int64_t on_chip_bytes(const CausalConv1d::Dims& dims) {
  const ConvShape shape{std::int64_t{1} << 17, dims.channels, dims.width, 2};
  return tile_bytes(plan_tile(shape, device::kUnifiedBufferBytes), shape);
}

}  // namespace

}  // namespace heddle::ops::causal_conv1d_npu

namespace heddle::ops::npu {

void add_causal_conv1d(Registry& registry) {
  using namespace causal_conv1d_npu;
  registry.add<CausalConv1d>(KernelInfo::ascend("npu.tiled", reference_dtypes()),
                             {forward, backward}, {.on_chip_bytes = on_chip_bytes});
}

}  // namespace heddle::ops::npu
