#include "ui/tensorboard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <map>

#include "base/files.h"
#include "testing/temporary_directory.h"

namespace heddle::ui {
namespace {

template <class T>
T little_endian(std::string_view bytes) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof value; ++i) {
    value |= static_cast<T>(static_cast<unsigned char>(bytes[i])) << 8 * i;
  }
  return value;
}

std::uint64_t take_varint(std::string_view& bytes) {
  std::uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = static_cast<unsigned char>(bytes.at(0));
    bytes.remove_prefix(1);
    value |= static_cast<std::uint64_t>(byte & 0x7F) << shift;
    if (byte < 0x80) return value;
  }
}

struct Decoded {
  std::uint64_t number = 0;
  std::string_view bytes;
};

/// A protocol-buffer message as field number -> values, whatever the schema.
std::multimap<int, Decoded> decode(std::string_view message) {
  std::multimap<int, Decoded> fields;
  while (!message.empty()) {
    const std::uint64_t tag = take_varint(message);
    Decoded value;
    switch (tag & 7) {
      case 0:
        value.number = take_varint(message);
        break;
      case 1:
        value.number = little_endian<std::uint64_t>(message.substr(0, 8));
        message.remove_prefix(8);
        break;
      case 2: {
        const std::size_t size = take_varint(message);
        value.bytes = message.substr(0, size);
        EXPECT_EQ(value.bytes.size(), size);
        message.remove_prefix(size);
        break;
      }
      case 5:
        value.number = little_endian<std::uint32_t>(message.substr(0, 4));
        message.remove_prefix(4);
        break;
      default:
        ADD_FAILURE() << "wire type " << (tag & 7);
        return fields;
    }
    fields.emplace(static_cast<int>(tag >> 3), value);
  }
  return fields;
}

/// The payloads of a TFRecord file, their checksums verified.
std::vector<std::string_view> records(std::string_view file) {
  std::vector<std::string_view> out;
  while (!file.empty()) {
    const auto size = little_endian<std::uint64_t>(file.substr(0, 8));
    EXPECT_EQ(little_endian<std::uint32_t>(file.substr(8, 4)), masked_crc32c(file.substr(0, 8)));
    const std::string_view payload = file.substr(12, size);
    EXPECT_EQ(little_endian<std::uint32_t>(file.substr(12 + size, 4)), masked_crc32c(payload));
    out.push_back(payload);
    file.remove_prefix(16 + size);
  }
  return out;
}

std::string only_file(const std::filesystem::path& folder) {
  auto entry = std::filesystem::directory_iterator(folder);
  EXPECT_THAT(entry->path().filename().string(), ::testing::StartsWith("events.out.tfevents."));
  return files::read(entry->path());
}

TEST(TensorBoard, Crc32cMatchesPublishedVectors) {  // RFC 3720, appendix B.4
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62A8AB43u);
  EXPECT_EQ(crc32c(""), 0u);
}

TEST(TensorBoard, ScalarsCanBeDecoded) {
  const testing::TemporaryDirectory dir;
  TensorBoardWriter(dir / "tb", 0).scalar("train/loss", 300, 1.5);
  const std::string file = only_file(dir / "tb");
  const auto events = records(file);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(decode(events[0]).find(3)->second.bytes, "brain.Event:2");
  const auto event = decode(events[1]);
  EXPECT_GT(std::bit_cast<double>(event.find(1)->second.number), 1.7e9);
  EXPECT_EQ(event.find(2)->second.number, 300u);
  const auto summary = decode(event.find(5)->second.bytes);
  const auto value = decode(summary.find(1)->second.bytes);
  EXPECT_EQ(value.find(1)->second.bytes, "train/loss");
  EXPECT_EQ(std::bit_cast<float>(static_cast<std::uint32_t>(value.find(2)->second.number)), 1.5f);
}

TEST(TensorBoard, AStepIsOneEventWithAllCurves) {
  const testing::TemporaryDirectory dir;
  StepMetrics m;
  m.step = 1 << 20;
  m.extras = {{"eval_loss", 0.25}, {"aux_loss", 0.5}};
  TensorBoardWriter(dir / "tb", 0).write(m);
  const std::string file = only_file(dir / "tb");
  const auto event = decode(records(file).at(1));
  std::vector<std::string> tags;
  const auto summary = decode(event.find(5)->second.bytes);
  for (const auto& [field, value] : summary) {
    tags.emplace_back(decode(value.bytes).find(1)->second.bytes);
  }
  EXPECT_THAT(tags, ::testing::IsSupersetOf({"train/loss", "train/lr", "train/grad_norm",
                                             "speed/tokens_per_s", "eval/loss", "train/aux_loss"}));
}

