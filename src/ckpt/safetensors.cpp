#include "ckpt/safetensors.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/quote.h"
#include "base/text.h"

namespace heddle::ckpt {

std::int64_t TensorSpec::numel() const {
  // An empty tensor may have other dimensions whose product overflows.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

std::uint64_t TensorSpec::bytes() const {
  return static_cast<std::uint64_t>(numel()) * static_cast<std::uint64_t>(bits_of(dtype)) / 8;
}

std::string StoredTensor::where() const {
  return fmt::format("{}: tensor '{}'", file.string(), text::shown(name));
}

void StoredTensor::drop(std::size_t begin, std::size_t count) const {
  if (map) map->drop(static_cast<std::size_t>(data.data() - map->bytes().data()) + begin, count);
}

void throw_missing_tensor(const std::string& place, std::string_view name,
                          const std::vector<StoredTensor>& tensors) {
  std::vector<std::string> names;
  for (const StoredTensor& tensor : tensors) names.push_back(tensor.name);
  const std::string near = text::nearest(name, names);
  throw_error<ModelError>("{}: there is no tensor '{}' among its {}{}", place, text::shown(name),
                          names.size(),
                          near.empty() ? "" : fmt::format("; the nearest is '{}'", near));
}

SafetensorsFile::SafetensorsFile(Path path, const Path& folder) : path_(std::move(path)) {
  const auto map = std::make_shared<const files::MappedFile>(path_, folder);
  SafetensorsHeader header = parse_safetensors_header(map->bytes(), path_.string());
  metadata_ = std::move(header.metadata);
  const auto data = map->bytes().subspan(header.data_offset);
  tensors_.reserve(header.entries.size());
  for (SafetensorsHeader::Entry& entry : header.entries) {
    StoredTensor tensor;
    static_cast<TensorSpec&>(tensor) = std::move(entry);
    tensor.data = data.subspan(entry.begin, entry.end - entry.begin);
    tensor.map = map;
    tensor.file = path_;
    tensors_.push_back(std::move(tensor));
  }
  index_.reserve(tensors_.size());
  for (std::size_t i = 0; i < tensors_.size(); ++i) index_.emplace(tensors_[i].name, i);
}

const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

const StoredTensor& SafetensorsFile::at(std::string_view name) const {
  if (const StoredTensor* tensor = find(name)) return *tensor;
  throw_missing_tensor(path_.string(), name, tensors_);
}

SafetensorsWriter::SafetensorsWriter(const Path& path, std::vector<TensorSpec> tensors,
                                     const std::map<std::string, std::string>& metadata,
                                     hash::Hasher* hasher)
    : path_(path.string()), file_(path), hasher_(hasher), order_(std::move(tensors)) {
  std::sort(order_.begin(), order_.end(), [](const TensorSpec& a, const TensorSpec& b) {
    return std::tie(b.dtype, a.name) < std::tie(a.dtype, b.name);
  });
  std::unordered_map<std::string_view, int> seen;
  std::string header = "{";
  if (!metadata.empty()) header += "\"__metadata__\":" + nlohmann::json(metadata).dump() + ",";
  std::uint64_t offset = 0;
  for (const TensorSpec& spec : order_) {
    if (spec.name == "__metadata__" || ++seen[spec.name] > 1) {
      throw_error<InternalError>("{}: two tensors would be called '{}'", path_, spec.name);
    }
    const std::uint64_t end = offset + spec.bytes();
    header += fmt::format("{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}},",
                          nlohmann::json(spec.name).dump(), name_of(spec.dtype),
                          fmt::join(spec.shape, ","), offset, end);
    offset = end;
  }
  if (header.back() == ',') header.pop_back();
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');  // the data begins at a multiple of 8 bytes
  std::uint64_t length = header.size();
  std::array<char, 8> little_endian;
  for (char& byte : little_endian) {
    byte = static_cast<char>(length & 0xff);
    length >>= 8;
  }
  write(little_endian.data(), little_endian.size());
  write(header.data(), header.size());
  skip_complete();
}

void SafetensorsWriter::write(const void* bytes, std::size_t count) {
  file_.write(bytes, count);
  if (hasher_) hasher_->append({static_cast<const char*>(bytes), count});
}

void SafetensorsWriter::skip_complete() {
  while (current_ < order_.size() && current_bytes_ == order_[current_].bytes()) {
    ++current_;
    current_bytes_ = 0;
  }
}

void SafetensorsWriter::append(std::string_view name, std::span<const std::byte> bytes) {
  if (bytes.empty()) return;  // also: an empty tensor, which has no turn
  if (current_ == order_.size() || order_[current_].name != name) {
    throw_error<InternalError>("{}: data for tensor '{}' came while '{}' was due", path_, name,
                               current_ == order_.size() ? "the end" : order_[current_].name);
  }
  current_bytes_ += bytes.size();
  if (current_bytes_ > order_[current_].bytes()) {
    throw_error<InternalError>("{}: tensor '{}' has {} bytes, more came", path_, name,
                               order_[current_].bytes());
  }
  write(bytes.data(), bytes.size());
  skip_complete();
}

void SafetensorsWriter::commit() {
  if (current_ != order_.size()) {
    throw_error<InternalError>("{}: tensor '{}' has {} of its {} bytes", path_,
                               order_[current_].name, current_bytes_, order_[current_].bytes());
  }
  file_.commit();
}

}  // namespace heddle::ckpt
