// The header of a safetensors file: whatever the bytes are, they are refused with a ModelError or
// describe tensors that lie inside the data, one after the other, each with the bytes of its type
// and shape.
#include <cstdint>
#include <cstdlib>

#include "base/errors.h"
#include "ckpt/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace heddle::ckpt;
  // The length is set here: eight bytes that have to equal the size of the rest would cost the
  // fuzzer most of its time. The first byte says how much data follows the header, or (255) that
  // the bytes are a file as they are.
  if (size == 0) return 0;
  std::string bytes;
  if (data[0] == 255) {
    bytes.assign(reinterpret_cast<const char*>(data) + 1, size - 1);
  } else {
    const std::size_t length = size - 1;
    for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(length >> (8 * i) & 0xff));
    bytes.append(reinterpret_cast<const char*>(data) + 1, length);
    bytes.append(data[0], '\0');
  }
  try {
    const auto* begin = reinterpret_cast<const std::byte*>(bytes.data());
    const SafetensorsHeader header = parse_safetensors_header({begin, bytes.size()}, "fuzz");
    std::uint64_t at = 0;
    for (const SafetensorsHeader::Entry& entry : header.entries) {
      if (entry.begin != at || entry.end < entry.begin || entry.bytes() != entry.end - entry.begin)
        std::abort();
      at = entry.end;
    }
    if (header.data_offset + at != bytes.size()) std::abort();
  } catch (const heddle::ModelError&) {
  }
  return 0;
}
