#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "comm/mesh.h"

namespace heddle::nn {

/// How one mesh dimension divides a parameter: tensor dimension `tensor_dim` is cut into
/// consecutive named blocks (q|k|v, gate|up), and each block is divided evenly over the ranks. No
/// blocks: the dimension is one block.
struct Shard {
  comm::Dim mesh_dim;
  std::int64_t tensor_dim = 0;
  std::vector<std::int64_t> blocks;
};

/// One entry per mesh dimension that divides the parameter; over the others it is replicated.
using Placement = std::vector<Shard>;

/// A tensor of the model under its published name. It knows its global shape and placement, from
/// which loading, export, sharding and weight exchange are derived.
class Parameter {
 public:
  /// Without storage: allocate() before use.
  Parameter(std::string name, std::vector<std::int64_t> global_shape, Placement placement = {});
  Parameter(const Parameter&) = delete;
  Parameter& operator=(const Parameter&) = delete;

  const std::string& name() const { return name_; }
  const std::vector<std::int64_t>& global_shape() const { return global_shape_; }
  const Placement& placement() const { return placement_; }
  std::int64_t numel() const;

  /// Storage of this rank, uninitialised, as a leaf of the autograd graph.
  void allocate(c10::ScalarType dtype, c10::Device device);
  bool allocated() const { return value_.defined(); }
  /// What the block's arithmetic reads; valid between acquire and release of its block.
  const at::Tensor& value() const { return value_; }
  /// The same storage without history, to write into.
  at::Tensor data() const;
  void set_data(at::Tensor data);

  bool trainable() const { return trainable_; }
  void set_trainable(bool trainable);

  /// A leaf without elements that asks for a gradient iff the parameter is trainable: an input of
  /// operators that hold the parameter by handle and accumulate its gradient themselves (large
  /// matrices), so that no graph keeps the matrix alive.
  const at::Tensor& anchor() const { return anchor_; }

  /// Accumulated gradient of this step in the gradient dtype; undefined if none arrived.
  const at::Tensor& gradient() const { return gradient_; }
  /// The buffer to accumulate into, in the gradient dtype; zeros on first use in the step.
  at::Tensor& gradient_buffer();
  /// Dtype of the accumulated gradient; the default is the parameter's own.
  void set_gradient_dtype(c10::ScalarType dtype) { gradient_dtype_ = dtype; }
  /// True if the gradient has the parameter's dtype, so that products may write into it directly.
  bool accumulates_in_place() const;
  void add_gradient(const at::Tensor& gradient);
  /// Moves what autograd left on the leaf into the accumulated gradient; called after each backward
  /// of the block.
  void collect_gradient();
  void clear_gradient() { gradient_.reset(); }

 private:
  std::string name_;
  std::vector<std::int64_t> global_shape_;
  Placement placement_;
  bool trainable_ = true;
  at::Tensor value_, anchor_, gradient_;
  c10::ScalarType gradient_dtype_ = c10::ScalarType::Undefined;
};

}  // namespace heddle::nn
