#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "nn/parameter.h"
#include "ops/linear/linear.h"
#include "ops/norm_weight.h"
#include "ops/output_again.h"
#include "ops/registry.h"

namespace heddle::nn {

/// Adds dy^T x to the parameter's gradient: dy [T,out], x [T,in], both detached.
void accumulate_product(Parameter& weight, const at::Tensor& dy, const at::Tensor& x);

/// Work of a backward that nothing in it waits for, so that it can run beside something that does
/// not need the device's cores.
class PostponedWork {
 public:
  void add(std::function<void()> work) { work_.push_back(std::move(work)); }
  void run();

 private:
  std::vector<std::function<void()>> work_;
};

/// Runs `work`, unless `postponed` is not null: then with that.
void run_or_postpone(const std::shared_ptr<PostponedWork>& postponed, std::function<void()> work);

/// An RMS norm that is still to be applied.
struct PendingNorm {
  ops::NormWeight weight;
  double eps;
};

/// Input of linear layers.
struct LinearInput {
  LinearInput(at::Tensor x) : value(std::move(x)) {}
  /// The output of an operator whose backward makes it again for the gradients of weights, so that
  /// it is not kept until then.
  static LinearInput made_again(const std::function<at::Tensor(const ops::OutputAgain&)>& make);

  at::Tensor value;
  /// The layers read the value's norm. Without a gradient; forward_all takes such an input.
  std::optional<PendingNorm> norm;
  /// Unless empty, gives the value in the backward, where `postponed` runs if there is any.
  std::function<at::Tensor()> again;
  /// Unless null, takes the gradients of weights where the input has one too: whoever made the
  /// input runs it when that gradient has come.
  std::shared_ptr<PostponedWork> postponed;
  /// Only gradients are wanted: the outputs have a shape, but their products do not run.
  bool outputs_unused = false;
  /// Unless undefined, [T,out]: what the output of a layer that reads the input alone is added to.
  at::Tensor residual;
};

/// The outputs of layers that read `x`, one for each sum; without a gradient.
ops::Tensors products(const ops::Linear::Functions& functions, const LinearInput& x,
                      const std::vector<ops::Products>& sums);

/// x W^T of weights that share their input. x [T,in], weight [out,in]. The graph holds the
/// parameters by handle, not their tensors; the weight gradients are accumulated by the products
/// themselves, and those of x summed inside them.
std::vector<at::Tensor> linears(const ops::KernelTable& kernels, const LinearInput& x,
                                const std::vector<Parameter*>& weights);

class Linear;
struct Pass;

/// The module name of a parameter: without ".weight".
std::string module_of(const std::string& parameter);

/// The outputs of layers that share their input, in order, each row's changed by its adapters.
std::vector<at::Tensor> forward_all(const Pass& pass, const LinearInput& x,
                                    const std::vector<Linear*>& layers);

/// silu(gate x) * (up x), where the chosen kernels have one launch for it; else undefined.
at::Tensor gated_in_one(const Pass& pass, const LinearInput& x, Linear& gate, Linear& up);

/// A projection without bias.
class Linear {
 public:
  Linear(std::string name, std::int64_t out_features, std::int64_t in_features,
         Placement placement = {});
  /// A projection by a matrix [out,in] that another part of the model owns, as a tied head's is.
  Linear(std::string module, Parameter& shared) : module_(std::move(module)), weight_(&shared) {}

  /// Without adapters.
  at::Tensor forward(const ops::KernelTable& kernels, const LinearInput& x) {
    return linears(kernels, x, {weight_})[0];
  }
  at::Tensor forward(const Pass& pass, const LinearInput& x) {
    return forward_all(pass, x, {this})[0];
  }
  /// The layer's name: its weight's without ".weight", unless the weight is shared.
  const std::string& module() const { return module_; }
  Parameter& weight() { return *weight_; }
  bool owns_weight() const { return own_ != nullptr; }
  std::int64_t out_features() const { return weight_->global_shape()[0]; }
  std::int64_t in_features() const { return weight_->global_shape()[1]; }

 private:
  std::string module_;
  std::unique_ptr<Parameter> own_;  ///< Null: shared.
  Parameter* weight_;
};

/// Rows of the table. tokens [T] int64; returns [T,H].
at::Tensor embedding(const ops::KernelTable& kernels, const at::Tensor& tokens, Parameter& table);

}  // namespace heddle::nn
