#pragma once

#include <exception>
#include <functional>
#include <string>

namespace heddle::testing {

/// Message of an error of `work`; "(no error)" without one.
inline std::string message_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "(no error)";
}

}  // namespace heddle::testing
