#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>
#include <tuple>
#include <unordered_set>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/quote.h"
#include "ckpt/safetensors.h"

namespace heddle::ckpt {
namespace {

// The Python library's limit: a header beyond it is a damaged length, not a model.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

std::string show_name(const std::string& name) { return fmt::format("'{}'", text::shown(name)); }

/// Reads the header's JSON piece by piece: a document tree would accept a name that occurs twice,
/// and costs more than the header itself for the hundred thousand tensors of a large
/// mixture-of-experts model.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderReader(SafetensorsHeader& header, const std::string& file) : header_(header), file_(file) {}

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(number_integer_t value) override {
    return fail("{} is negative: {}", place(), value);
  }
  bool number_float(number_float_t, const string_t& digits) override {
    return fail("{} is not a whole number: {}", place(), text::shown(digits));
  }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (where_ == Where::kShape) {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        return fail("{} is too large: {}", place(), value);
      }
      entry_.shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (where_ == Where::kOffsets) {
      if (++offsets_ > 2) return fail("{} has more than two numbers", place());
      (offsets_ == 1 ? entry_.begin : entry_.end) = value;
      return true;
    }
    return unexpected("a number");
  }

  bool string(string_t& value) override {
    if (where_ == Where::kMetadata) {
      header_.metadata[key_] = std::move(value);
      return true;
    }
    if (where_ == Where::kTensor && key_ == "dtype") {
      const auto dtype = parse_dtype(value);
      if (!dtype)
        return fail("{} is {}, which is no element type of the format", place(), show_name(value));
      entry_.dtype = *dtype;
      return true;
    }
    return unexpected("a string");
  }

  bool start_object(std::size_t) override {
    if (where_ == Where::kOutside) {
      where_ = Where::kFile;
      return true;
    }
    if (where_ != Where::kFile) return unexpected("an object");
    where_ = key_ == "__metadata__" ? Where::kMetadata : Where::kTensor;
    entry_ = {};
    entry_.name = key_;
    keys_.clear();
    offsets_ = 0;
    return true;
  }

  bool key(string_t& value) override {
    key_ = std::move(value);
    if (where_ == Where::kFile) {
      if (!names_.insert(key_).second) return fail("{} occurs twice", show_name(key_));
      return true;
    }
    if (!keys_.insert(key_).second) return fail("{} occurs twice", place());
    if (where_ == Where::kTensor && key_ != "dtype" && key_ != "shape" && key_ != "data_offsets") {
      return fail("{} is not a key of the format", place());
    }
    return true;
  }

  bool end_object() override {
    if (where_ == Where::kTensor) {
      for (const char* key : {"dtype", "shape", "data_offsets"}) {
        if (!keys_.contains(key)) return fail("tensor {} has no '{}'", show_name(entry_.name), key);
      }
      header_.entries.push_back(std::move(entry_));
    }
    where_ = where_ == Where::kFile ? Where::kOutside : Where::kFile;
    return true;
  }

  bool start_array(std::size_t) override {
    if (where_ != Where::kTensor || key_ == "dtype") return unexpected("a list");
    where_ = key_ == "shape" ? Where::kShape : Where::kOffsets;
    return true;
  }

  bool end_array() override {
    if (where_ == Where::kOffsets && offsets_ != 2) return fail("{} needs two numbers", place());
    where_ = Where::kTensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception& error) override {
    throw_error<ModelError>("{}: the safetensors header is not JSON at its byte {}: {}", file_,
                            position, error.what());
  }

 private:
  enum class Where { kOutside, kFile, kMetadata, kTensor, kShape, kOffsets };

  template <class... Args>
  [[noreturn]] bool fail(fmt::format_string<Args...> format, Args&&... args) {
    throw_error<ModelError>("{}: bad safetensors header: {}", file_,
                            fmt::format(format, std::forward<Args>(args)...));
  }
  bool unexpected(const char* what) { return fail("{} must not be {}", place(), what); }

  std::string place() const {
    switch (where_) {
      case Where::kOutside:
        return "the header";
      case Where::kFile:
        return fmt::format("tensor {}", show_name(key_));
      case Where::kMetadata:
        return fmt::format("metadata {}", show_name(key_));
      default:
        return fmt::format("'{}' of tensor {}", key_.size() <= 200 ? key_ : "...",
                           show_name(entry_.name));
    }
  }

