#include "hub/download.h"

#include <openssl/evp.h>
#include <openssl/sha.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/file_lock.h"
#include "base/text.h"
#include "hub/cache.h"
#include "hub/on_disk.h"

namespace heddle::hub {
namespace {

namespace fs = std::filesystem;
using files::Path;

/// Connections at a time; one of them rarely fills a line.
constexpr std::size_t kConnections = 8;
/// Somebody else may be at the same large file.
constexpr double kLockSeconds = 24 * 3600;

std::string hexadecimal(const unsigned char* bytes, std::size_t count) {
  std::string text;
  for (std::size_t i = 0; i < count; ++i) text += fmt::format("{:02x}", bytes[i]);
  return text;
}

/// Digest of `prefix` and a file's content.
std::string digest(const EVP_MD* kind, const std::string& prefix, const Path& path) {
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(),
                                                                        &EVP_MD_CTX_free);
  std::array<unsigned char, EVP_MAX_MD_SIZE> value{};
  unsigned size = 0;
  const files::MappedFile file(path);
  if (EVP_DigestInit_ex(context.get(), kind, nullptr) != 1 ||
      EVP_DigestUpdate(context.get(), prefix.data(), prefix.size()) != 1 ||
      EVP_DigestUpdate(context.get(), file.bytes().data(), file.bytes().size()) != 1 ||
      EVP_DigestFinal_ex(context.get(), value.data(), &size) != 1) {
    throw_error<Error>("{}: OpenSSL cannot hash it", path.string());
  }
  return hexadecimal(value.data(), size);
}

/// True where the content is what the hub announces.
bool is_genuine(const Path& path, const RemoteFile& file) {
  if (fs::file_size(path) != file.bytes) return false;
  if (!file.sha256.empty()) return digest(EVP_sha256(), "", path) == file.sha256;
  if (file.git_hash.empty()) return true;
  const std::string header = fmt::format("blob {}", file.bytes) + '\0';
  return digest(EVP_sha1(), header, path) == file.git_hash;
}

/// Where a file of the repository goes: on the Hugging Face cache a blob that the snapshot links
/// to.
class Places {
 public:
  Places(const Repository& repository, const std::string& commit)
      : folder_(cache_folder(repository)),
        has_blobs_(repository.hub == Hub::kHuggingFace),
        snapshot_(has_blobs_ ? folder_ / "snapshots" / commit : folder_),
        locks_(folder_.parent_path() / ".locks" / folder_.filename()) {}

  const Path& snapshot() const { return snapshot_; }
  const Path& folder() const { return folder_; }
  Path content(const RemoteFile& file) const {
    return has_blobs_ ? folder_ / "blobs" / file.etag() : snapshot_ / file.path;
  }
  Path lock(const RemoteFile& file) const {
    std::string name = has_blobs_ ? file.etag() : file.path;
    std::replace(name.begin(), name.end(), '/', '_');
    return locks_ / (name + ".lock");
  }
  void make_folders(const RemoteFile& file) const {
    for (const Path& path : {snapshot_ / file.path, content(file), lock(file)})
      fs::create_directories(path.parent_path());
  }
  /// Puts the content under its name in the snapshot.
  void link(const RemoteFile& file) const {
    if (!has_blobs_) return;
    const Path name = snapshot_ / file.path;
    const Path target = content(file).lexically_relative(name.parent_path());
    std::error_code error;
    fs::remove(name, error);  // a link that leads nowhere
    fs::create_symlink(target, name, error);
    if (error && !is_there(name))
      throw_error<FileError>("cannot make the link {}: {}", name.string(), error.message());
  }

 private:
  Path folder_;
  bool has_blobs_;
  Path snapshot_, locks_;
};

class Downloader {
 public:
  Downloader(const Http& http, const Repository& repository, const Places& places,
             std::vector<RemoteFile> missing, const ProgressCallback& progress)
      : http_(http),
        places_(places),
        missing_(std::move(missing)),
        done_(missing_.size()),
        progress_(progress) {
    state_.name = repository.name;
    state_.files = std::ssize(missing_);
    for (const RemoteFile& file : missing_) state_.bytes += file.bytes;
  }

