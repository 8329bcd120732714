#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ckpt/checkpoint_format.h"

namespace heddle::comm {
class Group;
}

namespace heddle::ckpt {

/// Checks a checkpoint's contents against its manifest, each member of `readers` some of the files.
/// Called by all of them. While some still read, all meet every second, so that none waits for
/// another one until the deadline of the job, whatever the size. Throws ModelError on every member
/// that names the file and what differs.
void verify_together(const Path& checkpoint, const comm::Group& readers);

/// The newest checkpoint of a folder whose contents match its manifest, the same on every member;
/// the first one looks which there are. Logs a warning for each newer one that does not match.
std::optional<Path> latest_complete_checkpoint(const Path& directory, const comm::Group& readers);

/// The files that fall to one of `readers` members: about as many bytes for each, and every file to
/// one of them.
std::vector<ManifestFile> share_of(std::vector<ManifestFile> files, std::int64_t reader,
                                   std::int64_t readers);

}  // namespace heddle::ckpt
