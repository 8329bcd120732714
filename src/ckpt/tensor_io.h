#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ckpt/model_directory.h"
#include "ckpt/safetensors.h"

namespace heddle::ckpt {

/// A tensor under the name it has on disk.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// The part [start, start + length) of dimension `dim` of a stored tensor.
struct Range {
  std::int64_t dim = 0;
  std::int64_t start = 0;
  std::int64_t length = 0;
};

/// Copies the part of `source` that `ranges` (at most one per dimension, none = all) select into
/// `destination`, which has that part's shape, on any device and with any strides. Converts between
/// F64, F32, BF16 and F16; every other type is copied only into its own. Reads no bytes outside the
/// part except to the end of their page, works in pieces of a few MB and drops the pages it has
/// read. Throws ModelError that names the tensor for a wrong shape, range or type.
void copy_into(const StoredTensor& source, at::Tensor& destination,
               const std::vector<Range>& ranges = {});

/// The selected part as a new contiguous tensor of type `dtype`. Errors as copy_into.
at::Tensor read_tensor(const StoredTensor& source, at::ScalarType dtype,
                       at::Device device = at::kCPU, const std::vector<Range>& ranges = {});
/// In the stored type.
at::Tensor read_tensor(const StoredTensor& source);

/// One tensor to fill from a model directory.
struct LoadTarget {
  std::string name;                 // in the directory
  std::vector<std::int64_t> shape;  // it must have there
  at::Tensor destination;           // shape after `ranges`; may be a view; undefined: not read here
  std::vector<Range> ranges = {};
};

struct LoadReport {
  std::uint64_t bytes_read = 0;
  std::vector<std::string> carried;    // in the directory, no target, allowed by a pattern
  std::vector<std::string> converted;  // "name (F32 -> BFloat16)"
};

/// Fills every target. Before anything is written, throws one ModelError that lists every target
/// the directory lacks, every shape that differs, and every tensor of the directory that no target
/// names and no pattern of `may_be_unused` (shell-like, for example "model.visual.*") allows.
LoadReport load_tensors(const ModelDirectory& directory, std::vector<LoadTarget>& targets,
                        const std::vector<std::string>& may_be_unused = {});
/// Loads whole tensors.
LoadReport load_tensors(const ModelDirectory& directory, const std::vector<NamedTensor>& targets,
                        const std::vector<std::string>& may_be_unused = {});

/// How `tensor` is stored as `type` (nothing = its own). Throws InternalError if the format has no
/// such type.
TensorSpec spec_of(const std::string& name, const at::Tensor& tensor,
                   std::optional<at::ScalarType> type = {});

/// Appends the values of `tensor` (any device, any strides) as type `dtype` to the writer's tensor
/// `name`, in pieces.
void append_tensor(SafetensorsWriter& writer, const std::string& name, const at::Tensor& tensor,
                   Dtype dtype);

/// Writes whole tensors, each in its own type, to one file.
void write_tensors(const Path& path, const std::vector<NamedTensor>& tensors,
                   hash::Hasher* hasher = nullptr);

}  // namespace heddle::ckpt
