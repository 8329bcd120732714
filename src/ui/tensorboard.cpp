#include "ui/tensorboard.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <charconv>
#include <chrono>
#include <system_error>

#include "base/errors.h"
#include "base/files.h"

namespace heddle::ui {
namespace {

constexpr std::array<std::uint32_t, 256> kCrcTable = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ ((value & 1) != 0 ? 0x82F63B78u : 0u);
    table[i] = value;
  }
  return table;
}();

template <class T>
void append_little_endian(std::string& out, T value) {
  for (std::size_t i = 0; i < sizeof value; ++i) out += static_cast<char>(value >> 8 * i);
}

void append_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

// Wire types of protocol buffers.
constexpr int kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5;

void append_tag(std::string& out, int field, int wire_type) {
  append_varint(out, static_cast<std::uint64_t>(field << 3 | wire_type));
}

void append_bytes(std::string& out, int field, std::string_view bytes) {
  append_tag(out, field, kBytes);
  append_varint(out, bytes.size());
  out += bytes;
}

/// Summary { value { tag = 1, simple_value = 2 } }, without the enclosing field.
void append_scalar(std::string& summary, std::string_view tag, double value) {
  std::string entry;
  append_bytes(entry, 1, tag);
  append_tag(entry, 2, kFixed32);
  append_little_endian(entry, std::bit_cast<std::uint32_t>(static_cast<float>(value)));
  append_bytes(summary, 1, entry);
}

// Members of tensorflow's DataType and of tensorboard's DataClass and Status.
constexpr std::uint64_t kFloat = 1, kString = 7;
constexpr std::uint64_t kTensorData = 2;
constexpr std::uint64_t kSuccess = 1, kFailure = 2;

void append_number(std::string& out, int field, std::uint64_t value) {
  append_tag(out, field, kVarint);
  append_varint(out, value);
}

void append_double(std::string& out, int field, double value) {
  append_tag(out, field, kFixed64);
  append_little_endian(out, std::bit_cast<std::uint64_t>(value));
}

/// TensorProto { dtype = 1, tensor_shape = 2 { dim = 2 { size = 1 } }, string_val = 8 } with one
/// dimension.
std::string tensor(std::uint64_t dtype, const std::vector<std::string_view>& strings) {
  std::string dim, shape, out;
  append_number(dim, 1, strings.size());
  append_bytes(shape, 2, dim);
  append_number(out, 1, dtype);
  append_bytes(out, 2, shape);
  for (const std::string_view text : strings) append_bytes(out, 8, text);
  return out;
}

/// Summary { value { tag = 1, tensor = 8, metadata = 9 { plugin_data = 1 { plugin_name = 1,
/// content = 2 }, data_class = 4 } } }.
std::string plugin_summary(std::string_view tag, std::string_view plugin, std::string_view content,
                           std::string_view tensor) {
  std::string data, metadata, value, summary;
  append_bytes(data, 1, plugin);
  append_bytes(data, 2, content);
  append_bytes(metadata, 1, data);
  append_number(metadata, 4, kTensorData);
  append_bytes(value, 1, tag);
  append_bytes(value, 8, tensor);
  append_bytes(value, 9, metadata);
  append_bytes(summary, 1, value);
  return summary;
}

/// google.protobuf.Value { number_value = 2, string_value = 3, bool_value = 4 }.
std::string hparam(const std::string& yaml) {
  std::string out;
  double number = 0;
  const auto [end, error] = std::from_chars(yaml.data(), yaml.data() + yaml.size(), number);
  if (yaml == "true" || yaml == "false") {
    append_number(out, 4, yaml == "true" ? 1 : 0);
  } else if (error == std::errc() && end == yaml.data() + yaml.size()) {
    append_double(out, 2, number);
  } else {
    append_bytes(out, 3, yaml);
  }
  return out;
}

double seconds_since_epoch() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  std::uint32_t crc = ~0u;
  for (const char c : bytes)
    crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<unsigned char>(c)) & 0xFF];
  return ~crc;
}

