#include "serve/tinker/wire.h"

#include <gtest/gtest.h>

#include <string>

#include "bytes.h"
#include "serve/http/request.h"

namespace heddle::serve::tinker {
namespace {

using testing::sized;

/// `field` (tag and type in one byte) with these bytes.
std::string message(char field, const std::string& bytes) { return field + sized(bytes); }

std::string repeated(const std::string& part, std::size_t count) {
  std::string out;
  out.reserve(part.size() * count);
  for (std::size_t i = 0; i < count; ++i) out += part;
  return out;
}

std::string refusal_of(const std::string& bytes) {
  try {
    decode_forward_backward(bytes);
  } catch (const HttpError& error) {
    return error.what();
  }
  return "";
}

int status_of(const std::string& bytes) {
  try {
    decode_forward_backward(bytes);
  } catch (const HttpError& error) {
    return error.status();
  }
  return 200;
}

constexpr char kDatum = 0x1A, kChunk = 0x0A, kEntry = 0x12, kKey = 0x0A, kValue = 0x12;

/// A datum whose tensor "x" has these fields.
std::string with_tensor(const std::string& fields) {
  return message(kDatum, message(kEntry, message(kKey, "x") + message(kValue, fields)));
}

// Two bytes of a message become an object of a hundred: 64 MiB of them would be gigabytes.
TEST(TinkerWire, PartsAreCountedBeforeTheyFillTheMemory) {
  constexpr std::size_t kMany = 3'000'000;
  const std::string empty(1, '\0');
  EXPECT_EQ(status_of(repeated(kDatum + empty, 1000)), 200);
  EXPECT_EQ(status_of(repeated(kDatum + empty, kMany)), 413);
  EXPECT_EQ(status_of(message(kDatum, repeated(kChunk + empty, kMany))), 413);
  EXPECT_EQ(status_of(message(kDatum, repeated(kEntry + empty, kMany))), 413);
  EXPECT_EQ(status_of(repeated('\x2A' + empty, kMany)), 413);       // numbers of the loss
  EXPECT_EQ(status_of(with_tensor(repeated("\x20\x01", 9))), 422);  // dimensions one by one
  EXPECT_EQ(status_of(with_tensor(message('\x22', std::string(1 << 20, '\x01')))), 422);  // packed
  EXPECT_EQ(status_of(with_tensor(message('\x22', std::string(2, '\x01')))), 200);
}

TEST(TinkerWire, FieldsThatNobodyKnowsAreRefusedByNumber) {
  const auto entry = [](const std::string& fields) {
    return message(kDatum, message(kEntry, fields));
  };
  const std::string unknown = "\x78\x01";  // field 15, a whole number
  const struct {
    std::string bytes;
    const char* name;
  } cases[] = {
      {unknown, "ForwardBackwardRequest"},
      {message('\x2A', unknown), "LossFnConfigEntry"},
      {message('\x3A', unknown), "LossFnConfigV2Entry"},
      {message('\x3A', message(kValue, unknown)), "LossConfigValue"},
      {message(kDatum, unknown), "Datum"},
      {message(kDatum, message(kChunk, unknown)), "Chunk"},
      {message(kDatum, message(kChunk, message(kChunk, unknown))), "EncodedTextChunk"},
      {entry(unknown), "LossFnInputsEntry"},
      {with_tensor(unknown), "Tensor"},
      {with_tensor(message('\x12', unknown)), "SparseCsr"},
  };
  for (const auto& [bytes, name] : cases)
    EXPECT_EQ(refusal_of(bytes), std::string("field 15 of the protobuf message ") + name +
                                     " is not known, or not with wire type 0");
  EXPECT_EQ(refusal_of("\x08\x01"),
            "field 1 of the protobuf message ForwardBackwardRequest is not known, or not with wire "
            "type 0");
  EXPECT_EQ(status_of(message(kDatum, message('\x1A', unknown) + message('\x22', unknown))), 200)
      << "spans are not looked at";
}

}  // namespace
}  // namespace heddle::serve::tinker