  void run() {
    require_space();
    std::vector<std::jthread> workers;
    for (std::size_t i = 0; i < std::min(kConnections, missing_.size()); ++i)
      workers.emplace_back([this] { work(); });
    while (running_ > 0 || next_ < missing_.size()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      tell();
      if (failed_ && running_ == 0) break;
    }
    workers.clear();
    if (error_) std::rethrow_exception(error_);
    tell();
  }

 private:
  void require_space() const {
    std::uint64_t needed = 0;
    for (const RemoteFile& file : missing_) {
      const Path part = places_.content(file).string() + ".incomplete";
      const std::uint64_t have = is_there(part) ? fs::file_size(part) : 0;
      needed += file.bytes - std::min(file.bytes, have);
    }
    const std::uint64_t available = fs::space(places_.folder()).available;
    if (needed <= available) return;
    throw_error<FileError>(
        "{}: {} are to be downloaded and {} are free: make room, or set HF_HOME to a folder on a "
        "larger disk",
        places_.folder().string(), text::format_bytes(static_cast<double>(needed)),
        text::format_bytes(static_cast<double>(available)));
  }

  void work() {
    ++running_;
    try {
      for (std::size_t i; !failed_ && (i = next_++) < missing_.size();) fetch(i);
    } catch (...) {
      const std::scoped_lock lock(mutex_);
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
    --running_;
  }

  void fetch(std::size_t index) {
    const RemoteFile& file = missing_[index];
    const Path whole = places_.content(file), part = whole.string() + ".incomplete";
    files::FileLock lock(places_.lock(file));
    if (!lock.try_lock_for(kLockSeconds))
      throw_error<FileError>("{}: another process has held it for a day", whole.string());
    for (bool is_second = false; !is_there(whole); is_second = true) {
      http_.download(file.url, part, file.bytes, [&](std::uint64_t bytes) {
        done_[index] = bytes;
        return !failed_;  // a part that is left is continued the next time
      });
      if (is_genuine(part, file)) {
        fs::rename(part, whole);
        files::sync_directory(whole.parent_path());
        break;
      }
      fs::remove(part);
      if (is_second) {
        throw_error<DataError>(
            "{}: twice came another content than the hub announces ({}); a mirror or proxy may "
            "change it: nothing of it was kept",
            file.url, file.etag().empty() ? "its size" : "hash " + file.etag());
      }
    }
    done_[index] = file.bytes;
    places_.link(file);
  }

  void tell() {
    std::uint64_t done = 0;
    for (const auto& bytes : done_) done += bytes;
    if (done == state_.done) return;
    state_.done = done;
    if (progress_) progress_(state_);
  }

  const Http& http_;
  const Places& places_;
  std::vector<RemoteFile> missing_;
  std::vector<std::atomic<std::uint64_t>> done_;
  const ProgressCallback& progress_;
  Progress state_;
  std::atomic<std::size_t> next_{0};
  std::atomic<int> running_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

Path download(const Http& http, const Repository& repository, const Listing& listing,
              const std::vector<RemoteFile>& wanted, const ProgressCallback& progress) {
  const Places places(repository, listing.commit);
  std::vector<RemoteFile> missing;
  for (const RemoteFile& file : wanted) {
    if (is_there(places.snapshot() / file.path)) continue;
    try {
      places.make_folders(file);
    } catch (const fs::filesystem_error& error) {
      throw_error<FileError>("cannot make {}: {}; HF_HOME names another folder",
                             error.path1().string(), error.code().message());
    }
    if (repository.hub == Hub::kHuggingFace && is_there(places.content(file))) {
      places.link(file);
    } else {
      missing.push_back(file);
    }
  }
  if (!missing.empty()) {
    // The largest first, so that the end is not one long file.
    std::stable_sort(missing.begin(), missing.end(),
                     [](const RemoteFile& a, const RemoteFile& b) { return a.bytes > b.bytes; });
    Downloader(http, repository, places, std::move(missing), progress).run();
  }
  if (repository.hub == Hub::kHuggingFace && repository.revision != listing.commit) {
    const Path reference = places.folder() / "refs" / repository.revision;
    fs::create_directories(reference.parent_path());
    files::write_atomically(reference, listing.commit);
  }
  return places.snapshot();
}

}  // namespace heddle::hub
