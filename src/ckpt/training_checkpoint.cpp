#include "ckpt/training_checkpoint.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "base/errors.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/text.h"
#include "ckpt/checkpoint_format.h"
#include "ckpt/model_directory.h"

namespace heddle::ckpt {
namespace {

struct Candidate {
  std::int64_t step;
  Path path;
};

/// Directories with a checkpoint's final name, oldest first.
std::vector<Candidate> find_candidates(const Path& directory) {
  std::vector<Candidate> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const auto step = parse_step(entry.path().filename().string());
    if (step && entry.is_directory(error)) found.push_back({*step, entry.path()});
  }
  std::sort(found.begin(), found.end(),
            [](const Candidate& a, const Candidate& b) { return a.step < b.step; });
  return found;
}

void check_file(const Path& checkpoint, const ManifestFile& file, bool contents) {
  const Path path = checkpoint / file.name;
  std::error_code error;
  const auto bytes = std::filesystem::file_size(path, error);
  if (error) throw_error<ModelError>("{}: {} is missing", checkpoint.string(), file.name);
  if (bytes != file.bytes) {
    throw_error<ModelError>("{}: {} has {} bytes, expected {}", checkpoint.string(), file.name,
                            bytes, file.bytes);
  }
  if (!contents) return;
  const std::string digest = digest_of(path);
  if (digest != file.digest) {
    throw_error<ModelError>("{}: {} is damaged: its xxh3-128 is {}, expected {}",
                            checkpoint.string(), file.name, digest, file.digest);
  }
}

}  // namespace

TrainingCheckpoint TrainingCheckpoint::open(const Path& path, Verify verify) {
  const Manifest manifest = read_manifest(path);
  for (const ManifestFile& file : manifest.files)
    check_file(path, file, verify == Verify::kContents);
  TrainingCheckpoint checkpoint;
  checkpoint.info_ = {manifest.step, path, manifest.metric};
  checkpoint.state_ = read_json_object(path / kStateFile);
  for (const ManifestFile& file : manifest.files) {
    if (Path(file.name).extension() != ".safetensors") continue;
    const SafetensorsFile tensors(path / file.name);
    for (const StoredTensor& tensor : tensors.tensors()) {
      if (!checkpoint.tensors_.emplace(tensor.name, tensor).second) {
        throw_error<ModelError>("{}: tensor '{}' is in two files", path.string(), tensor.name);
      }
    }
  }
  return checkpoint;
}

std::vector<std::string> TrainingCheckpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors_) names.push_back(name);
  return names;
}

const StoredTensor* TrainingCheckpoint::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

const StoredTensor& TrainingCheckpoint::at(std::string_view name) const {
  if (const StoredTensor* tensor = find(name)) return *tensor;
  const std::string near = text::nearest(name, names());
  throw_error<ModelError>("{}: there is no tensor '{}' among its {}{}", info_.path.string(), name,
                          tensors_.size(),
                          near.empty() ? "" : fmt::format("; the nearest is '{}'", near));
}

std::vector<CheckpointInfo> list_checkpoints(const Path& directory) {
  std::vector<CheckpointInfo> found;
  for (const Candidate& candidate : find_candidates(directory)) {
    try {
      const Manifest manifest = read_manifest(candidate.path);
      found.push_back({manifest.step, candidate.path, manifest.metric});
    } catch (const Error& error) {
      log::debug("not a checkpoint: {}", error.what());
    }
  }
  return found;
}

std::optional<CheckpointInfo> latest_complete_checkpoint(
    const Path& directory, std::vector<RejectedCheckpoint>* rejected) {
  const auto candidates = find_candidates(directory);
  for (auto candidate = candidates.rbegin(); candidate != candidates.rend(); ++candidate) {
    try {
      return TrainingCheckpoint::open(candidate->path, TrainingCheckpoint::Verify::kContents)
          .info();
    } catch (const Error& error) {
      log::warning("this checkpoint is passed over: {}", error.what());
      if (rejected) rejected->push_back({candidate->path, error.what()});
    }
  }
  return std::nullopt;
}

}  // namespace heddle::ckpt
