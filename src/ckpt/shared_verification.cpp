#include "ckpt/shared_verification.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <stop_token>
#include <string>
#include <thread>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/log.h"
#include "comm/group.h"

namespace heddle::ckpt {
namespace {

constexpr std::chrono::seconds kMeeting{1};

/// Describes a fault of this member's share, "" if it has none.
std::string problem_of_share(const Path& checkpoint, const comm::Group& readers,
                             const std::stop_token& stop) {
  try {
    for (const ManifestFile& file :
         share_of(read_manifest(checkpoint).files, readers.rank(), readers.size()))
      check_file(checkpoint, file, /*contents=*/true, stop);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

std::vector<ManifestFile> share_of(std::vector<ManifestFile> files, std::int64_t reader,
                                   std::int64_t readers) {
  // The largest first, each to whoever has the least so far.
  std::stable_sort(files.begin(), files.end(),
                   [](const ManifestFile& a, const ManifestFile& b) { return a.bytes > b.bytes; });
  std::vector<std::uint64_t> bytes(static_cast<std::size_t>(readers), 0);
  std::vector<ManifestFile> share;
  for (ManifestFile& file : files) {
    const auto least = std::min_element(bytes.begin(), bytes.end());
    *least += file.bytes;
    if (least - bytes.begin() == reader) share.push_back(std::move(file));
  }
  return share;
}

void verify_together(const Path& checkpoint, const comm::Group& readers) {
  std::promise<std::string> promise;
  std::future<std::string> problem = promise.get_future();
  // If a meeting fails, the thread is asked to stop, and ends within one piece of a file.
  const std::jthread reading([&](const std::stop_token& stop) {
    promise.set_value(problem_of_share(checkpoint, readers, stop));
  });
  while (readers.any(problem.wait_for(kMeeting) != std::future_status::ready)) {
  }
  for (const std::string& found : readers.all_gather_objects(problem.get())) {
    if (!found.empty()) throw ModelError(found);
  }
}

std::optional<Path> latest_complete_checkpoint(const Path& directory, const comm::Group& readers) {
  nlohmann::json newest_first = nlohmann::json::array();
  if (readers.rank() == 0) {
    for (const Path& path : find_checkpoints(directory))
      newest_first.insert(newest_first.begin(), path.string());
  }
  // The members must not differ in what they find.
  newest_first = nlohmann::json::parse(readers.all_gather_objects(newest_first.dump())[0]);
  std::string first_problem;
  for (const auto& path : newest_first) {
    try {
      const Path checkpoint = path.get<std::string>();
      verify_together(checkpoint, readers);
      return checkpoint;
    } catch (const ModelError& error) {
      log::warning("this checkpoint is passed over: {}", error.what());
      if (first_problem.empty()) first_problem = error.what();
    }
  }
  // A run that began anew would soon remove what might still be saved.
  if (!newest_first.empty()) {
    throw_error<ModelError>(
        "{}: none of the {} checkpoints can be read, so there is nothing to continue from; the "
        "newest: {}. Restore one of them, or move the folder away to begin anew",
        directory.string(), newest_first.size(), first_problem);
  }
  return std::nullopt;
}

}  // namespace heddle::ckpt
