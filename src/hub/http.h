#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "base/errors.h"
#include "base/files.h"
#include "hub/repository.h"

namespace heddle::hub {

/// A request that got no answer, or an answer that is no success. `status` is 0 without an answer.
class HttpError : public Error {
 public:
  HttpError(long status, const std::string& what) : Error(what), status(status) {}
  long status;
};

struct Response {
  std::map<std::string, std::string> headers;  ///< names in small letters
  std::string body;
};

/// Requests to one hub. Several threads may use one.
class Http {
 public:
  explicit Http(Hub hub);

  /// The answer to a GET. Asks again, later each time, where the server is busy (429, 5xx) or the
  /// connection breaks. Throws HttpError.
  Response get(const std::string& url) const;

  /// Appends to the file what it lacks of `bytes`, asking for the rest only, and again where the
  /// connection breaks; a server that cannot give a part gives all. `on_bytes` gets how many bytes
  /// the file has, and ends the transfer by false. Throws HttpError, and FileError where the disk
  /// fails.
  void download(const std::string& url, const files::Path& file, std::uint64_t bytes,
                const std::function<bool(std::uint64_t)>& on_bytes) const;

 private:
  Hub hub_;
  std::string endpoint_, user_, token_, certificates_;
};

/// The text with every byte that a URL's path or query may not hold as %XX; '/' stays.
std::string url_escape(const std::string& text);

}  // namespace heddle::hub
