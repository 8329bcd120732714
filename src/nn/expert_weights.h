#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "nn/parameter.h"
#include "ops/moe/moe.h"

namespace heddle::nn {

/// Something that changes one matrix of every routed expert of a layer (LoRA).
class ExpertAdapter {
 public:
  virtual ~ExpertAdapter() = default;
  /// What is added to the matrices, differentiable in the adapter's parameters.
  virtual ops::ExpertLowRank change() = 0;
  virtual void visit_parameters(const std::function<void(Parameter&)>& visit) = 0;
};

/// One matrix of every routed expert of a layer, stacked: [E,out,in]. The ranks
/// along ep divide the experts.
class ExpertWeights {
 public:
  ExpertWeights(std::string name, std::int64_t experts, std::int64_t out_features,
                std::int64_t in_features)
      : weight_(std::move(name), {experts, out_features, in_features}, {{comm::Dim::kEp, 0, {}}}) {}

  Parameter& weight() { return weight_; }
  std::int64_t experts() const { return weight_.global_shape()[0]; }
  std::int64_t out_features() const { return weight_.global_shape()[1]; }
  std::int64_t in_features() const { return weight_.global_shape()[2]; }
  void set_adapter(std::shared_ptr<ExpertAdapter> adapter) { adapter_ = std::move(adapter); }
  ExpertAdapter* adapter() const { return adapter_.get(); }
  ops::ExpertLowRank change() const { return adapter_ ? adapter_->change() : ops::ExpertLowRank(); }

 private:
  Parameter weight_;
  std::shared_ptr<ExpertAdapter> adapter_;
};

}  // namespace heddle::nn
