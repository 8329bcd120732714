#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace heddle::serve {

/// Undoes a Content-Encoding: "", "identity", "gzip" or "zstd". Throws HttpError 415 for another
/// one, 413 for more than `most_bytes` as sent or as soon as they come out, whatever the frame says
/// of itself, and 400 for a body that is broken. The body is then what came out until there.
void decode_body(std::string& body, std::string_view encoding, std::size_t most_bytes);

/// Values of a body in JSON. Each takes 16 bytes, and as many again while its list grows.
inline constexpr std::size_t kMostJsonValues = 4'000'000;

}  // namespace heddle::serve
