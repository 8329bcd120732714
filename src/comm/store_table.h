#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace heddle::comm {

/// Messages between a store and its clients, each after its length in 4 bytes (little-endian). A
/// request: one byte for the operation, then fields, each after its length. An answer: one byte
/// (0: an error, whose text follows; 1: the value follows).
enum class StoreOperation : std::uint8_t {
  kSet = 1,
  kGet,         ///< answers with "0", or "1" and the value
  kAdd,         ///< amount and answer are decimal
  kCheck,       ///< any number of keys: "1" if all are there
  kCompareSet,  ///< key, expected, wanted
  kDelete,
  kCount,
};

std::string store_request(StoreOperation operation, const std::vector<std::string_view>& fields);
/// The length that a message announces, and the length's own bytes.
std::string framed(std::string_view message);

/// A store's contents and their limits: no peer makes it grow without bound.
class StoreTable {
 public:
  static constexpr std::size_t kMostKeys = 1 << 20;
  static constexpr std::size_t kMostBytes = std::size_t{256} << 20;
  static constexpr std::size_t kLongestKey = 1024;
  static constexpr std::size_t kLargestMessage = std::size_t{16} << 20;

  /// The answer to a request, whatever its bytes are.
  std::string answer(std::string_view request);
  std::size_t bytes() const { return bytes_; }

 private:
  std::string put(const std::string& key, std::string_view value);
  std::string run(StoreOperation operation, const std::vector<std::string_view>& fields);

  std::map<std::string, std::string, std::less<>> values_;
  std::size_t bytes_ = 0;
};

}  // namespace heddle::comm
