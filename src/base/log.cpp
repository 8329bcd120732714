#include "base/log.h"

#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include "base/errors.h"

namespace heddle::log {
namespace {

// The terminal is one per process, so is the logger that writes to it; ranks that run as threads share it.
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

}  // namespace

void set_level(Level level) { logger().set_level(to_spdlog(level)); }

void add_file(const std::string& path) {
  try {
    auto file = std::make_shared<spdlog::sinks::basic_file_sink_mt>(path);
    file->set_pattern("%Y-%m-%dT%H:%M:%S.%e %l %v");
    logger().sinks().push_back(file);
  } catch (const spdlog::spdlog_ex& e) {
    throw_error<FileError>("cannot open the log file {}: {}", path, e.what());
  }
}

void write(Level level, std::string_view message) {
  const char* prefix = level == Level::kWarning ? "warning: " : level == Level::kError ? "error: " : "";
  logger().log(to_spdlog(level), "{}{}", prefix, message);
}

}  // namespace heddle::log
