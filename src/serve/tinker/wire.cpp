#include "serve/tinker/wire.h"

#include <bit>
#include <cstring>
#include <protozero/pbf_reader.hpp>

#include "serve/http/request.h"

namespace heddle::serve::tinker {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the wire's numbers are copied as they are");
using protozero::pbf_reader;

constexpr std::uint32_t length_delimited(std::uint32_t field) {
  return protozero::tag_and_type(field, protozero::pbf_wire_type::length_delimited);
}
constexpr std::uint32_t varint(std::uint32_t field) {
  return protozero::tag_and_type(field, protozero::pbf_wire_type::varint);
}
constexpr std::uint32_t fixed64(std::uint32_t field) {
  return protozero::tag_and_type(field, protozero::pbf_wire_type::fixed64);
}

/// Fields of one message, in all of its parts: a part of two bytes becomes an object of a hundred.
/// A datum has about 25.
constexpr std::int64_t kMostFields = std::int64_t{1} << 21;
/// Dimensions of a tensor.
constexpr std::size_t kMostDimensions = 8;

/// Reads one request and knows how far it has come.
class Decoder {
 public:
  explicit Decoder(std::string_view bytes) : bytes_(bytes), place_(bytes.data()) {}

  ForwardBackwardRequest request() {
    try {
      return read();
    } catch (const protozero::exception& error) {
      throw_http(422, "the protobuf message is broken after byte {}: {}", place_ - bytes_.data(),
                 error.what());
    }
  }

 private:
  bool next(pbf_reader& reader) {
    place_ = reader.data().data();
    if (++fields_ > kMostFields)
      throw_http(413, "the protobuf message has more than {} fields: send fewer data at once",
                 kMostFields);
    return reader.next();
  }

  /// A field that is not known may change what the others mean.
  [[noreturn]] static void refuse(const pbf_reader& reader, const char* message) {
    throw_http(422, "field {} of the protobuf message {} is not known, or not with wire type {}",
               reader.tag(), message, static_cast<std::uint32_t>(reader.wire_type()));
  }

  ForwardBackwardRequest read() {
    ForwardBackwardRequest out;
    pbf_reader reader(bytes_.data(), bytes_.size());
    while (next(reader)) {
      switch (reader.tag_and_type()) {
        case length_delimited(1):
          out.model_id = reader.get_string();
          break;
        case varint(2):
          out.seq_id = reader.get_int32();
          break;
        case length_delimited(3):
          out.data.push_back(datum(reader.get_message()));
          break;
        case length_delimited(4):
          out.loss_fn = reader.get_string();
          break;
        case length_delimited(5):
          number_entry(reader.get_message(), out);
          break;
        case varint(6):
          out.forward_only = reader.get_bool();
          break;
        case length_delimited(7):
          value_entry(reader.get_message(), out);
          break;
        default:
          refuse(reader, "ForwardBackwardRequest");
      }
    }
    return out;
  }

  void number_entry(pbf_reader reader, ForwardBackwardRequest& out) {
    std::string key;
    double value = 0;
    while (next(reader)) {
      switch (reader.tag_and_type()) {
        case length_delimited(1):
          key = reader.get_string();
          break;
        case fixed64(2):
          value = reader.get_double();
          break;
        default:
          refuse(reader, "LossFnConfigEntry");
      }
    }
    out.numbers[key] = value;
  }

  /// An entry of loss_fn_config_v2; numbers stand in loss_fn_config too.
  void value_entry(pbf_reader reader, ForwardBackwardRequest& out) {
    std::string key;
    pbf_reader value;
    while (next(reader)) {
      switch (reader.tag_and_type()) {
        case length_delimited(1):
          key = reader.get_string();
          break;
        case length_delimited(2):
          value = reader.get_message();
          break;
        default:
          refuse(reader, "LossFnConfigV2Entry");
      }
    }
    while (next(value)) {
      switch (value.tag_and_type()) {
        case fixed64(1):
          out.numbers[key] = value.get_double();
          break;
        case length_delimited(2):
          out.texts[key] = value.get_string();
          break;
        default:
          refuse(value, "LossConfigValue");
      }
    }
  }

