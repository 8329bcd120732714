#include "nn/cache.h"

#include <functional>

namespace heddle::nn {

void clear_slot(Cache& cache, std::int64_t slot) {
  for (LayerCache& layer : cache) {
    if (layer.conv.defined()) layer.conv.select(0, slot).zero_();
    if (layer.state.defined()) layer.state.select(0, slot).zero_();
  }
}

void copy_slot(Cache& cache, std::int64_t from, std::int64_t to) {
  for (LayerCache& layer : cache) {
    for (at::Tensor& memory : {std::ref(layer.conv), std::ref(layer.state)}) {
      if (memory.defined()) memory.select(0, to).copy_(memory.select(0, from));
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
