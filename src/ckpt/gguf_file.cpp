#include "ckpt/gguf_file.h"

#include <cstring>

#include <ATen/ops/empty.h>

#include "base/errors.h"
#include "ckpt/staging_directory.h"

namespace heddle::ckpt {
namespace {

constexpr std::uint64_t kAlignment = 32;
// Types of values ...
constexpr std::uint32_t kUint32 = 4, kInt32 = 5, kFloat32 = 6, kString = 8, kArray = 9;
// ... and of tensors.
constexpr std::uint32_t kTensorF32 = 0, kTensorF16 = 1, kTensorBf16 = 30;

template <class T>
void put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put(std::string& out, const std::string& text) {
  put<std::uint64_t>(out, text.size());
  out += text;
}

std::uint32_t type_of(at::ScalarType dtype) {
  if (dtype == at::kFloat) return kTensorF32;
  if (dtype == at::kHalf) return kTensorF16;
  if (dtype == at::kBFloat16) return kTensorBf16;
  throw_error<InternalError>("GGUF: no tensor type for {}", c10::toString(dtype));
}

std::uint64_t aligned(std::uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

std::uint64_t GgufFile::Tensor::bytes() const {
  std::uint64_t elements = 1;
  for (const std::int64_t size : shape) elements *= static_cast<std::uint64_t>(size);
  return elements * c10::elementSize(dtype);
}

void GgufFile::begin(const std::string& key, std::uint32_t type) {
  put(values_, key);
  put(values_, type);
  ++count_;
}

void GgufFile::add(const std::string& key, std::uint32_t value) {
  begin(key, kUint32);
  put(values_, value);
}

void GgufFile::add(const std::string& key, float value) {
  begin(key, kFloat32);
  put(values_, value);
}

void GgufFile::add(const std::string& key, const std::string& value) {
  begin(key, kString);
  put(values_, value);
}

void GgufFile::add(const std::string& key, const std::vector<std::string>& values) {
  begin(key, kArray);
  put(values_, kString);
  put<std::uint64_t>(values_, values.size());
  for (const std::string& value : values) put(values_, value);
}

void GgufFile::add(const std::string& key, const std::vector<std::int32_t>& values) {
  begin(key, kArray);
  put(values_, kInt32);
  put<std::uint64_t>(values_, values.size());
  for (const std::int32_t value : values) put(values_, value);
}

void GgufFile::add(const std::string& name, std::vector<std::int64_t> shape, at::ScalarType dtype,
                   std::function<at::Tensor()> make) {
  tensors_.push_back({name, std::move(shape), dtype, std::move(make)});
}

std::uint64_t GgufFile::write(const files::Path& path, const std::function<void()>& check) const {
  std::string head = "GGUF";
  put<std::uint32_t>(head, 3);
  put<std::uint64_t>(head, tensors_.size());
  put<std::uint64_t>(head, count_);
  head += values_;
  std::uint64_t offset = 0;
  for (const Tensor& tensor : tensors_) {
    put(head, tensor.name);
    put<std::uint32_t>(head, static_cast<std::uint32_t>(tensor.shape.size()));
    for (auto size = tensor.shape.rbegin(); size != tensor.shape.rend(); ++size)
      put<std::uint64_t>(head, static_cast<std::uint64_t>(*size));
    put<std::uint32_t>(head, type_of(tensor.dtype));
    put<std::uint64_t>(head, offset);
    offset += aligned(tensor.bytes());
  }
  head.resize(aligned(head.size()), '\0');
  require_free_space(path, head.size() + offset);
  files::AtomicFile file(path);
  file.write(head);
  for (const Tensor& tensor : tensors_) {
    const at::Tensor made = tensor.make().to(tensor.dtype).contiguous();
    if (made.sizes() != at::IntArrayRef(tensor.shape))
      throw_error<InternalError>("GGUF: {} has another shape than was announced", tensor.name);
    file.write(made.data_ptr(), tensor.bytes());
    const std::string padding(aligned(tensor.bytes()) - tensor.bytes(), '\0');
    file.write(padding);
  }
  check();
  file.commit();
  return file.bytes_written();
}

}  // namespace heddle::ckpt
