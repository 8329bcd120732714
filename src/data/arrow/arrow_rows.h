/* The interface of libheddle_arrow.so, which alone is linked with Arrow's C++ libraries and is
   loaded when a Parquet or Arrow file is opened. Plain C: the program and the library share no type
   and no exception. */
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

/// Raised with every change of this interface.
constexpr int kHeddleArrowInterface = 1;

struct HeddleArrowRows;

/// A message of at most `size` bytes, with its end.
struct HeddleArrowError {
  char* text;
  std::size_t size;
};

/// The table of functions, which `heddle_arrow()` gives.
struct HeddleArrow {
  int interface;
  /// Opens a Parquet file, an Arrow file or an Arrow stream, told by its first bytes; null with the
  /// reason in `error` on failure.
  HeddleArrowRows* (*open)(const char* path, HeddleArrowError error);
  /// The next row as a JSON object of all columns in their order, which stays until the next call.
  /// 1: there is one; 0: the end; -1: the row cannot be written as JSON, the next one can be asked
  /// for; -2: the file cannot be read on.
  int (*next)(HeddleArrowRows* rows, const char** json, std::size_t* bytes, HeddleArrowError error);
  /// Share of the file that has been read, 0 to 1.
  double (*fraction)(const HeddleArrowRows* rows);
  void (*close)(HeddleArrowRows* rows);
};

/// The one symbol that is looked up.
__attribute__((visibility("default"))) const HeddleArrow* heddle_arrow();
}
