#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/layout.h"
#include "comm/mesh.h"
#include "ops/linear/place.h"

namespace heddle::nn {

/// How one mesh dimension divides a parameter: tensor dimension `tensor_dim` is cut into
/// consecutive named blocks (q|k|v, gate|up), and each block is divided evenly over the ranks. No
/// blocks: the dimension is one block.
struct Shard {
  comm::Dim mesh_dim;
  std::int64_t tensor_dim = 0;
  std::vector<std::int64_t> blocks;
  /// Into as many parts at most: of more ranks, several in a row have the same one. 0: no limit.
  std::int64_t parts = 0;
};

/// One entry per mesh dimension that divides the parameter; over the others it is replicated.
using Placement = std::vector<Shard>;

/// A rectangular part of a global tensor and the memory that holds it.
struct Box {
  Region global;
  at::Tensor tensor;
};

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
  /// Shape of the value on this rank: what the placement leaves of the global shape.
  const std::vector<std::int64_t>& local_shape() const { return local_shape_; }
  /// Divides the parameter as its placement says. Before allocate(). Throws ModelError if a block
  /// does not divide by the mesh dimension.
  void place(const comm::Mesh& mesh);
  /// Its placement names ep: it is sharded, and its gradient summed, over efsdp and edp of the mesh
  /// instead of fsdp x cp and dp.
  bool is_expert() const { return is_expert_; }
  /// True on all but the first of the ranks that hold the same values (along tp; of a tied
  /// embedding, the last pipeline stage): they do not count in norms and do not save. Never of an
  /// expert or, along tp, a row table, whose every row has one owner.
  bool is_copy() const { return is_copy_; }
  void set_copy() { is_copy_ = true; }
  /// How many ranks in a row along tp have the same part of it (Shard::parts). Each has its share
  /// of the part's gradient.
  std::int64_t copies() const { return copies_; }
  /// False if the parameter lives in another pipeline stage: here it has name and shapes, but
  /// nothing of its values.
  bool is_held() const { return is_held_; }
  void set_held(bool held) { is_held_ = held; }
  /// Each rank along tp sees a part of what this replicated parameter acts on, so its gradient is
  /// the sum over them.
  bool has_partial_gradient() const { return has_partial_gradient_; }
  void set_partial_gradient() { has_partial_gradient_ = true; }
  /// A large matrix that each rank along tp needs whole, for rows of its own (embedding and head):
  /// it is sharded, and its gradient summed, over tp besides fsdp x cp. Before place().
  bool is_row_table() const { return is_row_table_; }
  void set_row_table() { is_row_table_ = true; }
  /// Where the linear layer stands whose weight this is.
  const ops::LinearPlace& linear_place() const { return linear_place_; }
  ops::LinearPlace& linear_place() { return linear_place_; }
  const Placement& placement() const { return placement_; }
  std::int64_t numel() const;
  /// Index in the global tensor of each index of the value along a dimension.
  std::vector<std::int64_t> global_indices(std::int64_t dim) const;

  /// Storage of this rank, uninitialised, as a leaf of the autograd graph.
  void allocate(c10::ScalarType dtype, c10::Device device);
  /// Tensor for the block's arithmetic; valid between acquire and release of its block.
  const at::Tensor& value() const { return value_; }
  /// The value's storage without history, to write into. Throws InternalError between
  /// release_memory and take_memory.
  at::Tensor data() const;

  // Sharding (parallel/sharding.h) keeps this rank's rows elsewhere and gives the value its memory
  // for as long as its block runs. The tensor stays the same object, so that graphs keep no memory.
  /// As allocate, without memory.
  void allocate_released(c10::ScalarType dtype, c10::Device device);
  /// For a parameter that is not held: sets a dtype, no memory, and no owned rows.
  void allocate_elsewhere(c10::ScalarType dtype, c10::Device device);
  /// Moves the memory of a fresh tensor of the value's shape into the value.
  void take_memory(at::Tensor full);
  void release_memory();
  /// The value and `other`, of its shape and dtype, have each other's memory after it.
  void exchange_memory(const at::Tensor& other);
  bool has_memory() const;
  /// The rows of dimension 0, from `first_row` on, that this rank alone updates and saves.
  void set_owned(at::Tensor rows, std::int64_t first_row);
  /// They, or all of data() if nothing divides them.
  at::Tensor owned() const;
  /// Where owned() lies in the global tensor. Without memory too.
  Layout layout() const;
  /// The parts of `like_owned`, which has the shape of owned(); none if it is empty. It may have
  /// one element for each block of `columns` along the last dimension instead, if
  /// is_whole_in_blocks_of(columns).
  std::vector<Box> boxes(const at::Tensor& like_owned, std::int64_t columns = 1) const;
  /// Whether there are two or more dimensions and the layout cuts the last one at multiples of
  /// `columns` alone.
  bool is_whole_in_blocks_of(std::int64_t columns) const;
  /// Copies this rank's part of a whole tensor into owned().
  void write_owned(const at::Tensor& whole);

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
  c10::ScalarType gradient_dtype() const {
    return accumulates_in_place() ? value_.scalar_type() : gradient_dtype_;
  }
  /// True if the gradient has the parameter's dtype, so that products may write into it directly.
  bool accumulates_in_place() const;
  void add_gradient(const at::Tensor& gradient);
  /// Moves what autograd left on the leaf into the accumulated gradient; called after each backward
  /// of the block.
  void collect_gradient();
  /// Drops it, and what a backward that did not end left on the leaf.
  void clear_gradient();
  /// Replaces the accumulated gradient by its sum over the ranks, of the shape of owned().
  void set_reduced_gradient(at::Tensor gradient) { gradient_ = std::move(gradient); }

 private:
  /// The layout of memory of the sizes of owned(), in blocks of `columns`.
  Layout layout_of(Sizes sizes, std::int64_t columns) const;

  std::string name_;
  std::vector<std::int64_t> global_shape_, local_shape_;
  Placement placement_;
  /// For each dimension, which of its runs this rank holds.
  struct Segment {
    std::int64_t local, global, size;
  };
  std::vector<std::vector<Segment>> segments_;
  bool is_expert_ = false, is_copy_ = false, has_partial_gradient_ = false, is_row_table_ = false,
       is_held_ = true;
  ops::LinearPlace linear_place_;
  bool trainable_ = true;
  std::int64_t copies_ = 1;
  at::Tensor value_, anchor_, gradient_;
  at::Tensor owned_;  ///< Undefined unless sharding divides the rows.
  std::int64_t first_owned_row_ = 0;
  c10::ScalarType gradient_dtype_ = c10::ScalarType::Undefined;
};

}  // namespace heddle::nn
