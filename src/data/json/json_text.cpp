#include "data/json/json_text.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data::json_text {
namespace {

/// Marks a binary value as the digits of an integer: JSON text has no binary values of its own.
constexpr std::uint64_t kDigits = 1;
/// Below this many keys a scan finds one that stands twice as fast as a hash table.
constexpr std::size_t kIndexedFrom = 16;

/// Builds the value; the parser calls one function for each token.
class Builder : public nlohmann::json_sax<ordered_json> {
 public:
  Builder(std::string_view text, int max_depth) : text_(text), max_depth_(max_depth) {}

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t& digits) override {
    // The parser falls back to a float where 64 bits are too few.
    if (digits.find_first_of(".eE") != std::string::npos) return add(value);
    return add(ordered_json::binary({digits.begin(), digits.end()}, kDigits));
  }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return false; }

  bool start_object(std::size_t) override { return open(ordered_json::object()); }
  bool start_array(std::size_t) override { return open(ordered_json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    Open& object = open_.back();
    auto& items = object.value.get_ref<ordered_json::object_t&>();
    bool is_new = true;
    if (items.size() < kIndexedFrom) {
      for (const auto& [known, unused] : items) is_new &= known != name;
    } else {
      if (object.keys.empty()) {
        for (const auto& [known, unused] : items) object.keys.insert(known);
      }
      is_new = object.keys.insert(name).second;
    }
    if (!is_new) {
      throw_error<DataError>("an object has the key '{}' twice; leave one of them out", name);
    }
    // Past the end, as emplace() would look through all keys again.
    static_cast<ordered_json::object_t::Container&>(items).emplace_back(std::move(name), nullptr);
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    const std::size_t at = std::min(position > 0 ? position - 1 : 0, text_.size());
    fail(at, error.id);
  }

  ordered_json take() { return std::move(whole_); }

 private:
  struct Open {
    ordered_json value;
    std::unordered_set<std::string> keys;
  };

  bool add(ordered_json value) {
    if (open_.empty()) {
      whole_ = std::move(value);
    } else if (open_.back().value.is_array()) {
      open_.back().value.push_back(std::move(value));
    } else {
      open_.back().value.get_ref<ordered_json::object_t&>().back().second = std::move(value);
    }
    return true;
  }

  bool open(ordered_json value) {
    if (static_cast<int>(open_.size()) >= max_depth_) {
      throw_error<DataError>("lists and objects are nested deeper than {}", max_depth_);
    }
    open_.push_back({std::move(value), {}});
    return true;
  }

  bool close() {
    ordered_json value = std::move(open_.back().value);
    open_.pop_back();
    return add(std::move(value));
  }

  [[noreturn]] void fail(std::size_t at, int id) const {
    constexpr int kOutOfRange = 406;
    if (id == kOutOfRange) {
      throw_error<DataError>("not valid JSON: a number is too large for a float, at column {}",
                             at + 1);
    }
    // The word that was being read begins before the character that does not fit.
    std::size_t begin = at;
    while (begin > 0 && (std::isalpha(static_cast<unsigned char>(text_[begin - 1])) ||
                         text_[begin - 1] == '-')) {
      --begin;
    }
    const std::string_view rest = text_.substr(begin);
    for (const std::string_view word : {"NaN", "Infinity", "-Infinity"}) {
      if (rest.starts_with(word)) {
        throw_error<DataError>(
            "not valid JSON: {} at column {} is no JSON number; write null (Python's json.dumps "
            "writes it unless allow_nan=False)",
            word, begin + 1);
      }
    }
    if (at >= text_.size()) {
      throw_error<DataError>("not valid JSON: the text ends inside a value, at column {}",
                             text_.size());
    }
    throw_error<DataError>("not valid JSON: unexpected {} at column {}", shown(text_[at]), at + 1);
  }

  static std::string shown(char c) {
    return c > ' ' && c < '\x7f' ? fmt::format("'{}'", c)
                                 : fmt::format("byte 0x{:02X}", static_cast<unsigned char>(c));
  }

  std::string_view text_;
  int max_depth_;
  std::vector<Open> open_;
  ordered_json whole_;
};

}  // namespace

ordered_json parse(std::string_view text, int max_depth) {
  if (const std::size_t valid = utf8::valid_prefix(text); valid < text.size()) {
    throw_error<DataError>(
        "byte 0x{:02X} at column {} is not UTF-8; convert the file, for example from Latin-1: "
        "iconv -f LATIN1 -t UTF-8 FILE > NEW",
        static_cast<unsigned char>(text[valid]), valid + 1);
  }
  Builder builder(text, max_depth);
  ordered_json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

std::optional<std::string> big_integer(const ordered_json& value) {
  if (!value.is_binary()) return std::nullopt;
  const auto& digits = value.get_binary();
  return std::string(digits.begin(), digits.end());
}

namespace {

void write(const ordered_json& value, std::string& out) {
  const auto scalar = [](const auto& part) {
    return part.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  };
  if (const auto digits = big_integer(value)) {
    out += *digits;
  } else if (value.is_object()) {
    out += '{';
    bool first = true;
    for (const auto& [key, item] : value.get_ref<const ordered_json::object_t&>()) {
      if (!std::exchange(first, false)) out += ',';
      out += scalar(ordered_json(key)) + ':';
      write(item, out);
    }
    out += '}';
  } else if (value.is_array()) {
    out += '[';
    for (std::size_t i = 0; i < value.size(); ++i) {
      if (i > 0) out += ',';
      write(value[i], out);
    }
    out += ']';
  } else {
    out += scalar(value);
  }
}

}  // namespace

std::string dump(const ordered_json& value) {
  std::string out;
  write(value, out);
  return out;
}

const char* type_name(const ordered_json& value) {
  return value.is_binary() ? "number" : value.type_name();
}

std::optional<double> as_double(const ordered_json& value) {
  if (const auto digits = big_integer(value)) return std::strtod(digits->c_str(), nullptr);
  if (!value.is_number()) return std::nullopt;
  return value.get<double>();
}

}  // namespace heddle::data::json_text
