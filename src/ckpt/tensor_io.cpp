#include "ckpt/tensor_io.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include <ATen/ops/empty.h>
#include <c10/core/TensorOptions.h>

#include "base/errors.h"
#include "base/text.h"
#include "ckpt/checked_tensor.h"

namespace heddle::ckpt {
namespace {

// Large enough that a copy is bound by memory, small enough to stay near the last-level cache and
// to bound what a load holds besides the destination.
constexpr std::int64_t kPieceBytes = 4 << 20;

/// Room for one piece, shared by all tensors of a load: a buffer for each leaves holes in the heap
/// that add up to a fifth of a small model.
class PieceBuffer {
 public:
  at::Tensor get(std::int64_t count, at::ScalarType type) {
    if (!bytes_.defined()) bytes_ = at::empty({kPieceBytes}, at::TensorOptions(at::kByte));
    const auto needed = count * static_cast<std::int64_t>(c10::elementSize(type));
    return bytes_.narrow(0, 0, needed).view(type);
  }

 private:
  at::Tensor bytes_;
};

/// The selected part of a stored tensor, copied piece by piece.
class BoxCopy {
 public:
  BoxCopy(const StoredTensor& source, const std::vector<Range>& ranges) : source_(source) {
    sizes_ = source.shape;
    starts_.assign(sizes_.size(), 0);
    std::vector<bool> seen(sizes_.size(), false);
    for (const Range& range : ranges) {
      const bool is_dim = range.dim >= 0 && range.dim < static_cast<std::int64_t>(sizes_.size());
      if (!is_dim || seen[range.dim] || range.start < 0 || range.length < 0 ||
          range.start > source.shape[range.dim] - range.length) {
        throw_error<ModelError>("{} of shape [{}]: there is no part [{}, {} + {}) of dimension {}",
                                source.where(), fmt::join(source.shape, ", "), range.start,
                                range.start, range.length, range.dim);
      }
      seen[range.dim] = true;
      starts_[range.dim] = range.start;
      sizes_[range.dim] = range.length;
    }
    strides_.assign(sizes_.size(), 1);
    for (std::size_t d = sizes_.size(); d-- > 1;) strides_[d - 1] = strides_[d] * source.shape[d];
    const auto type = to_scalar_type(source.dtype);
    if (!type) {
      throw_error<ModelError>("{}: the packed type {} cannot be computed with", source.where(),
                              name_of(source.dtype));
    }
    type_ = *type;
    element_bytes_ = bits_of(source.dtype) / 8;
  }

  const std::vector<std::int64_t>& sizes() const { return sizes_; }
  at::ScalarType type() const { return type_; }

  void run(const at::Tensor& destination, PieceBuffer& buffer) {
    buffer_ = &buffer;
    std::int64_t offset = 0;
    for (std::size_t d = 0; d < sizes_.size(); ++d) offset += starts_[d] * strides_[d];
    copy(destination, 0, offset);
  }

 private:
  /// Fills `destination`, which is the part's dimensions from `dim` on, from the elements at
  /// `offset`.
  void copy(at::Tensor destination, std::size_t dim, std::int64_t offset) {
    if (destination.numel() == 0) return;
    const std::int64_t rows = dim == sizes_.size() ? 1 : sizes_[dim];
    const std::int64_t row_bytes = destination.numel() / rows * element_bytes_;
    if (row_bytes > kPieceBytes) {
      for (std::int64_t row = 0; row < rows; ++row) {
        copy(destination.select(0, row), dim + 1, offset + row * strides_[dim]);
      }
      return;
    }
    if (dim == sizes_.size()) {
      copy_piece(destination, dim, 1, offset);
      return;
    }
    const std::int64_t piece_rows = std::max<std::int64_t>(1, kPieceBytes / row_bytes);
    for (std::int64_t row = 0; row < rows; row += piece_rows) {
      const std::int64_t count = std::min(piece_rows, rows - row);
      copy_piece(destination.narrow(0, row, count), dim, count, offset + row * strides_[dim]);
    }
  }

