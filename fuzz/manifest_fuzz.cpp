// Input: manifest.json of a checkpoint, a zero byte, and the name of a part of a tensor. Refused
// with a DataError or ModelError, or read again as they are from their own text.
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/errors.h"
#include "base/json.h"
#include "ckpt/checkpoint_format.h"

namespace {

using namespace heddle;

void read_manifest(std::string_view text) {
  const auto manifest = ckpt::parse_manifest(json::parse(text), "manifest.json");
  const auto again = ckpt::parse_manifest(json::parse(to_text(manifest)), "manifest.json");
  if (again.step != manifest.step || again.files.size() != manifest.files.size()) std::abort();
  if (ckpt::parse_step(ckpt::step_name(manifest.step)) != manifest.step) std::abort();
}

void read_part(const std::string& name) {
  ckpt::parse_step(name);
  for (const std::size_t dimensions : {0, 1, 2}) {
    const auto part = ckpt::parse_part_name(name, std::vector<std::int64_t>(dimensions, 1));
    if (part.shape.size() != dimensions || part.offset.size() != dimensions) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t zero = input.find('\0');
  try {
    read_manifest(input.substr(0, zero));
  } catch (const UserError&) {
  }
  try {
    if (zero != std::string_view::npos) read_part(std::string(input.substr(zero + 1)));
  } catch (const UserError&) {
  }
  return 0;
}
