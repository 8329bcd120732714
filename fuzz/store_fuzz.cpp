// Requests to the ranks' store, each behind its length in one byte: answered or refused, and the
// store never holds more than it may.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

#include "comm/store_table.h"

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  std::string_view input(reinterpret_cast<const char*>(data), size);
  heddle::comm::StoreTable table;
  while (!input.empty()) {
    const std::size_t length = static_cast<unsigned char>(input[0]);
    const std::string_view request = input.substr(1, length);
    input.remove_prefix(std::min(input.size(), 1 + length));
    const std::string answer = table.answer(request);
    if (answer.empty() || (answer[0] != '\0' && answer[0] != '\1')) std::abort();
    if (table.bytes() > heddle::comm::StoreTable::kMostBytes) std::abort();
  }
  return 0;
}
