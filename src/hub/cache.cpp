#include "hub/cache.h"

#include <algorithm>
#include <system_error>
#include <vector>

#include "base/errors.h"
#include "base/hugging_face_cache.h"
#include "base/json.h"
#include "base/text.h"
#include "hub/environment.h"
#include "hub/on_disk.h"

namespace heddle::hub {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kModels = "models--";

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
    text.replace(at, from.size(), to);
  return text;
}

std::vector<Path> snapshots_in(const Path& folder) {
  std::error_code ignored;
  std::vector<Path> snapshots;
  for (const auto& entry : fs::directory_iterator(folder / "snapshots", ignored))
    snapshots.push_back(entry.path());
  return snapshots;
}

}  // namespace

Path cache_folder(const Repository& repository) {
  const bool is_model = repository.kind == Kind::kModel;
  if (repository.hub == Hub::kHuggingFace) {
    return files::hugging_face_cache() /
           ((is_model ? "models--" : "datasets--") + replaced(repository.name, "/", "--"));
  }
  return modelscope_cache() / (is_model ? "models" : "datasets") /
         replaced(repository.name, ".", "___");
}

Path cached_snapshot(const Repository& repository) {
  const Path folder = cache_folder(repository);
  if (!is_folder(folder)) return {};
  if (repository.hub == Hub::kModelScope) return folder;
  if (const Path named = folder / "snapshots" / repository.revision; is_folder(named)) return named;
  const Path reference = folder / "refs" / repository.revision;
  if (is_there(reference)) {
    const std::string commit(text::trim(files::read(reference)));
    if (const Path snapshot = folder / "snapshots" / commit; is_folder(snapshot)) return snapshot;
  }
  const std::vector<Path> snapshots = snapshots_in(folder);
  const bool is_copied = snapshots.size() == 1 && !is_there(folder / "refs");
  return is_copied ? snapshots.front() : Path();
}

Path snapshot_of(const Path& folder) {
  const Path main = folder / "refs" / "main";
  if (is_there(main)) {
    const std::string revision(text::trim(files::read(main)));
    if (is_folder(folder / "snapshots" / revision)) return folder / "snapshots" / revision;
  }
  const std::vector<Path> snapshots = snapshots_in(folder);
  if (snapshots.size() == 1) return snapshots.front();
  throw_error<ModelError>("{}: a folder of the Hugging Face cache with {}", folder.string(),
                          snapshots.empty() ? "no snapshot: the download did not end"
                                            : "several snapshots: give one of snapshots/");
}

bool is_whole_model(const Path& folder) {
  if (is_there(folder / "adapter_config.json"))
    return is_there(folder / "adapter_model.safetensors");
  if (!is_there(folder / "config.json") || !is_there(folder / "tokenizer.json")) return false;
  if (is_there(folder / "model.safetensors")) return true;
  const Path index = folder / "model.safetensors.index.json";
  if (!is_there(index)) return false;
  try {
    const auto shards = json::parse<nlohmann::json>(files::read(index)).at("weight_map");
    return std::all_of(shards.begin(), shards.end(), [&](const nlohmann::json& shard) {
      return shard.is_string() && is_there(folder / shard.get<std::string>());
    });
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

std::string model_name(const Path& folder) {
  const Path absolute = fs::absolute(folder).lexically_normal();
  std::string cache = absolute.parent_path().parent_path().filename().string();
  if (absolute.parent_path().filename() != "snapshots" || !cache.starts_with(kModels))
    return absolute.string();
  cache.erase(0, kModels.size());
  const std::size_t separator = cache.find("--");
  if (separator != std::string::npos) cache.replace(separator, 2, "/");
  return cache;
}

}  // namespace heddle::hub
