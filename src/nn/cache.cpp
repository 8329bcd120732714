#include "nn/cache.h"

namespace heddle::nn {

void clear_slot(Cache& cache, std::int64_t slot) {
  for (LayerCache& layer : cache) {
    if (layer.conv.defined()) layer.conv.select(0, slot).zero_();
    if (layer.state.defined()) layer.state.select(0, slot).zero_();
  }
}

}  // namespace heddle::nn
