#include "ckpt/hub_cache.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <system_error>
#include <vector>

#include "base/errors.h"
#include "base/text.h"

namespace heddle::ckpt {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kCacheFolder = "models--";

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Where huggingface_hub keeps what it downloads.
Path cache_folder() {
  if (const std::string cache = variable("HF_HUB_CACHE"); !cache.empty()) return cache;
  if (const std::string home = variable("HF_HOME"); !home.empty()) return Path(home) / "hub";
  const std::string cache = variable("XDG_CACHE_HOME");
  const Path base = cache.empty() ? Path(variable("HOME")) / ".cache" : Path(cache);
  return base / "huggingface" / "hub";
}

/// "org/model": two parts of letters, digits, '-', '_' and '.', as the Hub allows.
bool is_hub_name(std::string_view name) {
  const auto is_part = [](std::string_view part) {
    return !part.empty() && part.front() != '.' &&
           std::all_of(part.begin(), part.end(), [](unsigned char c) {
             return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.';
           });
  };
  const std::size_t slash = name.find('/');
  return slash != std::string_view::npos && is_part(name.substr(0, slash)) &&
         is_part(name.substr(slash + 1));
}

Path cached(std::string_view hub_name) {
  std::string folder = std::string(kCacheFolder) + std::string(hub_name);
  folder.replace(folder.find('/'), 1, "--");
  return cache_folder() / folder;
}

bool is_folder(const Path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

/// The snapshot of a cache folder that its branch "main" names, or the only one.
Path snapshot_of(const Path& folder) {
  std::error_code ignored;
  const Path main = folder / "refs" / "main";
  if (fs::exists(main, ignored)) {
    const std::string revision(text::trim(files::read(main)));
    if (is_folder(folder / "snapshots" / revision)) return folder / "snapshots" / revision;
  }
  std::vector<Path> snapshots;
  for (const auto& entry : fs::directory_iterator(folder / "snapshots", ignored))
    snapshots.push_back(entry.path());
  if (snapshots.size() == 1) return snapshots.front();
  throw_error<ModelError>("{}: a folder of the Hugging Face cache with {}", folder.string(),
                          snapshots.empty() ? "no snapshot: the download did not end"
                                            : "several snapshots: give one of snapshots/");
}

}  // namespace

Path find_model(const std::string& name) {
  Path path = name;
  if (name == "~" || name.starts_with("~/")) path = variable("HOME") + name.substr(1);
  if (is_folder(path)) {
    return is_folder(path / "snapshots") && !fs::exists(path / "config.json") ? snapshot_of(path)
                                                                              : path;
  }
  std::error_code ignored;
  if (fs::exists(path, ignored) || !is_hub_name(name)) return path;
  const Path folder = cached(name);
  return is_folder(folder) ? snapshot_of(folder) : path;
}

std::string advice_on_model_name(const std::string& name) {
  if (name.find_first_of("*?[") != std::string::npos)
    return "; patterns are not expanded here: give one folder";
  if (!is_hub_name(name)) return "";
  const std::string folder = name.substr(name.find('/') + 1);
  return fmt::format(
      "; if it is a name on the Hugging Face Hub, it is not in the cache {}: download it with "
      "`hf download {} --local-dir {}` and give {}",
      cache_folder().string(), name, folder, folder);
}

std::string model_name(const Path& folder) {
  const Path absolute = fs::absolute(folder).lexically_normal();
  std::string cache = absolute.parent_path().parent_path().filename().string();
  if (absolute.parent_path().filename() != "snapshots" || !cache.starts_with(kCacheFolder))
    return absolute.string();
  cache.erase(0, kCacheFolder.size());
  const std::size_t separator = cache.find("--");
  if (separator != std::string::npos) cache.replace(separator, 2, "/");
  return cache;
}

}  // namespace heddle::ckpt
