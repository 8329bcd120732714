#include "nn/cache.h"

#include <functional>

#include "device/upload.h"

namespace heddle::nn {

void clear_slot(Cache& cache, std::int64_t slot) {
  for (LayerCache& layer : cache) {
    if (layer.conv.defined()) layer.conv.select(0, slot).zero_();
    if (layer.state.defined()) layer.state.select(0, slot).zero_();
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

void copy_page(Cache& cache, std::int32_t from, std::int32_t to) {
  for (LayerCache& layer : cache) {
    for (at::Tensor& memory : {std::ref(layer.keys), std::ref(layer.values)}) {
      if (memory.defined()) memory.select(0, to).copy_(memory.select(0, from));
    }
  }
}

}  // namespace heddle::nn
