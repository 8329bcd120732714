#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "nn/parameter.h"

namespace heddle::nn {

/// x W^T. x [T,in], weight [out,in]. The graph holds the parameter by handle, not its tensor, and
/// the weight gradient is accumulated by the product itself.
at::Tensor linear(const at::Tensor& x, Parameter& weight);

/// Something added to a linear layer's output from the same input (LoRA).
class LinearAdapter {
 public:
  virtual ~LinearAdapter() = default;
  /// Returns y + delta(x). x [T,in], y [T,out].
  virtual at::Tensor apply(const at::Tensor& x, const at::Tensor& y) = 0;
};

/// A projection without bias.
class Linear {
 public:
  Linear(std::string name, std::int64_t out_features, std::int64_t in_features,
         Placement placement = {})
      : weight_(std::move(name), {out_features, in_features}, std::move(placement)) {}

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = linear(x, weight_);
    return adapter_ ? adapter_->apply(x, y) : y;
  }
  Parameter& weight() { return weight_; }
  void set_adapter(std::shared_ptr<LinearAdapter> adapter) { adapter_ = std::move(adapter); }
  const std::shared_ptr<LinearAdapter>& adapter() const { return adapter_; }

 private:
  Parameter weight_;
  std::shared_ptr<LinearAdapter> adapter_;
};

/// Rows of the table. tokens [T] int64; returns [T,H].
at::Tensor embedding(const at::Tensor& tokens, Parameter& table);

}  // namespace heddle::nn
