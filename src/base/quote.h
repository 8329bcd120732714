#pragma once

#include <string>
#include <string_view>

namespace heddle::text {

/// Text of strangers (a name, a pattern, a value) as part of a message: control bytes, direction
/// marks and what is not UTF-8 are written as \n or \x1b, and after `limit` bytes comes "...".
std::string shown(std::string_view text, std::size_t limit = 200);

}  // namespace heddle::text
