#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "base/files.h"

namespace heddle::rl {

/// A prompt that was given to the rollout. A group's id is its cursor: the place of its prompt in
/// the stream of rows, counted over epochs. Each further try has the next attempt and its own seed.
struct Dispatch {
  std::int64_t cursor = 0, attempt = 0;
  std::uint64_t seed = 0;
  std::int64_t version = 0;  ///< Of the weights that it started under.
  bool operator==(const Dispatch&) const = default;
};

/// Why a group was not trained on.
enum class Rejection { kStale, kFailed, kFiltered };
const char* name_of(Rejection reason);

/// Where the stream of rows stands, as the records say.
struct LedgerState {
  std::int64_t next_cursor = 0;              ///< The first that was never dispatched.
  std::map<std::int64_t, Dispatch> pending;  ///< Neither consumed nor rejected; by cursor.
  std::set<std::int64_t> completed;          ///< Rows of `pending` whose trajectories are there.
  std::int64_t consumed = 0;
  std::map<Rejection, std::int64_t> rejected;
  std::int64_t step = 0;     ///< Optimizer steps that consumed something.
  std::int64_t version = 0;  ///< Last published.
  std::string weights_hash;  ///< For that version.
  std::int64_t epoch = 0;    ///< The last that a prompt was dispatched of.
};

/// Fate of every row: an append-only file whose every record has a checksum. A group is
/// consumed once or rejected with a reason; whoever says otherwise gets an InternalError. Records
/// reach the disk at commit().
///
///     0f3c…  {"dispatched":{"cursor":7,"attempt":0,"seed":42,"version":3}}
class Ledger {
 public:
  /// Opens or makes the file and reads it. Without an offset a damaged tail, which a crash leaves,
  /// is cut off with a warning. With one (from a checkpoint) everything after it is forgotten.
  /// Throws DataError if the file is damaged before the offset or shorter, FileError if it cannot
  /// be written.
  explicit Ledger(files::Path path, std::optional<std::uint64_t> offset = {});
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  void dispatched(const Dispatch& dispatch);
  void completed(std::int64_t cursor);
  /// Together with the optimizer step that used them; `step` counts from 1 and rises.
  void consumed(std::int64_t step, std::span<const std::int64_t> cursors);
  /// `tokens`: generated for it so far.
  void rejected(std::int64_t cursor, Rejection reason, std::int64_t tokens);
  void published(std::int64_t version, const std::string& hash);
  void epoch(std::int64_t number);
  /// First record of a run that goes on from a checkpoint of another run: where that one stood, and
  /// the last tries of what it had dispatched and neither consumed nor rejected.
  void resumed(std::int64_t next_cursor, std::int64_t step, std::int64_t version,
               std::span<const Dispatch> tried);

  /// Writes and fsyncs what was recorded; returns the file's length, which a checkpoint keeps.
  std::uint64_t commit();
  const LedgerState& state() const { return state_; }

 private:
  void record(const std::string& kind, const nlohmann::ordered_json& value);
  std::uint64_t replay(const std::string& bytes);

  files::Path path_;
  int descriptor_ = -1;
  std::uint64_t length_ = 0;  ///< With what is not written yet.
  std::string unwritten_;
  LedgerState state_;
};

}  // namespace heddle::rl
