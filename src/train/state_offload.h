#pragma once

#include <deque>
#include <functional>
#include <vector>

#include "device/copy_stream.h"
#include "ops/optimizer_step/optimizer_step.h"

namespace heddle::train {

/// AdamW's step over moments and masters that live in pinned memory of the host: they come to the
/// device in pieces, are updated there and go back. Both directions move while pieces are updated,
/// and the device holds four pieces at most. Numbers are those of a step without it.
class StateOffload {
 public:
  /// Tensors below this many elements are not worth a copy.
  static constexpr std::int64_t kSmallest = 1 << 16;

  /// `piece`: its largest number of elements; for uint8 moments a multiple of their blocks.
  explicit StateOffload(c10::Device device, std::int64_t piece = 1 << 23)
      : piece_(piece), to_device_(device), to_host_(device) {}

  /// Calls `step` with the pieces of `tensors`, one after the other, their states on the device.
  /// All is queued when it returns; the current stream comes after the copies to the host.
  void step(const std::vector<ops::AdamwTensor>& tensors,
            const std::function<void(const std::vector<ops::AdamwTensor>&)>& step);

 private:
  using Copies = std::vector<device::CopyStream::Copy>;
  struct Piece {
    ops::AdamwTensor host, device;
    Copies arriving;
  };
  Piece fetch(const ops::AdamwTensor& tensor, std::int64_t first);
  Copies store(const Piece& piece);

  std::int64_t piece_;
  device::CopyStream to_device_, to_host_;
};

}  // namespace heddle::train
