#include "comm/store_table.h"

#include <charconv>

#include <fmt/format.h>

namespace heddle::comm {
namespace {

constexpr std::size_t kLengthBytes = 4;

void append_length(std::string& out, std::size_t length) {
  for (std::size_t i = 0; i < kLengthBytes; ++i) out += static_cast<char>(length >> (8 * i) & 0xff);
}

std::optional<std::vector<std::string_view>> fields_of(std::string_view text) {
  std::vector<std::string_view> fields;
  while (!text.empty()) {
    if (text.size() < kLengthBytes) return std::nullopt;
    std::size_t length = 0;
    for (std::size_t i = kLengthBytes; i-- > 0;)
      length = length << 8 | static_cast<unsigned char>(text[i]);
    text.remove_prefix(kLengthBytes);
    if (length > text.size()) return std::nullopt;
    fields.push_back(text.substr(0, length));
    text.remove_prefix(length);
  }
  return fields;
}

std::optional<std::int64_t> number(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string refused(std::string_view reason) { return std::string(1, '\0').append(reason); }
std::string given(std::string_view value) { return std::string(1, '\1').append(value); }

}  // namespace

std::string framed(std::string_view message) {
  std::string out;
  append_length(out, message.size());
  return out.append(message);
}

std::string store_request(StoreOperation operation, const std::vector<std::string_view>& fields) {
  std::string out(1, static_cast<char>(operation));
  for (const std::string_view field : fields) {
    append_length(out, field.size());
    out += field;
  }
  return out;
}

std::string StoreTable::answer(std::string_view request) {
  const auto fields = request.empty() ? std::nullopt : fields_of(request.substr(1));
  if (!fields) return refused("not a request");
  const auto operation = static_cast<StoreOperation>(request[0]);
  const std::size_t count = fields->size();
  using enum StoreOperation;
  const bool fits = operation == kSet || operation == kAdd      ? count == 2
                    : operation == kGet || operation == kDelete ? count == 1
                    : operation == kCompareSet                  ? count == 3
                    : operation == kCount                       ? count == 0
                                                                : operation == kCheck;
  if (!fits) return refused("not a request");
  return run(operation, *fields);
}

std::string StoreTable::put(const std::string& key, std::string_view value) {
  if (key.size() > kLongestKey) return refused("the key is too long");
  const auto found = values_.find(key);
  const std::size_t before = found == values_.end() ? 0 : key.size() + found->second.size();
  const std::size_t after = key.size() + value.size();
  if ((before == 0 && values_.size() >= kMostKeys) || bytes_ - before + after > kMostBytes)
    return refused("the store is full");
  bytes_ = bytes_ - before + after;
  values_.insert_or_assign(key, std::string(value));
  return given("");
}

std::string StoreTable::run(StoreOperation operation, const std::vector<std::string_view>& fields) {
  if (operation == StoreOperation::kCount) return given(std::to_string(values_.size()));
  if (operation == StoreOperation::kCheck) {
    for (const std::string_view key : fields) {
      if (!values_.contains(key)) return given("0");
    }
    return given("1");
  }
  const std::string key(fields.at(0));
  const auto found = values_.find(key);
  const bool is_there = found != values_.end();
  switch (operation) {
    case StoreOperation::kSet:
      return put(key, fields[1]);
    case StoreOperation::kGet:
      return given(is_there ? "1" + found->second : "0");
    case StoreOperation::kAdd: {
      const auto before = is_there ? number(found->second) : 0, amount = number(fields[1]);
      std::int64_t sum = 0;
      if (!before || !amount || __builtin_add_overflow(*before, *amount, &sum))
        return refused("not a counter");
      const std::string text = std::to_string(sum), result = put(key, text);
      return result[0] == '\1' ? given(text) : result;
    }
    case StoreOperation::kCompareSet: {
      // As c10d's stores: an absent key equals an empty expectation.
      if (is_there ? found->second != fields[1] : !fields[1].empty())
        return given(is_there ? std::string_view(found->second) : fields[1]);
      const std::string result = put(key, fields[2]);
      return result[0] == '\1' ? given(fields[2]) : result;
    }
    case StoreOperation::kDelete:
      if (is_there) {
        bytes_ -= key.size() + found->second.size();
        values_.erase(found);
      }
      return given(is_there ? "1" : "0");
    default:
      return refused("not a request");
  }
}

}  // namespace heddle::comm
