// Run and number of requests that nothing else can be read of.
#include <limits>

#include "serve/tinker/inputs.h"

namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

/// Looks at the fields of the outermost object and keeps nothing else.
class PlaceReader final : public json::json_sax_t {
 public:
  Place place;

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(json::number_integer_t) override { return true; }
  bool number_unsigned(json::number_unsigned_t value) override {
    constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
    if (depth_ == 1 && key_ == "seq_id" && value <= kMost)
      place.seq = static_cast<std::int64_t>(value);
    return true;
  }
  bool number_float(json::number_float_t, const std::string&) override { return true; }
  bool string(std::string& value) override {
    if (depth_ == 1 && key_ == "model_id") place.run = value;
    return true;
  }
  bool binary(json::binary_t&) override { return true; }
  bool start_object(std::size_t) override { return ++depth_ > 0; }
  bool end_object() override { return --depth_ >= 0; }
  bool start_array(std::size_t) override { return ++depth_ > 0; }
  bool end_array() override { return --depth_ >= 0; }
  bool key(std::string& name) override {
    if (depth_ == 1) key_ = name;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const json::exception&) override {
    return false;
  }

 private:
  std::string key_;
  std::int64_t depth_ = 0;
};

}  // namespace

Place read_place(std::string_view body, bool is_proto) {
  if (is_proto) return decode_place(body);
  PlaceReader reader;
  json::sax_parse(body, &reader);
  return reader.place;
}

}  // namespace heddle::serve::tinker
