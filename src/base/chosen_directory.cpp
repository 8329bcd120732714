#include "base/chosen_directory.h"

#include "base/errors.h"

namespace heddle::files {

void make_chosen_directory(const Path& path, std::string_view key) {
  try {
    make_writable_directory(path);
  } catch (const FileError& error) {
    throw_error<ConfigError>("{}: {}", key, error.what());
  }
}

}  // namespace heddle::files
