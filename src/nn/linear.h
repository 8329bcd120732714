#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>

#include "nn/parameter.h"

namespace heddle::nn {

/// Adds dy^T x to the parameter's gradient: dy [T,out], x [T,in], both detached.
void accumulate_product(Parameter& weight, const at::Tensor& dy, const at::Tensor& x);

/// x W^T of plain tensors, not recorded. x [T,in], weight [out,in].
at::Tensor product(const at::Tensor& x, const at::Tensor& weight);

/// x W^T. x [T,in], weight [out,in]. The graph holds the parameter by handle, not its tensor, and
/// the weight gradient is accumulated by the product itself.
at::Tensor linear(const at::Tensor& x, Parameter& weight);

/// Something that changes what a linear layer computes from its input (LoRA).
class LinearAdapter {
 public:
  virtual ~LinearAdapter() = default;
  /// The adapted product, in place of linear(x, weight). x [T,in]; returns [T,out].
  virtual at::Tensor forward(const at::Tensor& x, Parameter& weight) = 0;
  virtual void visit_parameters(const std::function<void(Parameter&)>& visit) = 0;
};

/// A projection without bias.
class Linear {
 public:
  Linear(std::string name, std::int64_t out_features, std::int64_t in_features,
         Placement placement = {})
      : weight_(std::move(name), {out_features, in_features}, std::move(placement)) {}

  at::Tensor forward(const at::Tensor& x) {
    return adapter_ ? adapter_->forward(x, weight_) : linear(x, weight_);
  }
  Parameter& weight() { return weight_; }
  std::int64_t out_features() const { return weight_.global_shape()[0]; }
  std::int64_t in_features() const { return weight_.global_shape()[1]; }
  void set_adapter(std::shared_ptr<LinearAdapter> adapter) { adapter_ = std::move(adapter); }
  LinearAdapter* adapter() const { return adapter_.get(); }

 private:
  Parameter weight_;
  std::shared_ptr<LinearAdapter> adapter_;
};

/// Rows of the table. tokens [T] int64; returns [T,H].
at::Tensor embedding(const at::Tensor& tokens, Parameter& table);

}  // namespace heddle::nn