  void copy_piece(at::Tensor piece, std::size_t dim, std::int64_t rows, std::int64_t offset) {
    std::vector<std::int64_t> sizes(sizes_.begin() + dim, sizes_.end());
    if (!sizes.empty()) sizes[0] = rows;
    const bool is_direct = piece.scalar_type() == type_ && piece.is_cpu() && piece.is_contiguous();
    const std::int64_t count = piece.numel();
    const at::Tensor packed = is_direct ? piece : buffer_->get(count, type_);
    char* const out = static_cast<char*>(packed.data_ptr());
    const char* const end = gather(out, sizes, dim, offset);
    TORCH_INTERNAL_ASSERT(end == out + count * element_bytes_);
    if (!is_direct) piece.copy_(packed.view(sizes));

    std::int64_t last = offset;
    for (std::size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides_[dim + d];
    source_.drop(offset * element_bytes_, (last + 1 - offset) * element_bytes_);
  }

  /// Packs the box of `sizes` at element `offset` to `out` and returns the end of what it wrote.
  char* gather(char* out, std::span<const std::int64_t> sizes, std::size_t dim,
               std::int64_t offset) const {
    std::int64_t count = 1;
    for (const std::int64_t size : sizes) count *= size;
    // One run when every dimension but the first is taken whole.
    const bool is_run = std::equal(sizes.begin() + !sizes.empty(), sizes.end(),
                                   source_.shape.end() - (sizes.empty() ? 0 : sizes.size() - 1));
    if (is_run) {
      const std::size_t bytes = count * element_bytes_;
      std::memcpy(out, source_.data.data() + offset * element_bytes_, bytes);
      return out + bytes;
    }
    for (std::int64_t row = 0; row < sizes[0]; ++row) {
      out = gather(out, sizes.subspan(1), dim + 1, offset + row * strides_[dim]);
    }
    return out;
  }

  const StoredTensor& source_;
  std::vector<std::int64_t> sizes_, starts_, strides_;  // strides in elements
  at::ScalarType type_;
  std::int64_t element_bytes_ = 0;
  PieceBuffer* buffer_ = nullptr;
};

bool can_convert(Dtype from, at::ScalarType to) {
  if (to_scalar_type(from) == to) return true;
  const auto target = from_scalar_type(to);
  return is_plain_float(from) && target && is_plain_float(*target);
}

void fill(const StoredTensor& source, const at::Tensor& destination,
          const std::vector<Range>& ranges, PieceBuffer& buffer) {
  BoxCopy copy(source, ranges);
  if (destination.sizes() != at::IntArrayRef(copy.sizes())) {
    throw_error<ModelError>("{}{} has shape [{}], expected [{}]", source.where(),
                            ranges.empty() ? "" : ": the selected part",
                            fmt::join(copy.sizes(), ", "), fmt::join(destination.sizes(), ", "));
  }
  if (!can_convert(source.dtype, destination.scalar_type())) {
    throw_error<ModelError>("{} is {}, which is not converted to {}", source.where(),
                            name_of(source.dtype), at::toString(destination.scalar_type()));
  }
  // Filling a parameter is no step of the computation that autograd follows.
  copy.run(destination.detach(), buffer);
}

}  // namespace

void copy_into(const StoredTensor& source, at::Tensor& destination,
               const std::vector<Range>& ranges) {
  PieceBuffer buffer;
  fill(source, destination, ranges, buffer);
}

at::Tensor read_tensor(const StoredTensor& source, at::ScalarType dtype, at::Device device,
                       const std::vector<Range>& ranges) {
  at::Tensor tensor =
      at::empty(BoxCopy(source, ranges).sizes(), at::TensorOptions(dtype).device(device));
  copy_into(source, tensor, ranges);
  return tensor;
}

at::Tensor read_tensor(const StoredTensor& source) {
  return read_tensor(source, BoxCopy(source, {}).type());
}

LoadReport load_tensors(const ModelDirectory& directory, std::vector<LoadTarget>& targets,
                        const std::vector<std::string>& may_be_unused) {
  std::unordered_map<std::string_view, std::int64_t> uses;
  std::vector<std::string> missing, misshaped, unused;
  LoadReport report;
  for (const LoadTarget& target : targets) {
    const bool is_first = ++uses[target.name] == 1;
    const StoredTensor* stored = directory.find(target.name);
    if (!stored) {
      if (is_first) missing.push_back(target.name);
    } else if (stored->shape != target.shape) {
      if (is_first) {
        misshaped.push_back(fmt::format("{} is [{}], expected [{}]", target.name,
                                        fmt::join(stored->shape, ", "),
                                        fmt::join(target.shape, ", ")));
      }
    } else if (is_first && target.destination.defined() &&
               to_scalar_type(stored->dtype) != target.destination.scalar_type()) {
      report.converted.push_back(fmt::format("{} ({} -> {})", target.name, name_of(stored->dtype),
                                             at::toString(target.destination.scalar_type())));
    }
  }
  for (const StoredTensor& stored : directory.tensors()) {
    if (uses.contains(stored.name)) continue;
    const bool is_allowed = std::any_of(
        may_be_unused.begin(), may_be_unused.end(),
        [&](const std::string& pattern) { return text::matches_glob(pattern, stored.name); });
    (is_allowed ? report.carried : unused).push_back(stored.name);
  }
  std::string wrong;
  const auto add = [&](const char* what, const std::vector<std::string>& names) {
    if (names.empty()) return;
    if (!wrong.empty()) wrong += "; ";
    wrong += fmt::format("{} {}: {}", names.size(), what, text::list_some(names));
  };
  add("missing", missing);
  add("of a wrong shape", misshaped);
  add("that the model has no place for", unused);
  if (!wrong.empty()) {
    throw_error<ModelError>("{}: the tensors do not fit the configuration: {}",
                            directory.path().string(), wrong);
  }
  // In the order of the files, so that a disk or a network file system reads forward.
  std::vector<std::pair<const StoredTensor*, LoadTarget*>> order;
  for (LoadTarget& target : targets) {
    if (target.destination.defined()) order.emplace_back(&directory.at(target.name), &target);
  }
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return a.first < b.first;  // elements of one vector, which is in that order
  });
  PieceBuffer buffer;
  for (const auto& [stored, target] : order) {
    fill(*stored, target->destination, target->ranges, buffer);
    report.bytes_read += target->destination.numel() * bits_of(stored->dtype) / 8;
  }
  require_unchanged(directory.tensors());
  return report;
}

