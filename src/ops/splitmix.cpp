#include "ops/splitmix.h"

#include <ATen/TensorOperators.h>

namespace heddle::ops::splitmix {

at::Tensor shifted(const at::Tensor& x, int bits) {
  return x.bitwise_right_shift(bits).bitwise_and_((std::int64_t{1} << (64 - bits)) - 1);
}

at::Tensor mixed(at::Tensor x) {
  x.bitwise_xor_(shifted(x, 30)).mul_(number(heddle::splitmix::kMix1));
  x.bitwise_xor_(shifted(x, 27)).mul_(number(heddle::splitmix::kMix2));
  return x.bitwise_xor_(shifted(x, 31));
}

}  // namespace heddle::ops::splitmix
