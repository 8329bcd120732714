#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "serve/store/data_directory.h"
#include "serve/tinker/fields.h"
#include "tenants/trainer.h"

namespace heddle::serve::tinker {

/// Begins the path of every checkpoint.
inline constexpr const char* kScheme = "tinker://";

/// Saved weights of a run.
struct Checkpoint {
  enum class Kind { kTraining, kSampler, kExternal };
  std::string path;  ///< tinker://RUN/weights/NAME
  std::string run, tenant, name;
  Kind kind = Kind::kTraining;
  double created = 0;
  std::int64_t bytes = 0;
  bool is_public = false;
  std::optional<double> expires;
  nlohmann::json metadata;       ///< Null or an object.
  tenants::SetOptions options;   ///< For the set of adapters.
  std::filesystem::path folder;  ///< Below the data directory.

  std::string id() const;  ///< weights/NAME
  nlohmann::json json() const;
};

/// Begins the names of weights that no checkpoint holds: kInMemory RUN/NUMBER.
constexpr std::string_view kInMemory = "memory://";

inline std::string unnamed_name(const std::string& run, std::int64_t number) {
  return fmt::format("{}{}/{}", kInMemory, run, number);
}

/// The session that a run belongs to.
inline std::string session_of(const std::string& run) { return run.substr(0, run.find(':')); }

inline std::string sampler_prefix(const std::string& session) { return session + ":sample:"; }

inline std::string sampler_id(const std::string& session, std::int64_t number) {
  return fmt::format("{}{}", sampler_prefix(session), number);
}

/// "weights", "sampler_weights", "external_weights"
const char* segment_of(Checkpoint::Kind kind);
nlohmann::json as_json(const tenants::SetOptions& options);
tenants::SetOptions set_options_of(const nlohmann::json& value);

/// The checkpoints of all tenants: rows of the database and folders.
class Checkpoints {
 public:
  explicit Checkpoints(DataDirectory& data) : data_(data) {}

  /// A checkpoint that is about to be saved, in a folder of its own. Throws HttpError 400 for a
  /// name that is none and 409 where one of this name stands and not `overwrite`.
  Checkpoint plan(const std::string& tenant, const std::string& run, Checkpoint::Kind kind,
                  const std::string& name, bool overwrite);
  /// Enters one whose folder has been written. Returns the folder of one of its name that stood
  /// before, "" if none did, which is to be removed once the entry is on the disk.
  [[nodiscard]] std::filesystem::path add(const Checkpoint& checkpoint);

  /// The checkpoint of a path if the tenant may read it. Throws HttpError 404, also for one of
  /// somebody else.
  Checkpoint find(const std::string& path, const std::string& tenant);
  /// The tenant's own. Throws HttpError 404.
  Checkpoint own(const std::string& run, const std::string& id, const std::string& tenant);
  /// Anybody's, for who brings a signature. Throws HttpError 404.
  Checkpoint signed_for(const std::string& path);
  std::vector<Checkpoint> of_run(const std::string& run, const std::string& tenant);
  /// Newest first.
  std::vector<Checkpoint> of_tenant(const std::string& tenant, std::int64_t limit,
                                    std::int64_t offset);
  std::int64_t count(const std::string& tenant);
  std::int64_t bytes(const std::string& tenant);
  void remove(const Checkpoint& checkpoint);
  void set_public(const Checkpoint& checkpoint, bool is_public);
  void set_expiry(const Checkpoint& checkpoint, std::optional<double> expires);
  /// Removes those that have expired.
  void sweep();
  /// Removes folders that no checkpoint has: of saves that a server before this one did not enter,
  /// and of those that they replaced. Nothing is being saved.
  void remove_strays();

 private:
  std::vector<Checkpoint> read(Statement& rows);

  DataDirectory& data_;
};

/// Time at which weights with the field ttl_seconds end; none where it is not given. Throws
/// HttpError 422.
std::optional<double> expiry_of(const Fields& fields);

/// Makes a folder of the same files, which never change: no bytes are copied. Throws
/// filesystem_error and FileError.
void link_folder(const std::filesystem::path& from, const std::filesystem::path& to);

/// Removes a folder with all that lies in it; says so where that cannot be done.
void remove_folder(const std::filesystem::path& folder);

/// Bytes of the files in a folder.
std::int64_t folder_bytes(const std::filesystem::path& folder);

}  // namespace heddle::serve::tinker