LoadReport load_tensors(const ModelDirectory& directory, const std::vector<NamedTensor>& targets,
                        const std::vector<std::string>& may_be_unused) {
  std::vector<LoadTarget> whole;
  whole.reserve(targets.size());
  for (const NamedTensor& target : targets) {
    whole.push_back({target.name, target.tensor.sizes().vec(), target.tensor});
  }
  return load_tensors(directory, whole, may_be_unused);
}

namespace {

void append_piece(SafetensorsWriter& writer, const std::string& name, const at::Tensor& tensor,
                  at::ScalarType type) {
  if (tensor.numel() == 0) return;
  const std::int64_t row_bytes =
      (tensor.dim() == 0 ? 1 : tensor.numel() / tensor.size(0)) * c10::elementSize(type);
  const bool is_direct = tensor.is_cpu() && tensor.is_contiguous() && tensor.scalar_type() == type;
  if (!is_direct && tensor.dim() > 0 &&
      tensor.numel() * static_cast<std::int64_t>(c10::elementSize(type)) > kPieceBytes) {
    const std::int64_t rows = std::max<std::int64_t>(1, kPieceBytes / row_bytes);
    for (std::int64_t row = 0; row < tensor.size(0); row += rows) {
      const std::int64_t count = std::min(rows, tensor.size(0) - row);
      append_piece(writer, name, count == 1 ? tensor.select(0, row) : tensor.narrow(0, row, count),
                   type);
    }
    return;
  }
  const at::Tensor host = is_direct ? tensor : tensor.to(at::kCPU, type).contiguous();
  writer.append(name, {static_cast<const std::byte*>(host.data_ptr()), host.nbytes()});
}

}  // namespace

void append_tensor(SafetensorsWriter& writer, const std::string& name, const at::Tensor& tensor,
                   Dtype dtype) {
  const auto type = to_scalar_type(dtype);
  if (!type)
    throw_error<InternalError>("tensor '{}' cannot be written as {}", name, name_of(dtype));
  append_piece(writer, name, tensor.detach(), *type);
}

TensorSpec spec_of(const std::string& name, const at::Tensor& tensor,
                   std::optional<at::ScalarType> type) {
  const auto dtype = from_scalar_type(type.value_or(tensor.scalar_type()));
  if (!dtype) {
    throw_error<InternalError>("tensor '{}' of type {} has no type in safetensors", name,
                               at::toString(type.value_or(tensor.scalar_type())));
  }
  return {name, *dtype, tensor.sizes().vec()};
}

void write_tensors(const Path& path, const std::vector<NamedTensor>& tensors,
                   hash::Hasher* hasher) {
  std::vector<TensorSpec> specs;
  std::unordered_map<std::string_view, const at::Tensor*> by_name;
  for (const NamedTensor& tensor : tensors) {
    specs.push_back(spec_of(tensor.name, tensor.tensor));
    by_name.emplace(tensor.name, &tensor.tensor);
  }
  SafetensorsWriter writer(path, std::move(specs), {{"format", "pt"}}, hasher);
  for (const TensorSpec& spec : writer.order()) {
    append_tensor(writer, spec.name, *by_name.at(spec.name), spec.dtype);
  }
  writer.commit();
}

}  // namespace heddle::ckpt
