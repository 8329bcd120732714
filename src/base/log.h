#pragma once

#include <string>
#include <string_view>

#include <fmt/format.h>

#include "base/named_enum.h"

/// Messages to the person at the terminal (stderr). Results go to stdout or to files, never through
/// here.
namespace heddle::log {

enum class Level { kDebug, kInfo, kWarning, kError };
constexpr auto names_of(Level) { return spelled("debug", "info", "warning", "error"); }

/// Messages below `level` are dropped. Default: info.
void set_level(Level level);
/// Also appends every message, with its time, to the file. Throws FileError.
void add_file(const std::string& path);
void write(Level level, std::string_view message);

/// The text kept at the bottom of the terminal while messages scroll by above it, for progress; ""
/// takes it away. Its lines must be narrower than the terminal, which is the standard error.
void set_live(std::string text);

template <class... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kDebug, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void warning(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kWarning, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void error(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::kError, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace heddle::log
