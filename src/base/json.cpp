#include "base/json.h"

#include <algorithm>
#include <cctype>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/quote.h"

namespace heddle::json {
namespace {

/// Below this many keys a scan finds one that stands twice as fast as a hash table.
constexpr std::size_t kIndexedFrom = 16;

/// Builds the value; the parser calls one function for each token and keeps no stack of its own.
template <class Json>
class Builder : public nlohmann::json_sax<Json> {
 public:
  using typename nlohmann::json_sax<Json>::number_integer_t;
  using typename nlohmann::json_sax<Json>::number_unsigned_t;
  using typename nlohmann::json_sax<Json>::number_float_t;
  using typename nlohmann::json_sax<Json>::string_t;
  using typename nlohmann::json_sax<Json>::binary_t;

  Builder(std::string_view text, const Limits& limits) : text_(text), limits_(limits) {}

  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t& digits) override {
    if (digits.size() > limits_.digits) {
      throw_error<DataError>("a number has {} digits; at most {} are read", digits.size(),
                             limits_.digits);
    }
    // The parser falls back to a float where 64 bits are too few.
    const bool is_integer = digits.find_first_of(".eE") == std::string::npos;
    if (!is_integer || !limits_.keeps_big_integers) return add(value);
    return add(Json::binary({digits.begin(), digits.end()}, kDigits));
  }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return false; }

  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    if (name.size() > limits_.key_bytes) {
      throw_error<DataError>("a key has {} bytes; at most {} are read", name.size(),
                             limits_.key_bytes);
    }
    if (!insert(name)) {
      throw_error<DataError>("the key '{}' occurs twice in an object: leave one of them out",
                             text::shown(name));
    }
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    return fail(std::min(position > 0 ? position - 1 : 0, text_.size()), error.id);
  }

  Json take() { return std::move(whole_); }

 private:
  using Object = typename Json::object_t;
  struct Open {
    Json value;
    std::unordered_set<std::string> keys = {};  // of an object with many
    Json* next = nullptr;                       // where the value of the last key goes
  };

  /// False if the object has the key already.
  bool insert(string_t& name) {
    Open& object = open_.back();
    auto& items = object.value.template get_ref<Object&>();
    if constexpr (std::is_same_v<Json, nlohmann::json>) {
      const auto [place, is_new] = items.emplace(std::move(name), nullptr);
      object.next = &place->second;
      return is_new;
    } else {
      if (items.size() < kIndexedFrom) {
        for (const auto& [known, unused] : items) {
          if (known == name) return false;
        }
      } else {
        if (object.keys.empty()) {
          for (const auto& [known, unused] : items) object.keys.insert(known);
        }
        if (!object.keys.insert(name).second) return false;
      }
      // At the end, because emplace() would look through all keys again.
      static_cast<typename Object::Container&>(items).emplace_back(std::move(name), nullptr);
      object.next = &items.back().second;
      return true;
    }
  }

  bool add(Json value) {
    if (++values_ > limits_.values)
      throw_error<DataError>("there are more than {} values in it", limits_.values);
    return place(std::move(value));
  }

  bool place(Json value) {
    if (open_.empty()) {
      whole_ = std::move(value);
    } else if (open_.back().value.is_array()) {
      open_.back().value.push_back(std::move(value));
    } else {
      *open_.back().next = std::move(value);
    }
    return true;
  }

  bool open(Json value) {
    if (open_.size() >= limits_.depth)
      throw_error<DataError>("lists and objects are nested deeper than {}", limits_.depth);
    open_.push_back({std::move(value)});
    return true;
  }

  bool close() {
    Json value = std::move(open_.back().value);
    open_.pop_back();
    return add(std::move(value));
  }

  [[noreturn]] bool fail(std::size_t at, int id) const {
    constexpr int kOutOfRange = 406;
    if (id == kOutOfRange)
      throw_error<DataError>("not valid JSON: a number is too large for a float, at {}", where(at));
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
            "not valid JSON: {} at {} is no JSON number; write null (Python's json.dumps writes it "
            "unless allow_nan=False)",
            word, where(begin));
      }
    }
    if (const std::size_t half = half_pair_before(at); half != std::string_view::npos) {
      throw_error<DataError>(
          "not valid JSON: {} at {} is half of a surrogate pair, no character (Python's json.dumps "
          "writes it for text that is not UTF-8)",
          text_.substr(half, 6), where(half));
    }
    if (at >= text_.size())
      throw_error<DataError>("not valid JSON: the text ends inside a value, at {}", where(at));
    if (static_cast<unsigned char>(text_[at]) >= 0x80) {
      throw_error<DataError>("not valid JSON: byte 0x{:02X} at {} is out of place or not UTF-8",
                             static_cast<unsigned char>(text_[at]), where(at));
    }
    throw_error<DataError>("not valid JSON: unexpected '{}' at {}",
                           text::shown(text_.substr(at, 1)), where(at));
  }

  /// Whether an escape begins there: its backslash is not itself escaped.
  bool is_escape(std::size_t begin) const {
    if (text_.substr(begin, 2) != "\\u") return false;
    const std::size_t before = text_.substr(0, begin).find_last_not_of('\\');
    return (begin - (before + 1)) % 2 == 0;  // npos + 1 == 0
  }

  /// Where the escape of half a surrogate pair begins, if it is why the parser stopped: at the last
  /// digit of a second half without a first one, or where a first half has no second.
  std::size_t half_pair_before(std::size_t at) const {
    constexpr std::size_t kSecond = 5, kNext = 6, kOther = 7, kLastOfNext = 11;
    for (const std::size_t offset : {kSecond, kNext, kOther, kLastOfNext}) {
      if (at < offset || !is_escape(at - offset)) continue;
      const std::size_t begin = at - offset;
      const std::string_view digits = text_.substr(begin + 2, 2);
      const bool is_d = digits.starts_with('d') || digits.starts_with('D');
      if (!is_d || digits.size() < 2) continue;
      const bool is_first = std::string_view("89abAB").find(digits[1]) != std::string_view::npos;
      const bool is_second = std::string_view("cdefCDEF").find(digits[1]) != std::string_view::npos;
      const bool has_next = text_.substr(begin + kNext, 1) == "\\";
      if (offset == kSecond ? is_second : is_first && (offset == kNext) != has_next) return begin;
    }
    return std::string_view::npos;
  }

  std::string where(std::size_t at) const {
    const std::string_view before = text_.substr(0, at);
    const auto line = std::count(before.begin(), before.end(), '\n') + 1;
    const std::size_t column = at - (before.rfind('\n') + 1) + 1;  // npos + 1 == 0
    const bool has_lines = text_.find('\n') < text_.size();
    return has_lines ? fmt::format("line {}, column {}", line, column)
                     : fmt::format("column {}", column);
  }

  std::string_view text_;
  Limits limits_;
  std::vector<Open> open_;
  std::size_t values_ = 0;
  Json whole_;
};

}  // namespace

template <class Json>
Json parse(std::string_view text, const Limits& limits) {
  Builder<Json> builder(text, limits);
  Json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

template nlohmann::json parse(std::string_view, const Limits&);
template nlohmann::ordered_json parse(std::string_view, const Limits&);

std::string shown(const nlohmann::ordered_json& value) {
  return text::shown(value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
}

}  // namespace heddle::json
