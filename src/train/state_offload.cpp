#include "train/state_offload.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <utility>

#include "ops/optimizer_step/rounding.h"

namespace heddle::train {
namespace {

constexpr std::size_t kAhead = 2, kBehind = 1;

constexpr std::array kStates = {&ops::AdamwTensor::exp_avg, &ops::AdamwTensor::exp_avg_sq,
                                &ops::AdamwTensor::master, &ops::AdamwTensor::exp_avg_scale,
                                &ops::AdamwTensor::exp_avg_sq_scale};

}  // namespace

StateOffload::Piece StateOffload::fetch(const ops::AdamwTensor& tensor, std::int64_t first) {
  const std::int64_t count = std::min(piece_, tensor.parameter.numel() - first);
  // Scales have an element for each block, of which pieces have whole ones.
  const auto part = [&](const at::Tensor& x) {
    const std::int64_t unit = tensor.parameter.numel() / x.numel();
    return x.view({-1}).narrow(0, first / unit, count / unit);
  };
  Piece piece;
  piece.device.parameter = part(tensor.parameter);
  piece.device.gradient = part(tensor.gradient.contiguous());
  piece.device.weight_decay = tensor.weight_decay;
  piece.device.rounding_key =
      ops::rounding_key_from(tensor.rounding_key, static_cast<std::uint64_t>(first));
  for (const auto state : kStates) {
    if (!(tensor.*state).defined()) continue;
    const at::Tensor from = part(tensor.*state);
    const at::Tensor to =
        at::empty(from.sizes(), at::TensorOptions(from.dtype()).device(tensor.parameter.device()));
    piece.host.*state = from;
    piece.device.*state = to;
    piece.arriving.push_back(to_device_.begin(to, from));
  }
  return piece;
}

StateOffload::Copies StateOffload::store(const Piece& piece) {
  Copies copies;
  for (const auto state : kStates) {
    if ((piece.host.*state).defined())
      copies.push_back(to_host_.begin(piece.host.*state, piece.device.*state));
  }
  return copies;
}

void StateOffload::step(const std::vector<ops::AdamwTensor>& tensors,
                        const std::function<void(const std::vector<ops::AdamwTensor>&)>& step) {
  std::deque<Piece> fetched;
  std::deque<Copies> stored;
  const auto wait = [](Copies& copies) {
    for (auto& copy : copies) copy.wait();
  };
  const auto update_oldest = [&] {
    wait(fetched.front().arriving);
    step({fetched.front().device});
    stored.push_back(store(fetched.front()));
    fetched.pop_front();
    if (stored.size() <= kBehind) return;
    wait(stored.front());
    stored.pop_front();
  };
  for (const ops::AdamwTensor& tensor : tensors) {
    for (std::int64_t first = 0; first < tensor.parameter.numel(); first += piece_) {
      fetched.push_back(fetch(tensor, first));
      if (fetched.size() > kAhead) update_oldest();
    }
  }
  while (!fetched.empty()) update_oldest();
  for (Copies& copies : stored) wait(copies);
}

}  // namespace heddle::train
