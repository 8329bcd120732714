#include "base/log.h"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <unistd.h>

#include <cstdio>
#include <mutex>
#include <utility>

#include "base/errors.h"
#include "base/files.h"
#include "base/quote.h"
#include "base/terminal_text.h"

namespace heddle::log {
namespace {

// The terminal is one per process, so is the logger that writes to it; ranks that run as threads
// share it.
spdlog::logger& logger() {
  static const auto instance = [] {
    auto terminal = std::make_shared<spdlog::sinks::stderr_color_sink_mt>();
    terminal->set_pattern("%^%v%$");
    auto made = std::make_shared<spdlog::logger>("heddle", terminal);
    made->flush_on(spdlog::level::info);
    return made;
  }();
  return *instance;
}

// Text at the bottom of the terminal, under one lock with the lines that are written above it.
struct Live {
  std::mutex mutex;
  std::string text;

  void erase() const {
    if (text.empty()) return;
    std::string codes = "\r\x1b[K";
    for (const char c : text) {
      if (c == '\n') codes += "\x1b[1A\x1b[2K";
    }
    std::fwrite(codes.data(), 1, codes.size(), stderr);
  }
  void draw() const {
    std::fwrite(text.data(), 1, text.size(), stderr);
    std::fflush(stderr);
  }
};

Live& live() {
  static Live instance;
  return instance;
}

spdlog::level::level_enum to_spdlog(Level level) {
  switch (level) {
    case Level::kDebug:
      return spdlog::level::debug;
    case Level::kInfo:
      return spdlog::level::info;
    case Level::kWarning:
      return spdlog::level::warn;
    case Level::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

constexpr std::size_t kLongestLine = 4000;

/// A table: its lines and colours stay; no line in it may look like a message of another level.
std::string shown_lines(std::string_view text) {
  std::string out;
  while (true) {
    const std::size_t end = text.find('\n');
    out += text::shown_line(text.substr(0, end), kLongestLine);
    if (end == std::string_view::npos) return out;
    text.remove_prefix(end + 1);
    out += text.starts_with("error:") || text.starts_with("warning:") ? "\\n" : "\n";
  }
}

}  // namespace

void set_level(Level level) { logger().set_level(to_spdlog(level)); }

void add_file(const std::string& path) {
  for (const auto& sink : logger().sinks()) {
    const auto* file = dynamic_cast<const spdlog::sinks::basic_file_sink_mt*>(sink.get());
    if (file != nullptr && file->filename() == path) return;
  }
  try {
    close(files::open_to_append(path));  // refuses a link that somebody put there
    auto file = std::make_shared<spdlog::sinks::basic_file_sink_mt>(path);
    // The text begins with its level where that matters, as on the terminal.
    file->set_pattern("%Y-%m-%dT%H:%M:%S.%e %v");
    logger().sinks().push_back(file);
  } catch (const spdlog::spdlog_ex& e) {
    throw_error<FileError>("cannot open the log file {}: {}", path, e.what());
  }
}

void write(Level level, std::string_view message) {
  // Names in a message that come from files must not draw on the terminal or look like a message of
  // their own. An error or a warning is one line.
  const std::string line =
      level == Level::kInfo ? shown_lines(message) : text::shown(message, kLongestLine);
  const char* prefix = level == Level::kWarning ? "warning: "
                       : level == Level::kError ? "error: "
                                                : "";
  const std::scoped_lock lock(live().mutex);
  const bool is_shown = logger().should_log(to_spdlog(level));
  if (is_shown) live().erase();
  logger().log(to_spdlog(level), "{}{}", prefix, line);
  if (is_shown) live().draw();
}

void set_live(std::string text) {
  const std::scoped_lock lock(live().mutex);
  if (text == live().text) return;
  live().erase();
  live().text = std::move(text);
  live().draw();
}

}  // namespace heddle::log
