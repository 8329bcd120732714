#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include <fmt/format.h>

namespace heddle {

/// Anything that stops a command. `main` prints what() as one readable line and leaves with
/// exit_status().
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  /// 2 for a mistake of the user, 1 for anything else.
  virtual int exit_status() const { return 1; }
};

/// A fault of the user's input: configuration, data, checkpoint.
class UserError : public Error {
 public:
  using Error::Error;
  int exit_status() const override { return 2; }
};

/// A mistake in a configuration or on the command line: names file, line, key and the
/// nearest valid key.
class ConfigError : public UserError {
 public:
  using UserError::UserError;
};

/// An input row, a tokenizer, a chat template: names file, line and field.
class DataError : public UserError {
 public:
  using UserError::UserError;
};

/// A checkpoint or model configuration: names the tensor or key, what was expected and what was
/// found.
class ModelError : public UserError {
 public:
  using UserError::UserError;
};

/// A collective, rendezvous or remote call: names operation, group, rank, peer and the seconds
/// waited.
class CommError : public Error {
 public:
  using Error::Error;
};

/// A device, its memory or its driver.
class DeviceError : public Error {
 public:
  using Error::Error;
};

/// The disk or the file system: names the path and the system's reason.
class FileError : public Error {
 public:
  using Error::Error;
};

/// A promise inside Heddle was broken; a defect to report, not a mistake of the user.
class InternalError : public Error {
 public:
  using Error::Error;
};

/// throw_error<DataError>("{}:{}: field '{}' is missing", file, line, field)
template <class E, class... Args>
[[noreturn]] void throw_error(fmt::format_string<Args...> format, Args&&... args) {
  throw E(fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace heddle
