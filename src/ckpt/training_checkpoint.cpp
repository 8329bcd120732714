#include "ckpt/training_checkpoint.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "base/layout.h"
#include "base/log.h"
#include "base/text.h"
#include "ckpt/checkpoint_format.h"
#include "ckpt/model_directory.h"
#include "ckpt/tensor_io.h"

namespace heddle::ckpt {
TrainingCheckpoint TrainingCheckpoint::open(const Path& path, Verify verify) {
  const Manifest manifest = read_manifest(path);
  for (const ManifestFile& file : manifest.files)
    check_file(path, file, verify == Verify::kContents);
  TrainingCheckpoint checkpoint;
  checkpoint.info_ = {manifest.step, path, manifest.metric, manifest.metric_name};
  checkpoint.state_ = read_json_object(path / kStateFile);
  for (const ManifestFile& file : manifest.files) {
    if (Path(file.name).extension() != ".safetensors") continue;
    const SafetensorsFile tensors(path / file.name, path);
    for (const StoredTensor& tensor : tensors.tensors()) {
      const PartName name = parse_part_name(tensor.name, tensor.shape);
      Parts& parts = checkpoint.tensors_[name.tensor];
      if (parts.parts.empty()) parts.shape = name.shape;
      const bool is_new = std::none_of(parts.parts.begin(), parts.parts.end(),
                                       [&](const auto& p) { return p.first == name.offset; });
      if (!is_new || parts.shape != name.shape) {
        throw_error<ModelError>("{}: tensor '{}' is in two files", path.string(), tensor.name);
      }
      parts.parts.emplace_back(name.offset, tensor);
    }
  }
  return checkpoint;
}

std::vector<std::string> TrainingCheckpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors_) names.push_back(name);
  return names;
}

const TrainingCheckpoint::Parts& TrainingCheckpoint::at(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found != tensors_.end()) return found->second;
  const std::string near = text::nearest(name, names());
  throw_error<ModelError>("{}: there is no tensor '{}' among its {}{}", info_.path.string(), name,
                          tensors_.size(),
                          near.empty() ? "" : fmt::format("; the nearest is '{}'", near));
}

void TrainingCheckpoint::copy_part(const TensorPart& part) const {
  const Parts& tensor = at(part.name);
  // A smaller whole would be cut out of this one.
  if (tensor.shape != part.shape) {
    throw_error<ModelError>("{}: tensor '{}' is [{}], and the run's is [{}]", info_.path.string(),
                            part.name, fmt::join(tensor.shape, ", "), fmt::join(part.shape, ", "));
  }
  copy_box(part.name, part.offset, part.tensor);
}

void TrainingCheckpoint::copy_box(std::string_view name, const std::vector<std::int64_t>& offset,
                                  at::Tensor destination) const {
  const Parts& tensor = at(name);
  const Region wanted{offset, destination.sizes().vec()};
  if (!wanted.is_within(tensor.shape)) {
    throw_error<ModelError>("{}: tensor '{}' is [{}], the run wants [{}] from [{}] on",
                            info_.path.string(), name, fmt::join(tensor.shape, ", "),
                            fmt::join(wanted.size, ", "), fmt::join(offset, ", "));
  }
  std::int64_t copied = 0;
  for (const auto& [begins, stored] : tensor.parts) {
    const auto common = intersect({begins, stored.shape}, wanted);
    if (!common) continue;
    at::Tensor target = destination;
    std::vector<Range> ranges;
    for (std::size_t d = 0; d < begins.size(); ++d) {
      const auto dim = static_cast<std::int64_t>(d);
      target = target.narrow(dim, common->offset[d] - offset[d], common->size[d]);
      ranges.push_back({dim, common->offset[d] - begins[d], common->size[d]});
    }
    copy_into(stored, target, ranges);
    copied += target.numel();
  }
  if (copied != destination.numel()) {
    throw_error<ModelError>("{}: of tensor '{}', {} of {} elements are there", info_.path.string(),
                            name, copied, destination.numel());
  }
}

at::Tensor TrainingCheckpoint::whole(std::string_view name) const {
  const Parts& tensor = at(name);
  const auto type = to_scalar_type(tensor.parts.front().second.dtype);
  at::Tensor result = at::empty(tensor.shape, type.value());
  copy_box(name, std::vector<std::int64_t>(tensor.shape.size(), 0), result);
  return result;
}

bool is_training_checkpoint(const Path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path / kManifestFile, ignored) &&
         std::filesystem::exists(path / kStateFile, ignored);
}

std::vector<CheckpointInfo> list_checkpoints(const Path& directory) {
  std::vector<CheckpointInfo> found;
  for (const Path& candidate : find_checkpoints(directory)) {
    try {
      const Manifest manifest = read_manifest(candidate);
      found.push_back({manifest.step, candidate, manifest.metric, manifest.metric_name});
    } catch (const Error& error) {
      log::debug("not a checkpoint: {}", error.what());
    }
  }
  return found;
}

std::optional<CheckpointInfo> latest_complete_checkpoint(
    const Path& directory, std::vector<RejectedCheckpoint>* rejected) {
  const auto candidates = find_checkpoints(directory);
  for (auto candidate = candidates.rbegin(); candidate != candidates.rend(); ++candidate) {
    try {
      return TrainingCheckpoint::open(*candidate, TrainingCheckpoint::Verify::kContents).info();
    } catch (const Error& error) {
      log::warning("this checkpoint is passed over: {}", error.what());
      if (rejected) rejected->push_back({*candidate, error.what()});
    }
  }
  return std::nullopt;
}

}  // namespace heddle::ckpt
