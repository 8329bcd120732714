#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/files.h"
#include "hub/listing.h"

namespace heddle::hub {

struct Progress {
  std::string name;  ///< "owner/name"
  std::int64_t files = 0;
  std::uint64_t done = 0, bytes = 0;  ///< of the files that the cache lacks
};
/// Called from the thread that called download().
using ProgressCallback = std::function<void(const Progress&)>;

/// Brings files of a listing into the cache, several at a time, and returns the folder that holds
/// them (a snapshot). What is there already stays; what a broken download left is continued. Each
/// file is compared with the hub's hash before it gets its name, under the lock that
/// huggingface_hub takes. Throws HttpError, FileError (the disk is full), DataError (another
/// content than the hub announces).
files::Path download(const Http& http, const Repository& repository, const Listing& listing,
                     const std::vector<RemoteFile>& wanted, const ProgressCallback& progress);

}  // namespace heddle::hub
