#pragma once

#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "ckpt/safetensors.h"

namespace heddle::ckpt {

inline constexpr const char* kStateFile = "state.json";
inline constexpr const char* kManifestFile = "manifest.json";

struct ManifestFile {
  std::string name;
  std::uint64_t bytes = 0;
  std::string digest;  // xxh3-128, as `xxh128sum` prints it
};

/// manifest.json: what a training checkpoint consists of.
struct Manifest {
  std::int64_t step = 0;
  std::optional<double> metric;
  std::string metric_name;
  std::vector<ManifestFile> files;
};

/// "step-00000100".
std::string step_name(std::int64_t step);
/// Nothing for any other name, temporary ones among them.
std::optional<std::int64_t> parse_step(const std::string& name);

std::string to_text(const Manifest& manifest);
/// Throws ModelError that names `file`: not one of ours, of a newer format, a number or a file's
/// name that cannot be.
Manifest parse_manifest(const nlohmann::ordered_json& json, const std::string& file);
/// Throws as parse_manifest(), and ModelError that names the folder: no manifest, of another step.
Manifest read_manifest(const Path& checkpoint);

/// Names the part of a tensor that a tensor of a checkpoint's file holds.
struct PartName {
  std::string tensor;
  std::vector<std::int64_t> shape, offset;  // of the whole tensor; where the part begins
};
/// "weights/x@4096,32:1024,0": the part that begins at row 1024 of a tensor [4096, 32].
std::string to_text(const PartName& name);
/// A name without '@' is a whole tensor of the given shape.
PartName parse_part_name(const std::string& name, const std::vector<std::int64_t>& shape);

/// Directories with a checkpoint's final name, oldest first.
std::vector<Path> find_checkpoints(const Path& directory);

/// xxh3-128 of a file, without keeping its pages resident. Throws FileError, and Error when it is
/// asked to stop.
std::string digest_of(const Path& path, const std::stop_token& stop = {});

/// Throws ModelError that names the checkpoint and the file: it is missing, of another size or, if
/// its `contents` are to be read, of another digest.
void check_file(const Path& checkpoint, const ManifestFile& file, bool contents,
                const std::stop_token& stop = {});

}  // namespace heddle::ckpt
