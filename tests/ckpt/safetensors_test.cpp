#include "ckpt/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "fixtures.h"
#include "testing/paths.h"
#include "testing/temporary_directory.h"

namespace heddle::ckpt {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::raw_safetensors;

const Path kGolden = heddle::testing::source_path("tests/ckpt/golden/all_dtypes.safetensors");

TEST(Safetensors, ReadsEveryTypeThatThePythonLibraryWrites) {
  const SafetensorsFile file(kGolden);
  EXPECT_EQ(file.tensors().size(), 24u);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.at("t.float8_e4m3fn").dtype, Dtype::kF8E4M3);
  EXPECT_EQ(file.at("t.uint16").dtype, Dtype::kU16);
  EXPECT_EQ(file.at("t.complex64").data.size(), 40u);
  EXPECT_EQ(file.at("scalar").shape, std::vector<std::int64_t>{});
  EXPECT_EQ(file.at("empty").shape, (std::vector<std::int64_t>{0, 4}));
  EXPECT_NE(file.find("naïve \"x\"\\\n\t\x01\x7f/日本"), nullptr);
  float value = 0;
  std::memcpy(&value, file.at("b.float32").data.data() + 20, 4);
  EXPECT_EQ(value, 5.0f);
}

TEST(Safetensors, WritesTheBytesOfThePythonLibrary) {
  const heddle::testing::TemporaryDirectory dir;
  const SafetensorsFile file(kGolden);
  std::vector<TensorSpec> specs(file.tensors().rbegin(), file.tensors().rend());
  hash::Hasher hasher;
  SafetensorsWriter writer(dir / "copy.safetensors", specs, file.metadata(), &hasher);
  for (const TensorSpec& spec : writer.order()) {
    const auto data = file.at(spec.name).data;
    for (std::size_t i = 0; i < data.size(); i += 3) {
      writer.append(spec.name, data.subspan(i, std::min<std::size_t>(3, data.size() - i)));
    }
  }
  writer.commit();
  const std::string bytes = files::read(dir / "copy.safetensors");
  EXPECT_EQ(bytes, files::read(kGolden));
  EXPECT_EQ(writer.bytes_written(), bytes.size());
  EXPECT_EQ(hasher.hex(), hash::Hasher().append(bytes).hex());
}

TEST(Safetensors, AFileOfNoTensorsIsAFile) {
  const heddle::testing::TemporaryDirectory dir;
  SafetensorsWriter(dir / "none.safetensors", {}).commit();
  EXPECT_TRUE(SafetensorsFile(dir / "none.safetensors").tensors().empty());
}