/// Metadata's plugin of the only value of an event's summary, with what the plugin gets.
struct PluginValue {
  std::string_view tag, plugin, content;
  std::multimap<int, Decoded> tensor;
};

PluginValue plugin_value(std::string_view record) {
  const auto event = decode(record);
  const auto summary = decode(event.find(5)->second.bytes);
  const auto value = decode(summary.find(1)->second.bytes);
  const auto metadata = decode(value.find(9)->second.bytes);
  EXPECT_EQ(metadata.find(4)->second.number, 2u);  // DATA_CLASS_TENSOR
  const auto plugin = decode(metadata.find(1)->second.bytes);
  return {value.find(1)->second.bytes, plugin.find(1)->second.bytes, plugin.find(2)->second.bytes,
          decode(value.find(8)->second.bytes)};
}

TEST(TensorBoard, TextsGoToTheirPlugin) {
  const testing::TemporaryDirectory dir;
  TensorBoardWriter(dir / "tb", 0).text("samples/1", 7, "    hello");
  const std::string file = only_file(dir / "tb");
  const PluginValue value = plugin_value(records(file).at(1));
  EXPECT_EQ(value.tag, "samples/1");
  EXPECT_EQ(value.plugin, "text");
  EXPECT_EQ(value.tensor.find(1)->second.number, 7u);  // DT_STRING
  EXPECT_EQ(value.tensor.find(8)->second.bytes, "    hello");
}

TEST(TensorBoard, HyperParametersHaveTypes) {
  const testing::TemporaryDirectory dir;
  {
    TensorBoardWriter writer(dir / "tb", 0);
    writer.hyper_parameters({{"optim.lr", "2e-05"},
                             {"data.packing", "true"},
                             {"optim.betas", "[0.9, 0.999]"},
                             {"train.seed", "0"},
                             {"model.path", "7b"}});
    writer.end(false);
  }
  const std::string file = only_file(dir / "tb");
  const auto events = records(file);
  const PluginValue value = plugin_value(events.at(1));
  EXPECT_EQ(value.tag, "_hparams_/session_start_info");
  EXPECT_EQ(value.plugin, "hparams");
  const auto data = decode(value.content);
  const auto start = decode(data.find(3)->second.bytes);
  std::map<std::string_view, std::multimap<int, Decoded>> found;
  for (auto [at, end] = start.equal_range(1); at != end; ++at) {
    const auto entry = decode(at->second.bytes);
    found[entry.find(1)->second.bytes] = decode(entry.find(2)->second.bytes);
  }
  EXPECT_EQ(std::bit_cast<double>(found.at("optim.lr").find(2)->second.number), 2e-5);
  EXPECT_EQ(found.at("data.packing").find(4)->second.number, 1u);
  EXPECT_EQ(found.at("optim.betas").find(3)->second.bytes, "[0.9, 0.999]");
  EXPECT_EQ(std::bit_cast<double>(found.at("train.seed").find(2)->second.number), 0);
  EXPECT_EQ(found.at("model.path").find(3)->second.bytes, "7b");
  EXPECT_GT(std::bit_cast<double>(start.find(5)->second.number), 1.7e9);

  const PluginValue end = plugin_value(events.at(2));
  EXPECT_EQ(end.tag, "_hparams_/session_end_info");
  const auto ended = decode(decode(end.content).find(4)->second.bytes);
  EXPECT_EQ(ended.find(1)->second.number, 2u);  // STATUS_FAILURE
}

TEST(TensorBoard, AResumedWriterDeclaresWhereItStarts) {
  const testing::TemporaryDirectory dir;
  { const TensorBoardWriter writer(dir / "tb", 41); }
  const std::string file = only_file(dir / "tb");
  const auto start = decode(records(file).at(1));
  EXPECT_EQ(start.find(2)->second.number, 42u);
  EXPECT_EQ(decode(start.find(7)->second.bytes).find(1)->second.number, 1u);
}

}  // namespace
}  // namespace heddle::ui