  SafetensorsHeader& header_;
  const std::string& file_;
  Where where_ = Where::kOutside;
  std::string key_;
  SafetensorsHeader::Entry entry_;
  int offsets_ = 0;
  std::unordered_set<std::string> names_;
  std::unordered_set<std::string> keys_;  // of the object at hand
};

/// Bytes of the row-major data, or nothing when they overflow or are no whole number.
std::optional<std::uint64_t> checked_bytes(const TensorSpec& spec) {
  std::uint64_t bits = static_cast<std::uint64_t>(bits_of(spec.dtype));
  // A zero anywhere makes the tensor empty, however large the rest.
  if (std::find(spec.shape.begin(), spec.shape.end(), 0) != spec.shape.end()) return 0;
  for (const std::int64_t size : spec.shape) {
    if (__builtin_mul_overflow(bits, static_cast<std::uint64_t>(size), &bits)) return std::nullopt;
  }
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

void check_layout(SafetensorsHeader& header, std::uint64_t data_bytes, const std::string& file) {
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  std::uint64_t expected = 0;
  const std::string* before = nullptr;
  for (const SafetensorsHeader::Entry& entry : header.entries) {
    const std::string name = show_name(entry.name);
    if (entry.end < entry.begin) {
      throw_error<ModelError>("{}: tensor {} ends at byte {} before it begins at byte {}", file,
                              name, entry.end, entry.begin);
    }
    if (entry.end > data_bytes) {
      throw_error<ModelError>(
          "{}: tensor {} ends at byte {} of the data, which has {} bytes: the file is cut off or "
          "damaged",
          file, name, entry.end, data_bytes);
    }
    if (entry.begin < expected) {
      throw_error<ModelError>(
          "{}: tensor {} begins at byte {} and overlaps tensor {}, which ends at byte {}", file,
          name, entry.begin, show_name(*before), expected);
    }
    if (entry.begin > expected) {
      throw_error<ModelError>("{}: {} bytes before tensor {} belong to no tensor", file,
                              entry.begin - expected, name);
    }
    const auto bytes = checked_bytes(entry);
    if (!bytes || *bytes != entry.end - entry.begin) {
      throw_error<ModelError>(
          "{}: tensor {} of type {} and shape [{}] has {} bytes in the file, expected {}", file,
          name, name_of(entry.dtype), fmt::join(entry.shape, ", "), entry.end - entry.begin,
          bytes ? std::to_string(*bytes) : "a whole number below 2^61");
    }
    expected = entry.end;
    before = &entry.name;
  }
  if (expected != data_bytes) {
    throw_error<ModelError>("{}: the tensors end at byte {} of the data, which has {} bytes", file,
                            expected, data_bytes);
  }
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> bytes,
                                           const std::string& file) {
  const char* text = reinterpret_cast<const char*>(bytes.data());
  if (std::string_view(text, bytes.size()).starts_with("version https://git-lfs")) {
    throw_error<ModelError>(
        "{}: a Git LFS pointer, not the weights: run `git lfs pull` in its folder", file);
  }
  std::uint64_t length = 0;
  if (bytes.size() < sizeof length) {
    throw_error<ModelError>("{}: {} bytes are too few for a safetensors file", file, bytes.size());
  }
  for (std::size_t i = 0; i < sizeof length; ++i) {
    length |= std::to_integer<std::uint64_t>(bytes[i]) << (8 * i);
  }
  const std::uint64_t rest = bytes.size() - sizeof length;
  if (length > rest || length > kMaxHeaderBytes) {
    throw_error<ModelError>(
        "{}: not a safetensors file, or cut off: its header should have {} bytes, the file has {} "
        "after the length",
        file, length, rest);
  }
  text += sizeof length;
  if (length == 0 || *text != '{') {
    throw_error<ModelError>("{}: the safetensors header must begin with '{{'", file);
  }
  SafetensorsHeader header;
  header.data_offset = sizeof length + length;
  HeaderReader reader(header, file);
  nlohmann::json::sax_parse(text, text + length, &reader);
  check_layout(header, rest - length, file);
  return header;
}

}  // namespace heddle::ckpt
