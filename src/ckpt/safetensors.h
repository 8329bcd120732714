#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/files.h"
#include "base/hash.h"
#include "ckpt/dtype.h"

namespace heddle::ckpt {

using Path = std::filesystem::path;

/// Name, element type and shape of a tensor that is, or is to be, in a file.
struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<std::int64_t> shape;

  std::int64_t numel() const;
  /// Bytes of the row-major data.
  std::uint64_t bytes() const;
};

/// A tensor inside a mapped file: row-major little-endian data that is read when `bytes` is
/// touched. Keeps the map alive. The data need not be aligned to its element size: copy it
/// (tensor_io.h), do not cast the pointer.
struct StoredTensor : TensorSpec {
  std::span<const std::byte> data;
  std::shared_ptr<const files::MappedFile> map;
  Path file;

  /// "model.safetensors: tensor 'x'", for messages.
  std::string where() const;
  /// Lets the system take back the pages of data[begin, begin + count); reading them again is
  /// possible, and slow.
  void drop(std::size_t begin, std::size_t count) const;
};

/// Throws ModelError: `place` has no tensor `name`; names the nearest of `tensors`.
[[noreturn]] void throw_missing_tensor(const std::string& place, std::string_view name,
                                       const std::vector<StoredTensor>& tensors);

/// The first bytes of a safetensors file, checked against the format.
struct SafetensorsHeader {
  struct Entry : TensorSpec {
    std::uint64_t begin = 0;  // of the data, from `data_offset`
    std::uint64_t end = 0;
  };
  std::vector<Entry> entries;  // in the order of their data
  std::map<std::string, std::string> metadata;
  std::uint64_t data_offset = 0;
};

/// Parses and checks the header of a whole file: its length, JSON, known element types, no name
/// twice, data that begins at 0, leaves no gap, does not overlap, ends with the file, and has the
/// bytes that type and shape need. Throws ModelError that names `file` and the tensor.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> bytes,
                                           const std::string& file);

/// A safetensors file, mapped; nothing but the header is read until a tensor's data is.
class SafetensorsFile {
 public:
  /// With a `folder` the file must lie inside it. Throws as files::open_regular() if it cannot be
  /// opened and ModelError if it is not what the format says.
  explicit SafetensorsFile(Path path, const Path& folder = {});
  SafetensorsFile(SafetensorsFile&&) = default;
  SafetensorsFile& operator=(SafetensorsFile&&) = default;

  const Path& path() const { return path_; }
  /// In the order of their data.
  const std::vector<StoredTensor>& tensors() const { return tensors_; }
  /// nullptr if there is none of that name.
  const StoredTensor* find(std::string_view name) const;
  /// Throws ModelError that names the nearest name there is.
  const StoredTensor& at(std::string_view name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  Path path_;
  std::vector<StoredTensor> tensors_;
  std::unordered_map<std::string_view, std::size_t> index_;  // views into tensors_
  std::map<std::string, std::string> metadata_;
};

/// Writes one safetensors file without holding more than the caller's piece in memory. The layout
/// is that of the Python library: tensors ordered by element type, then by name, and a header
/// padded to 8 bytes.
class SafetensorsWriter {
 public:
  /// Writes the header under a temporary name. `hasher`, if given, sees every byte of the file in
  /// order and must outlive the writer. Throws FileError; InternalError when a name occurs twice.
  SafetensorsWriter(const Path& path, std::vector<TensorSpec> tensors,
                    const std::map<std::string, std::string>& metadata = {{"format", "pt"}},
                    hash::Hasher* hasher = nullptr);

  /// The order in which append() expects the tensors.
  const std::vector<TensorSpec>& order() const { return order_; }
  /// Adds the next bytes of tensor `name`. Throws FileError; InternalError out of order or beyond
  /// the tensor's size.
  void append(std::string_view name, std::span<const std::byte> bytes);
  /// Gives the file its final name. Throws FileError; InternalError when data is missing.
  void commit();
  std::uint64_t bytes_written() const { return file_.bytes_written(); }

 private:
  void skip_complete();
  void write(const void* bytes, std::size_t count);

  std::string path_;
  files::AtomicFile file_;
  hash::Hasher* hasher_;
  std::vector<TensorSpec> order_;
  std::size_t current_ = 0;
  std::uint64_t current_bytes_ = 0;
};

}  // namespace heddle::ckpt