TEST(Safetensors, RefusesWhatIsNotTheFormat) {
  const std::string good = R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})";
  const auto entry = [](const std::string& name, const std::string& dtype, const std::string& shape,
                        const std::string& offsets) {
    return "\"" + name + R"(":{"dtype":")" + dtype + R"(","shape":[)" + shape +
           R"(],"data_offsets":[)" + offsets + "]}";
  };
  const auto object = [](const std::string& inside) { return "{" + inside + "}"; };
  struct Case {
    std::string bytes;
    std::string message;
  };
  const std::vector<Case> cases = {
      {"", "0 bytes are too few"},
      {"1234567", "7 bytes are too few"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"},
      {raw_safetensors(good, 24).substr(0, 30), "should have 57 bytes"},
      {std::string(8, '\xff') + "{}", "should have 18446744073709551615 bytes"},
      {raw_safetensors("", 0), "must begin with '{'"},
      {raw_safetensors("[]", 0), "must begin with '{'"},
      {raw_safetensors(" {}", 0), "must begin with '{'"},
      {raw_safetensors("{\"a\":", 0), "is not JSON"},
      {raw_safetensors("{} x", 0), "is not JSON"},
      {raw_safetensors("{\"\xff\":1}", 0), "is not JSON"},
      {raw_safetensors(R"({"a":1})", 0), "tensor 'a' must not be a number"},
      {raw_safetensors(R"({"a":null})", 0), "tensor 'a' must not be null"},
      {raw_safetensors(R"({"a":[]})", 0), "tensor 'a' must not be a list"},
      {raw_safetensors(R"({"a":{}})", 0), "tensor 'a' has no 'dtype'"},
      {raw_safetensors(R"({"a":{"dtype":"F32","shape":[]}})", 0),
       "tensor 'a' has no 'data_offsets'"},
      {raw_safetensors(R"({"a":{"dtype":"F32","dtype":"F32"}})", 0),
       "'dtype' of tensor 'a' occurs twice"},
      {raw_safetensors(R"({"a":{"color":"red"}})", 0), "'color' of tensor 'a' is not a key"},
      {raw_safetensors(R"({"a":{"dtype":32}})", 0), "'dtype' of tensor 'a' must not be a number"},
      {raw_safetensors(R"({"a":{"dtype":["F32"]}})", 0),
       "'dtype' of tensor 'a' must not be a list"},
      {raw_safetensors(R"({"a":{"shape":{}}})", 0), "'shape' of tensor 'a' must not be an object"},
      {raw_safetensors(R"({"a":{"shape":"x"}})", 0), "'shape' of tensor 'a' must not be a string"},
      {raw_safetensors(R"({"a":{"shape":[[1]]}})", 0), "'shape' of tensor 'a' must not be a list"},
      {raw_safetensors(R"({"__metadata__":{"a":1}})", 0), "metadata 'a' must not be a number"},
      {raw_safetensors(R"({"__metadata__":{"a":"1","a":"2"}})", 0), "metadata 'a' occurs twice"},
      {raw_safetensors(R"({"__metadata__":"pt"})", 0),
       "tensor '__metadata__' must not be a string"},
      {raw_safetensors(object(entry("a", "F33", "1", "0,4")), 4),
       "is 'F33', which is no element type"},
      {raw_safetensors(object(entry("a", "F32", "-1", "0,4")), 4), "is negative: -1"},
      {raw_safetensors(object(entry("a", "F32", "1.5", "0,4")), 4), "not a whole number: 1.5"},
      {raw_safetensors(object(entry("a", "F32", "1", "0")), 4), "needs two numbers"},
      {raw_safetensors(object(entry("a", "F32", "1", "0,4,8")), 4), "more than two numbers"},
      {raw_safetensors(object(entry("a", "F32", "18446744073709551615", "0,4")), 4), "too large"},
      {raw_safetensors(object(entry("a", "F32", "4294967296,4294967296", "0,0")), 0), "below 2^61"},
      {raw_safetensors(object(entry("a", "F32", "1", "4,0")), 4),
       "ends at byte 0 before it begins at byte 4"},
      {raw_safetensors(object(entry("a", "F32", "1", "0,4")), 3),
       "ends at byte 4 of the data, which has 3 bytes"},
      {raw_safetensors(object(entry("a", "F32", "1", "0,4")), 5),
       "end at byte 4 of the data, which has 5 bytes"},
      {raw_safetensors(object(entry("a", "F32", "2", "0,4")), 4),
       "of type F32 and shape [2] has 4 bytes in the file, expected 8"},
      {raw_safetensors(object(entry("a", "F4", "3", "0,1")), 1),
       "shape [3] has 1 bytes in the file, expected a whole number"},
      {raw_safetensors(object(entry("a", "F32", "1", "0,4") + "," + entry("a", "F32", "1", "4,8")),
                       8),
       "'a' occurs twice"},
      {raw_safetensors(object(entry("a", "F32", "2", "0,8") + "," + entry("b", "F32", "1", "4,8")),
                       8),
       "tensor 'b' begins at byte 4 and overlaps tensor 'a', which ends at byte 8"},
      {raw_safetensors(object(entry("a", "F32", "1", "0,4") + "," + entry("b", "F32", "1", "8,12")),
                       12),
       "4 bytes before tensor 'b' belong to no tensor"},
  };
  const heddle::testing::TemporaryDirectory dir;
  for (const Case& c : cases) {
    files::write_atomically(dir / "bad.safetensors", c.bytes);
    const std::string message =
        message_of<ModelError>([&] { SafetensorsFile file(dir / "bad.safetensors"); });
    EXPECT_THAT(message, HasSubstr(c.message)) << c.bytes.substr(0, 200);
    EXPECT_THAT(message, HasSubstr("bad.safetensors: ")) << c.bytes.substr(0, 200);
  }
}

TEST(Safetensors, AcceptsTensorsInAnyHeaderOrderAndEmptyOnesBetween) {
  const heddle::testing::TemporaryDirectory dir;
  files::write_atomically(
      dir / "a.safetensors",
      raw_safetensors(
          R"({"z":{"data_offsets":[4,6],"shape":[2],"dtype":"U8"},"e":{"dtype":"F32","shape":[9223372036854775807,9,0],"data_offsets":[4,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}   )",
          6));
  const SafetensorsFile file(dir / "a.safetensors");
  ASSERT_EQ(file.tensors().size(), 3u);
  EXPECT_EQ(file.tensors()[0].name, "a");
  EXPECT_EQ(file.tensors()[2].name, "z");
  EXPECT_EQ(file.at("e").numel(), 0);  // though the product of its other dimensions overflows
}

TEST(Safetensors, MissingTensorNamesTheNearest) {
  const SafetensorsFile file(kGolden);
  EXPECT_THAT(message_of<ModelError>([&] { file.at("t.float3"); }),
              HasSubstr("there is no tensor 't.float3' among its 24; the nearest is 't.float32'"));
}

TEST(Safetensors, AHundredThousandTensorsOpenQuickly) {
  const heddle::testing::TemporaryDirectory dir;
  std::vector<TensorSpec> specs;
  for (int i = 0; i < 100'000; ++i) {
    specs.push_back({fmt::format("model.layers.{}.mlp.experts.{}.up_proj.weight", i / 512, i % 512),
                     Dtype::kBF16,
                     {1}});
  }
  SafetensorsWriter writer(dir / "many.safetensors", specs);
  const std::array<std::byte, 2> value = {};
  for (const TensorSpec& spec : writer.order()) writer.append(spec.name, value);
  writer.commit();
  const SafetensorsFile file(dir / "many.safetensors");
  EXPECT_EQ(file.tensors().size(), 100'000u);
  EXPECT_NE(file.find("model.layers.100.mlp.experts.511.up_proj.weight"), nullptr);
}

TEST(SafetensorsWriter, GuardsItsCaller) {
  const heddle::testing::TemporaryDirectory dir;
  const std::array<std::byte, 8> bytes = {};
  const auto writer = [&] {
    return std::make_unique<SafetensorsWriter>(
        dir / "a.safetensors",
        std::vector<TensorSpec>{{"a", Dtype::kF32, {1}}, {"b", Dtype::kF32, {1}}});
  };
  EXPECT_THAT(message_of<InternalError>([&] { writer()->append("b", bytes); }),
              HasSubstr("while 'a' was due"));
  EXPECT_THAT(message_of<InternalError>([&] { writer()->append("a", bytes); }),
              HasSubstr("has 4 bytes, more came"));
  EXPECT_THAT(message_of<InternalError>([&] { writer()->commit(); }),
              HasSubstr("'a' has 0 of its 4 bytes"));
  EXPECT_THROW(
      SafetensorsWriter(dir / "b.safetensors", {{"a", Dtype::kF32, {1}}, {"a", Dtype::kI8, {1}}}),
      InternalError);
  EXPECT_FALSE(std::filesystem::exists(dir / "a.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(dir / "a.safetensors.tmp"));
}

}  // namespace
}  // namespace heddle::ckpt
