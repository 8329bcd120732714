#pragma once

#include <vector>

#include <ATen/ops/zeros.h>

#include "sync/part.h"

namespace heddle::sync::testing {

/// A few tensors that one rank holds whole.
struct Weights {
  explicit Weights(at::TensorOptions options = {})
      : a(at::zeros({50, 33}, options)),
        b(at::zeros({7}, options)),
        c(at::zeros({3, 4, 500}, options)) {}
  at::Tensor a, b, c;

  void fill(double value) const {
    for (const at::Tensor& tensor : {a, b, c}) at::Tensor(tensor).fill_(value);
  }
  bool all_are(double value) const {
    for (const at::Tensor& tensor : {a, b, c}) {
      if (!tensor.eq(value).all().item<bool>()) return false;
    }
    return true;
  }
  std::vector<Part> parts() const {
    std::vector<Part> parts;
    const auto add = [&](const char* name, const at::Tensor& tensor) {
      const std::vector<std::int64_t> shape = tensor.sizes().vec();
      parts.push_back({{name, shape, tensor.scalar_type()}, {{whole_region(shape), tensor}}});
    };
    add("a", a), add("b", b), add("c", c);
    return parts;
  }
};

}  // namespace heddle::sync::testing
