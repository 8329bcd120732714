#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hub/http.h"
#include "hub/repository.h"

namespace heddle::hub {

struct RemoteFile {
  std::string path;  ///< relative, below the repository
  std::uint64_t bytes = 0;
  std::string sha256;    ///< of the content, or ""
  std::string git_hash;  ///< SHA-1 of "blob <bytes>\0" and the content, or ""
  std::string url;

  /// Its name in blobs/ of the Hugging Face cache.
  const std::string& etag() const { return sha256.empty() ? git_hash : sha256; }
};

struct Listing {
  std::string commit;  ///< of the revision; "" on ModelScope
  std::vector<RemoteFile> files;
};

/// Files of a repository's revision on the hub. Throws HttpError, and DataError for an answer
/// that is none of the hub's or has names that lead out of a folder.
Listing list_files(const Http& http, const Repository& repository);

}  // namespace heddle::hub
