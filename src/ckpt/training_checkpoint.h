#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <nlohmann/json.hpp>

#include "ckpt/safetensors.h"

namespace heddle::comm {
class Store;
class World;
}  // namespace heddle::comm

namespace heddle::ckpt {

/// A rectangular part of a tensor that several ranks hold together.
struct TensorPart {
  std::string name;
  at::Tensor tensor;
  std::vector<std::int64_t> offset, shape;  // of the whole: where the part begins, its size
};

/// Everything that a run needs to continue. The part of a tensor's name before the first '/' names
/// the file it goes to: "weights/lm_head.weight", "exp_avg/lm_head.weight"; without one it goes to
/// "tensors".
struct CheckpointState {
  nlohmann::ordered_json
      state;  // step, schedule, RNG, data cursor, configuration, versions: the caller's
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  std::vector<TensorPart> parts = {};  // with several ranks: what this one holds
};

struct CheckpointInfo {
  std::int64_t step = 0;
  Path path;
  std::optional<double> metric;  // lower is better
  std::string metric_name;       // that it is of; "" in checkpoints that do not say
};

struct RejectedCheckpoint {
  Path path;
  std::string reason;
};

/// A checkpoint on disk, mapped: tensors are read when they are copied out, so that loading needs
/// no second copy.
class TrainingCheckpoint {
 public:
  enum class Verify { kSizes, kContents };

  /// Checks the manifest: every file is there with its size and, with kContents, its xxh3-128.
  /// Throws ModelError that names the file and what differs.
  static TrainingCheckpoint open(const Path& path, Verify verify = Verify::kContents);

  const CheckpointInfo& info() const { return info_; }
  const nlohmann::ordered_json& state() const { return state_; }
  /// Names as they were given to save(), sorted.
  std::vector<std::string> names() const;
  bool has(std::string_view name) const { return tensors_.contains(name); }
  /// Copies what the part's tensor has of the whole, no matter in which parts that was saved.
  /// Throws ModelError: no tensor of this name (names the nearest), a whole of another shape, or
  /// parts missing.
  void copy_part(const TensorPart& part) const;
  /// All of a tensor, on the CPU in its stored type. Throws ModelError.
  at::Tensor whole(std::string_view name) const;

 private:
  TrainingCheckpoint() = default;
  /// A tensor as it lies in the files; one that was saved whole is one part.
  struct Parts {
    std::vector<std::int64_t> shape;
    std::vector<std::pair<std::vector<std::int64_t>, StoredTensor>> parts;  // by offset
  };
  const Parts& at(std::string_view name) const;
  void copy_box(std::string_view name, const std::vector<std::int64_t>& offset,
                at::Tensor destination) const;

  CheckpointInfo info_;
  nlohmann::ordered_json state_;
  std::map<std::string, Parts, std::less<>> tensors_;
};

struct CheckpointStoreOptions {
  int keep_last = 3;             // >= 1
  int keep_best = 1;             // how many with the lowest metric are kept besides
  std::string metric_name = {};  // the metric's; numbers of others are not compared with it
  /// false: save() writes before it returns and takes no copy of CPU tensors.
  bool background = true;
  /// Ranks that save together, each its parts; null: one rank.
  std::shared_ptr<comm::World> world = nullptr;
};

/// The training checkpoints of one run: directories "step-00000100" that appear whole or not at
/// all. One process may write to a folder at a time, or the ranks of one job, which see one file
/// system; others may read. With several ranks every save() is called by all, and each writes its
/// parts to a file of its own; rank 0 collects their digests, writes the manifest and gives the
/// directory its name.
class CheckpointStore {
 public:
  /// Makes the folder and removes what dead processes left under temporary names. Throws FileError.
  CheckpointStore(Path directory, CheckpointStoreOptions options);
  CheckpointStore(Path directory, int keep_last, int keep_best)
      : CheckpointStore(std::move(directory), CheckpointStoreOptions{keep_last, keep_best}) {}
  /// Waits for the save under way; logs its error.
  ~CheckpointStore();
  CheckpointStore(const CheckpointStore&) = delete;
  CheckpointStore& operator=(const CheckpointStore&) = delete;

  /// Waits for the save before, copies the tensors to host memory, and returns while a thread
  /// writes them. Throws the error of the save before (FileError: disk full, no permission); then
  /// this one is not started. A step saved twice is replaced.
  void save(std::int64_t step, CheckpointState state, std::optional<double> metric = {});
  /// Returns when the last save is on disk, and throws its error once.
  void wait();

  /// Complete by name, oldest first; contents not verified.
  std::vector<CheckpointInfo> list() const;
  /// Removes every checkpoint with a larger step: what a run that goes on from an older one leaves
  /// behind would be taken for its latest. Throws FileError.
  void remove_newer_than(std::int64_t step);
  /// The one with the lowest metric of the store's name.
  std::optional<CheckpointInfo> best() const;

  /// All of a checkpoint as CPU tensors, sorted by name. Throws ModelError.
  CheckpointState load(const Path& checkpoint) const;

  const Path& directory() const { return directory_; }

 private:
  struct Writing;
  void write(Writing& writing) const;
  void write_alone(Writing& writing) const;
  void write_with_others(Writing& writing) const;
  /// Has a number of the store's metric.
  bool is_rated(const CheckpointInfo& info) const;
  void prune(std::int64_t newest) const;
  Path temporary_for(const Path& checkpoint) const;

  Path directory_;
  CheckpointStoreOptions options_;
  std::unique_ptr<Writing> writing_;
  mutable std::unique_ptr<comm::Store> connection_;  ///< Connection of the writing thread, kept.
  std::int64_t saves_ = 0;
};

/// Whether the folder looks like a training checkpoint; its contents are not read.
bool is_training_checkpoint(const Path& path);

/// Equals the members of this name, for a process that only reads.
std::vector<CheckpointInfo> list_checkpoints(const Path& directory);
std::optional<CheckpointInfo> latest_complete_checkpoint(
    const Path& directory, std::vector<RejectedCheckpoint>* rejected = nullptr);

/// Removes "*.tmp-<pid>" of processes that no longer run, and returns their paths. Throws
/// FileError.
std::vector<Path> remove_stale_temporaries(const Path& directory);

}  // namespace heddle::ckpt
