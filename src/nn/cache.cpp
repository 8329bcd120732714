#include "nn/cache.h"

#include <functional>

#include "device/upload.h"

namespace heddle::nn {

void clear_slots(Cache& cache, const std::vector<std::int64_t>& slots) {
  at::Tensor index;
  for (LayerCache& layer : cache) {
    for (at::Tensor& memory : {std::ref(layer.conv), std::ref(layer.state)}) {
      if (!memory.defined()) continue;
      if (!index.defined()) index = device::upload(slots, memory.device());
      memory.index_fill_(0, index, 0);
    }
  }
}

void copy_slot(Cache& cache, std::int64_t from, const std::vector<std::int64_t>& to) {
  at::Tensor index;
  for (LayerCache& layer : cache) {
    for (at::Tensor& memory : {std::ref(layer.conv), std::ref(layer.state)}) {
      if (!memory.defined()) continue;
      if (!index.defined()) index = device::upload(to, memory.device());
      std::vector<std::int64_t> shape = memory.sizes().vec();
      shape[0] = static_cast<std::int64_t>(to.size());
      memory.index_copy_(0, index, memory.narrow(0, from, 1).clone().expand(shape));
    }
  }
}

void copy_pages(Cache& cache, const std::vector<std::int64_t>& from,
                const std::vector<std::int64_t>& to) {
  at::Tensor read, written;
  for (LayerCache& layer : cache) {
    for (at::Tensor& memory : {std::ref(layer.keys), std::ref(layer.values)}) {
      if (!memory.defined()) continue;
      if (!read.defined()) {
        read = device::upload(from, memory.device());
        written = device::upload(to, memory.device());
      }
      memory.index_copy_(0, written, memory.index_select(0, read));
    }
  }
}

}  // namespace heddle::nn
