#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace heddle::text {

/// The candidate with the smallest edit distance to `word`, or "" if none is close enough to be
/// meant.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

/// "1.5 GiB", "12.0 MiB", "512 B".
std::string format_bytes(double bytes);

/// "1.24 B", "35.1 M", "812".
std::string format_count(double count);

/// "2 h 05 min", "3 min 20 s", "12.3 s".
std::string format_duration(double seconds);

std::vector<std::string> split(std::string_view text, char separator);
std::string_view trim(std::string_view text);
std::string join(const std::vector<std::string>& parts, std::string_view separator);

/// The first `limit` names joined by ", ", then "and N more".
std::string list_some(const std::vector<std::string>& names, std::size_t limit = 8);

/// True if `name` matches a shell-like pattern in which * stands for any characters and ? for one.
bool matches_glob(std::string_view pattern, std::string_view name);

}  // namespace heddle::text
