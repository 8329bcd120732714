#include "hub/find.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdlib>
#include <set>
#include <system_error>

#include "base/errors.h"
#include "base/log.h"
#include "base/quote.h"
#include "base/text.h"
#include "hub/cache.h"
#include "hub/environment.h"
#include "hub/on_disk.h"

namespace heddle::hub {
namespace {

namespace fs = std::filesystem;
using files::Path;

Path with_home(const std::string& name) {
  if (name != "~" && !name.starts_with("~/")) return name;
  const char* home = std::getenv("HOME");
  return (home == nullptr ? "" : home) + name.substr(1);
}

/// The repository that a text names; none where it is rather a path that is not there, because its
/// first part is a folder here.
std::optional<Repository> named(const std::string& name, Kind kind) {
  auto repository = parse_repository(name, kind);
  if (repository && !repository->has_scheme && is_folder(name.substr(0, name.find('/'))))
    return std::nullopt;
  return repository;
}

const char* hub_name(const Repository& repository) {
  return repository.hub == Hub::kHuggingFace ? "the Hugging Face Hub" : "ModelScope";
}

/// Advice to a user after an answer that was none.
template <class E>
[[noreturn]] void explain(const HttpError& error, const Repository& repository,
                          const std::string& name) {
  const std::string what = text::shown(name);
  const std::string here =
      repository.has_scheme ? "" : "there is no such file or folder here, and ";
  const bool is_hf = repository.hub == Hub::kHuggingFace;
  const char* const variable = is_hf ? "HF_TOKEN" : "MODELSCOPE_API_TOKEN";
  if (error.status == 401 || error.status == 403) {
    throw_error<E>(
        "{}: {}{} does not give it ({}): check the name; if it is private or its terms are to be "
        "accepted, do that on its page and set {} to a token that may read it{}",
        what, here, hub_name(repository), error.what(), variable,
        token(repository.hub).empty() ? "" : fmt::format(" (the present one may not)"));
  }
  if (error.status == 404) {
    throw_error<E>("{}: {}{} has no {} of this name and revision {} ({}): check the name", what,
                   here, hub_name(repository),
                   repository.kind == Kind::kModel ? "model" : "data set", repository.revision,
                   error.what());
  }
  if (error.status == 429) {
    throw_error<E>("{}: {} asks to wait ({}): try again later, or set {}", what,
                   hub_name(repository), error.what(), variable);
  }
  throw_error<E>(
      "{}: {}{} cannot be reached ({}). {} names a mirror; on a machine that has the network `{} "
      "download {}{} --local-dir DIR` makes a folder to give here",
      what, here, hub_name(repository), error.what(), is_hf ? "HF_ENDPOINT" : "MODELSCOPE_DOMAIN",
      is_hf ? "hf" : "modelscope", repository.name,
      repository.kind == Kind::kDataset ? (is_hf ? " --repo-type dataset" : " --dataset") : "");
}

template <class E>
[[noreturn]] void refuse_offline(const Repository& repository, const std::string& name) {
  throw_error<E>(
      "{}: {}not in the cache {} as a whole, and HF_HUB_OFFLINE forbids the download: unset it, "
      "or give a folder",
      text::shown(name), repository.has_scheme ? "" : "no such file or folder here, ",
      cache_folder(repository).string());
}

/// Useful files of a model's repository: texts and safetensors, not the same weights in other
/// formats nor pictures; not folders of other programs.
bool is_of_model(const std::string& path, Need need) {
  if (need == Need::kShape) return path == "config.json";
  const std::size_t slash = path.rfind('/');
  // Folders of sentence-transformers: 1_Pooling/config.json and so on.
  const bool is_module = path.ends_with("/config.json") && path.find('_') == 1 && slash > 1;
  if (slash != std::string::npos && !is_module && !path.starts_with("additional_chat_templates/"))
    return false;
  constexpr std::array<std::string_view, 7> kEndings = {
      ".json", ".jinja", ".txt", ".model", ".md", ".tiktoken", ".safetensors"};
  const std::string name = path.substr(slash + 1);
  if (name.ends_with(".safetensors") && need == Need::kTokenizer) return false;
  return name.starts_with("LICENSE") || name == "NOTICE" ||
         std::any_of(kEndings.begin(), kEndings.end(),
                     [&](std::string_view ending) { return name.ends_with(ending); });
}

bool has(const Path& snapshot, Need need) {
  if (snapshot.empty()) return false;
  switch (need) {
    case Need::kAll:
      return is_whole_model(snapshot);
    case Need::kTokenizer:
      return is_there(snapshot / "tokenizer.json") && is_there(snapshot / "config.json");
    case Need::kShape:
      return is_there(snapshot / "config.json");
  }
  return false;
}

/// Words of a path: "data/train-00000-of-00002.parquet" has "data", "train", ...
bool has_word(const std::string& path, const std::set<std::string>& words) {
  std::string word;
  for (const char c : path + ".") {
    if (std::isalpha(static_cast<unsigned char>(c)) != 0) {
      word += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    } else {
      if (words.contains(word)) return true;
      word.clear();
    }
  }
  return false;
}

/// The data files of one part: those that are called so; for training, without such a name, all
/// that are not called anything else.
std::vector<std::string> of_part(const std::vector<std::string>& paths, Part part) {
  static const std::set<std::string> kTraining = {"train", "training"};
  static const std::set<std::string> kValidation = {"validation", "valid", "val", "dev", "eval"};
  static const std::set<std::string> kTest = {"test"};
  const auto called = [&](const std::set<std::string>& words) {
    std::vector<std::string> found;
    std::copy_if(paths.begin(), paths.end(), std::back_inserter(found),
                 [&](const std::string& path) { return has_word(path, words); });
    return found;
  };
  if (part == Part::kEvaluation) {
    const std::vector<std::string> found = called(kValidation);
    return found.empty() ? called(kTest) : found;
  }
  if (const auto found = called(kTraining); !found.empty()) return found;
  std::vector<std::string> others;
  std::copy_if(paths.begin(), paths.end(), std::back_inserter(others), [&](const std::string& p) {
    return !has_word(p, kValidation) && !has_word(p, kTest);
  });
  return others;
}

/// Throws DataError where a data set holds several sets of rows (its "configurations") and none was
/// named: they are rarely meant together.
void require_one_set(const std::vector<std::string>& paths, const std::string& name) {
  std::set<std::string> folders;
  for (const std::string& path : paths) folders.insert(Path(path).parent_path().string());
  if (folders.size() < 2) return;
  throw_error<DataError>(
      "{}: the data set holds several sets of rows, in {}: name one, as "
      "hf://datasets/OWNER/NAME/{}",
      text::shown(name), text::list_some({folders.begin(), folders.end()}), *folders.begin());
}

std::vector<std::string> select(const std::vector<std::string>& all, const Repository& repository,
                                Part part, const std::string& name,
                                const std::function<bool(const std::string&)>& is_data) {
  std::vector<std::string> chosen;
  const std::string& asked = repository.path;
  for (const std::string& path : all) {
    const bool is_named = path == asked || text::matches_glob(asked, path);
    const bool is_below = asked.empty() || path.starts_with(asked + "/");
    if (is_named || (is_below && is_data(path))) chosen.push_back(path);
  }
  const bool is_file = std::find(chosen.begin(), chosen.end(), asked) != chosen.end();
  if (!is_file && asked.find_first_of("*?") == std::string::npos) {
    chosen = of_part(chosen, part);
    require_one_set(chosen, name);
  }
  std::sort(chosen.begin(), chosen.end());
  if (!chosen.empty()) return chosen;
  throw_error<DataError>("{}: the data set has no data file{} {}; it has {}", text::shown(name),
                         part == Part::kTrain ? " to train on" : " called validation or test",
                         asked.empty() ? "that can be read" : "at " + text::shown(asked),
                         all.empty() ? "no files" : text::list_some(all, 6));
}

/// Paths of the files in a snapshot, relative to it.
std::vector<std::string> files_below(const Path& snapshot) {
  std::vector<std::string> paths;
  std::error_code ignored;
  for (const auto& entry : fs::recursive_directory_iterator(snapshot, ignored)) {
    if (entry.is_regular_file(ignored))
      paths.push_back(entry.path().lexically_relative(snapshot).string());
  }
  return paths;
}

std::vector<std::string> absolute(const std::vector<std::string>& paths, const Path& snapshot) {
  std::vector<std::string> all;
  for (const std::string& path : paths) all.push_back((snapshot / path).string());
  return all;
}

}  // namespace

Path find_model(const std::string& name, const ProgressCallback& progress, Need need) {
  const Path path = with_home(name);
  if (is_folder(path)) {
    return is_folder(path / "snapshots") && !is_there(path / "config.json") ? snapshot_of(path)
                                                                            : path;
  }
  if (is_there(path)) return path;
  const auto repository = named(name, Kind::kModel);
  if (!repository) return path;
  const Path cached = cached_snapshot(*repository);
  if (has(cached, need)) return cached;
  if (is_offline()) refuse_offline<ModelError>(*repository, name);
  try {
    const Http http(repository->hub);
    const Listing listing = list_files(http, *repository);
    std::vector<RemoteFile> wanted;
    std::copy_if(listing.files.begin(), listing.files.end(), std::back_inserter(wanted),
                 [&](const RemoteFile& file) { return is_of_model(file.path, need); });
    return download(http, *repository, listing, wanted, progress);
  } catch (const HttpError& error) {
    explain<ModelError>(error, *repository, name);
  }
}

std::vector<std::string> find_data(const std::string& name, Part part,
                                   const std::function<bool(const std::string&)>& is_data,
                                   const ProgressCallback& progress) {
  if (is_there(name) || is_data(name)) {
    if (!name.starts_with("hf://") && !name.starts_with("ms://")) return {name};
  }
  const auto repository = named(name, Kind::kDataset);
  if (!repository) return {name};
  const Path cached = cached_snapshot(*repository);
  try {
    if (is_offline()) throw HttpError(0, "HF_HUB_OFFLINE is set");
    const Http http(repository->hub);
    const Listing listing = list_files(http, *repository);
    std::vector<std::string> all;
    for (const RemoteFile& file : listing.files) all.push_back(file.path);
    const std::vector<std::string> chosen = select(all, *repository, part, name, is_data);
    std::vector<RemoteFile> wanted;
    std::copy_if(listing.files.begin(), listing.files.end(), std::back_inserter(wanted),
                 [&](const RemoteFile& file) {
                   return std::binary_search(chosen.begin(), chosen.end(), file.path);
                 });
    return absolute(chosen, download(http, *repository, listing, wanted, progress));
  } catch (const HttpError& error) {
    if (cached.empty() || error.status != 0) {
      if (is_offline()) refuse_offline<DataError>(*repository, name);
      explain<DataError>(error, *repository, name);
    }
    log::warning("{}: as the cache has it, for the hub was not asked ({})", name, error.what());
    return absolute(select(files_below(cached), *repository, part, name, is_data), cached);
  }
}

std::string advice_on_model_name(const std::string& name) {
  if (name.find_first_of("*?[") != std::string::npos)
    return "; patterns are not expanded here: give one folder";
  if (!parse_repository(name, Kind::kModel)) return "";
  return fmt::format(
      "; if it is a name on the Hugging Face Hub, write hf://{}, because a folder here is called "
      "as its first part",
      name);
}

}  // namespace heddle::hub
