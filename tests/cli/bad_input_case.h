#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include "program.h"

namespace heddle::cli {

/// A mistake of a user, and what the program says of it.
struct BadInputCase {
  std::string name;
  std::function<Arguments(const Folder&)> command;
  int status;
  std::vector<std::string> parts;  ///< of the message; {dir} stands for the folder
};

inline void PrintTo(const BadInputCase& c, std::ostream* out) { *out << c.name; }

}  // namespace heddle::cli
