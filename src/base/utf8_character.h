#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace heddle::text {

/// Bytes of the character that `text`, which is not empty, begins with, and its code; 0 if they are
/// not UTF-8.
std::size_t character_bytes(std::string_view text, std::uint32_t& code);

}  // namespace heddle::text