  Datum datum(pbf_reader reader) {
    Datum out;
    while (next(reader)) {
      switch (reader.tag_and_type()) {
        case length_delimited(1):
          out.model_input.push_back(chunk(reader.get_message()));
          break;
        case length_delimited(2):
          tensor_entry(reader.get_message(), out);
          break;
        case length_delimited(3):
        case length_delimited(4):
          reader.skip();  // the spans tell where tokens came from, which no loss here reads
          break;
        default:
          refuse(reader, "Datum");
      }
    }
    return out;
  }

  void tensor_entry(pbf_reader reader, Datum& out) {
    std::string key;
    Tensor value;
    while (next(reader)) {
      switch (reader.tag_and_type()) {
        case length_delimited(1):
          key = reader.get_string();
          break;
        case length_delimited(2):
          value = tensor(reader.get_message());
          break;
        default:
          refuse(reader, "LossFnInputsEntry");
      }
    }
    out.loss_fn_inputs[key] = std::move(value);
  }

  Chunk chunk(pbf_reader reader) {
    Chunk out;
    while (next(reader)) {
      switch (reader.tag_and_type()) {
        case length_delimited(1):
          out = {Chunk::Kind::kText, text(reader.get_message())};
          break;
        case length_delimited(2):
          reader.skip(), out = {Chunk::Kind::kImage, {}};
          break;
        case length_delimited(3):
          reader.skip(), out = {Chunk::Kind::kDmel, {}};
          break;
        default:
          refuse(reader, "Chunk");
      }
    }
    return out;
  }

  std::vector<std::int32_t> text(pbf_reader reader) {
    std::vector<std::int32_t> tokens;
    while (next(reader)) {
      if (reader.tag_and_type() != length_delimited(1)) refuse(reader, "EncodedTextChunk");
      const auto view = reader.get_view();
      if (view.size() % sizeof(std::int32_t) != 0)
        throw_http(422, "the tokens of a text chunk have {} bytes: expected int32 numbers",
                   view.size());
      tokens.resize(view.size() / sizeof(std::int32_t));
      if (!tokens.empty()) std::memcpy(tokens.data(), view.data(), view.size());
    }
    return tokens;
  }

  Tensor tensor(pbf_reader reader) {
    Tensor out;
    while (next(reader)) {
      switch (reader.tag_and_type()) {
        case length_delimited(1):
          out.values = reader.get_string(), out.is_sparse = false;
          break;
        case length_delimited(2):
          sparse(reader.get_message(), out);
          break;
        case varint(3):
          out.dtype = static_cast<DType>(reader.get_enum());
          break;
        case length_delimited(4):
          for (const std::int64_t size : reader.get_packed_int64()) add_size(size, out);
          break;
        case varint(4):
          add_size(reader.get_int64(), out);
          break;
        default:
          refuse(reader, "Tensor");
      }
    }
    return out;
  }

  static void add_size(std::int64_t size, Tensor& out) {
    if (out.shape.size() == kMostDimensions)
      throw_http(422, "a tensor has more than {} dimensions", kMostDimensions);
    out.shape.push_back(size);
  }

  void sparse(pbf_reader reader, Tensor& out) {
    out.is_sparse = true;
    while (next(reader)) {
      switch (reader.tag_and_type()) {
        case length_delimited(1):
          out.values = reader.get_string();
          break;
        case length_delimited(2):
          out.crow_indices = reader.get_string();
          break;
        case length_delimited(3):
          out.col_indices = reader.get_string();
          break;
        default:
          refuse(reader, "SparseCsr");
      }
    }
  }

  std::string_view bytes_;
  const char* place_;
  std::int64_t fields_ = 0;
};

}  // namespace

Place decode_place(std::string_view bytes) {
  Place place;
  try {
    pbf_reader reader(bytes.data(), bytes.size());
    while (reader.next()) {
      if (reader.tag_and_type() == length_delimited(1)) {
        place.run = reader.get_string();
      } else if (reader.tag_and_type() == varint(2)) {
        place.seq = reader.get_int32();
      } else {
        reader.skip();
      }
    }
  } catch (const protozero::exception&) {
    // Fields before the broken byte are known.
  }
  return place;
}

ForwardBackwardRequest decode_forward_backward(std::string_view bytes) {
  return Decoder(bytes).request();
}

}  // namespace heddle::serve::tinker