std::uint32_t masked_crc32c(std::string_view bytes) {
  const std::uint32_t crc = crc32c(bytes);
  return (crc >> 15 | crc << 17) + 0xA282EAD8u;
}

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& folder,
                                     std::int64_t resumed_step) {
  files::make_writable_directory(folder);
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) != 0) host = {"localhost"};
  // TensorBoard reads the files of a folder in the order of their names, so the time comes first.
  file_ = folder / fmt::format("events.out.tfevents.{:.6f}.{}.{}", seconds_since_epoch(),
                               host.data(), getpid());
  descriptor_ = open(file_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
  if (descriptor_ < 0) {
    throw_error<FileError>("cannot write {}: {}", file_.string(), strerror(errno));
  }
  std::string version;
  append_bytes(version, 3, "brain.Event:2");
  event(0, version);
  if (resumed_step > 0) {
    std::string start, field;
    append_tag(start, 1, kVarint);
    append_varint(start, 1);  // SessionLog.START
    append_bytes(field, 7, start);
    event(resumed_step + 1, field);
  }
}

TensorBoardWriter::~TensorBoardWriter() {
  if (descriptor_ >= 0) close(descriptor_);
}

void TensorBoardWriter::scalar(std::string_view tag, std::int64_t step, double value) {
  std::string summary, field;
  append_scalar(summary, tag, value);
  append_bytes(field, 5, summary);
  event(step, field);
}

void TensorBoardWriter::write(const StepMetrics& m) {
  std::string summary, field;
  if (m.step > 0) {
    append_scalar(summary, "train/loss", m.loss);
    append_scalar(summary, "train/lr", m.lr);
    append_scalar(summary, "train/grad_norm", m.grad_norm);
    append_scalar(summary, "train/epoch", m.epoch);
    append_scalar(summary, "speed/tokens_per_s", m.tokens_per_s);
    append_scalar(summary, "speed/step_s", m.step_s);
    if (m.mfu > 0) append_scalar(summary, "speed/mfu", m.mfu);
    append_scalar(summary, "speed/memory_gib", static_cast<double>(m.memory_bytes) / (1 << 30));
  }
  for (const auto& [name, value] : m.extras) {
    const bool is_eval = name.starts_with("eval_");
    append_scalar(summary, is_eval ? "eval/" + name.substr(5) : "train/" + name, value);
  }
  append_bytes(field, 5, summary);
  event(m.step, field);
}

void TensorBoardWriter::text(std::string_view tag, std::int64_t step, std::string_view markdown) {
  std::string field;
  append_bytes(field, 5, plugin_summary(tag, "text", "", tensor(kString, {markdown})));
  event(step, field);
}

/// HParamsPluginData with one of session_start_info = 3 and session_end_info = 4.
void TensorBoardWriter::hparams_event(std::string_view tag, int field, std::string_view message) {
  std::string data, event_field;
  append_bytes(data, field, message);
  append_bytes(event_field, 5, plugin_summary(tag, "hparams", data, tensor(kFloat, {})));
  event(0, event_field);
}

void TensorBoardWriter::hyper_parameters(
    const std::vector<std::pair<std::string, std::string>>& entries) {
  // SessionStartInfo { hparams = 1: map, start_time_secs = 5 }.
  std::string start;
  for (const auto& [name, value] : entries) {
    std::string entry;
    append_bytes(entry, 1, name);
    append_bytes(entry, 2, hparam(value));
    append_bytes(start, 1, entry);
  }
  append_double(start, 5, seconds_since_epoch());
  hparams_event("_hparams_/session_start_info", 3, start);
}

void TensorBoardWriter::end(bool succeeded) {
  // SessionEndInfo { status = 1, end_time_secs = 2 }.
  std::string ended;
  append_number(ended, 1, succeeded ? kSuccess : kFailure);
  append_double(ended, 2, seconds_since_epoch());
  hparams_event("_hparams_/session_end_info", 4, ended);
}

void TensorBoardWriter::event(std::int64_t step, std::string_view field_bytes) {
  std::string payload;
  append_tag(payload, 1, kFixed64);
  append_little_endian(payload, std::bit_cast<std::uint64_t>(seconds_since_epoch()));
  append_tag(payload, 2, kVarint);
  append_varint(payload, static_cast<std::uint64_t>(step));
  payload += field_bytes;

  std::string record;
  append_little_endian(record, static_cast<std::uint64_t>(payload.size()));
  append_little_endian(record, masked_crc32c(record));
  record += payload;
  append_little_endian(record, masked_crc32c(payload));
  const char* next = record.data();
  for (std::size_t left = record.size(); left > 0;) {
    const ssize_t count = ::write(descriptor_, next, left);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_error<FileError>("cannot write {}: {}", file_.string(), strerror(errno));
    next += count;
    left -= static_cast<std::size_t>(count);
  }
}

}  // namespace heddle::ui
