#pragma once

#include <ATen/record_function.h>

#include <cstdint>
#include <memory>
#include <string>

namespace heddle::ops::testing {

/// Multiplications of the matrix products while it lives, on this thread, and how many there were.
class ProductCounter {
 public:
  ProductCounter() {
    current() = this;
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&on_call).needsInputs(true));
  }
  ~ProductCounter() {
    at::removeCallback(handle_);
    current() = nullptr;
  }
  ProductCounter(const ProductCounter&) = delete;
  ProductCounter& operator=(const ProductCounter&) = delete;

  std::int64_t multiplications = 0, products = 0;

 private:
  static ProductCounter*& current() {
    thread_local ProductCounter* counter = nullptr;
    return counter;
  }

  static std::unique_ptr<at::ObserverContext> on_call(const at::RecordFunction& call) {
    const std::string name = call.name();
    const bool adds = name.starts_with("aten::baddbmm") || name.starts_with("aten::addmm");
    const bool plain = name == "aten::bmm" || name == "aten::mm";
    if (current() == nullptr || (!adds && !plain)) return nullptr;
    const auto inputs = call.inputs();
    const at::Tensor& a = inputs[adds ? 1 : 0].toTensor();
    const at::Tensor& b = inputs[adds ? 2 : 1].toTensor();
    current()->multiplications += a.numel() * b.size(-1);
    ++current()->products;
    return nullptr;
  }

  at::CallbackHandle handle_;
};

}  // namespace heddle::ops::testing
