#pragma once

#include <filesystem>
#include <fstream>
#include <string>

namespace heddle::cli {

/// The last error of a log; "" if there is none. Reads it from its beginning.
std::string last_error_line(std::ifstream& log);

/// Moves the log of an earlier start away, to a name with the time of its last line: what a failed
/// run said is often read after the next one has begun. Throws FileError.
void keep_earlier(const std::filesystem::path& log);

}  // namespace heddle::cli
