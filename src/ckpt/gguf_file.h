#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/files.h"

namespace heddle::ckpt {

/// Writes a GGUF file, version 3: values by key, then tensors, each at a multiple of 32 bytes
/// (github.com/ggml-org/ggml, docs/gguf.md).
class GgufFile {
 public:
  void add(const std::string& key, std::uint32_t value);
  void add(const std::string& key, float value);
  void add(const std::string& key, const std::string& value);
  void add(const std::string& key, const std::vector<std::string>& values);
  void add(const std::string& key, const std::vector<std::int32_t>& values);
  /// A tensor of this shape (as PyTorch counts dimensions), in float32, float16 or bfloat16, made
  /// when its turn comes.
  void add(const std::string& name, std::vector<std::int64_t> shape, at::ScalarType dtype,
           std::function<at::Tensor()> make);

  std::size_t tensors() const { return tensors_.size(); }
  /// Returns the bytes of the file. `check` is called before the file has its name and may throw.
  /// Throws FileError.
  std::uint64_t write(const files::Path& path, const std::function<void()>& check) const;

 private:
  struct Tensor {
    std::string name;
    std::vector<std::int64_t> shape;
    at::ScalarType dtype;
    std::function<at::Tensor()> make;
    std::uint64_t bytes() const;
  };
  void begin(const std::string& key, std::uint32_t type);

  std::string values_;  ///< as they stand in the file
  std::uint64_t count_ = 0;
  std::vector<Tensor> tensors_;
};

}  // namespace heddle::ckpt
