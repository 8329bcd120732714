#include "hub/listing.h"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "base/quote.h"
#include "base/text.h"
#include "hub/environment.h"

namespace heddle::hub {
namespace {

using nlohmann::json;

/// Pages of a list of files; a thousand entries each.
constexpr int kMostPages = 1000;
/// A list that never ends must not fill the memory.
constexpr std::size_t kMostFiles = 1'000'000;
/// Far above any file, so that sums of a few thousand do not overflow.
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 50;

json parsed(const Response& response, const std::string& url) {
  return heddle::json::parse_as<DataError, json>(response.body, url);
}

/// Throws DataError for a path that would be written outside of the repository's folder.
void require_inside(const std::string& path, const std::string& url) {
  const std::vector<std::string> parts = text::split(path, '/');
  const bool is_good = std::all_of(parts.begin(), parts.end(), [](const std::string& part) {
    return !part.empty() && part != "." && part != ".." && part.find('\0') == std::string::npos;
  });
  if (!is_good)
    throw_error<DataError>("{}: names a file '{}', which leads out of the folder", url,
                           text::shown(path));
}

bool is_hexadecimal(const std::string& text) {
  return std::all_of(text.begin(), text.end(),
                     [](unsigned char c) { return std::isxdigit(c) != 0; });
}

/// A hash of the answer, of so many digits; "" if it is none, so that nothing else becomes a file's
/// name.
std::string hash_of(const json& object, const char* key, std::size_t digits) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) return "";
  const std::string hash = found->get<std::string>();
  return hash.size() == digits && is_hexadecimal(hash) ? hash : "";
}

/// The size that the answer gives; 0 if it gives none. Throws DataError for what is no size.
std::uint64_t size_of(const json& object, const char* key, const RemoteFile& file,
                      const std::string& url) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return 0;
  if (!found->is_number_unsigned() || *found > kMostBytes)
    throw_error<DataError>("{}: gives {} as the size of {}", url, heddle::json::shown(*found),
                           text::shown(file.path));
  return found->get<std::uint64_t>();
}

void add(Listing& listing, RemoteFile file, const std::string& url) {
  if (listing.files.size() >= kMostFiles)
    throw_error<DataError>("{}: the list has more than {} files", url, kMostFiles);
  listing.files.push_back(std::move(file));
}

/// The URL of the next page: Link: <url>; rel="next".
std::string next_page(const Response& response) {
  const auto link = response.headers.find("link");
  if (link == response.headers.end()) return "";
  const std::string& value = link->second;
  const std::size_t begin = value.find('<'), end = value.find('>');
  if (value.find("rel=\"next\"") == std::string::npos || begin == std::string::npos ||
      end == std::string::npos || end < begin) {
    return "";
  }
  return value.substr(begin + 1, end - begin - 1);
}

Listing list_hugging_face(const Http& http, const Repository& repository) {
  const std::string root = endpoint(Hub::kHuggingFace);
  const bool is_model = repository.kind == Kind::kModel;
  const std::string api =
      fmt::format("{}/api/{}/{}", root, is_model ? "models" : "datasets", repository.name);
  const std::string info = fmt::format("{}/revision/{}", api, url_escape(repository.revision));
  Listing listing;
  listing.commit = hash_of(parsed(http.get(info), info), "sha", 40);
  if (listing.commit.empty()) throw_error<DataError>("{}: the answer has no commit", info);
  std::string url = fmt::format("{}/tree/{}?recursive=true", api, listing.commit);
  for (int page = 0; !url.empty() && page < kMostPages; ++page) {
    const Response response = http.get(url);
    const json entries = parsed(response, url);
    if (!entries.is_array()) throw_error<DataError>("{}: expected a list of files", url);
    for (const json& entry : entries) {
      if (entry.value("type", "") != "file") continue;
      RemoteFile file;
      file.path = entry.value("path", "");
      require_inside(file.path, url);
      file.bytes = size_of(entry, "size", file, url);
      file.git_hash = hash_of(entry, "oid", 40);
      if (const auto lfs = entry.find("lfs"); lfs != entry.end() && lfs->is_object()) {
        file.sha256 = hash_of(*lfs, "oid", 64);
        if (lfs->contains("size")) file.bytes = size_of(*lfs, "size", file, url);
      }
      if (file.etag().empty())
        throw_error<DataError>("{}: gives no hash of {}", url, text::shown(file.path));
      file.url = fmt::format("{}/{}{}/resolve/{}/{}", root, is_model ? "" : "datasets/",
                             repository.name, listing.commit, url_escape(file.path));
      add(listing, std::move(file), url);
    }
    url = next_page(response);
  }
  return listing;
}

Listing list_modelscope(const Http& http, const Repository& repository) {
  const bool is_model = repository.kind == Kind::kModel;
  const std::string api = fmt::format("{}/api/v1/{}/{}/repo", endpoint(Hub::kModelScope),
                                      is_model ? "models" : "datasets", repository.name);
  const std::string revision = url_escape(repository.revision);
  const std::string url =
      fmt::format("{}/{}?Revision={}&Recursive=true", api, is_model ? "files" : "tree", revision);
  const json answer = parsed(http.get(url), url);
  Listing listing;
  const auto data = answer.find("Data");
  if (data == answer.end() || !data->is_object() || !data->contains("Files"))
    throw_error<DataError>("{}: the answer has no list of files", url);
  for (const json& entry : data->at("Files")) {
    if (entry.value("Type", "") == "tree") continue;
    RemoteFile file;
    file.path = entry.value("Path", "");
    require_inside(file.path, url);
    file.bytes = size_of(entry, "Size", file, url);
    file.sha256 = hash_of(entry, "Sha256", 64);
    file.url = fmt::format("{}?Revision={}&FilePath={}", api, revision, url_escape(file.path));
    add(listing, std::move(file), url);
  }
  return listing;
}

}  // namespace

Listing list_files(const Http& http, const Repository& repository) {
  try {
    return repository.hub == Hub::kHuggingFace ? list_hugging_face(http, repository)
                                               : list_modelscope(http, repository);
  } catch (const json::exception& error) {
    throw_error<DataError>("{}: an answer of the hub is not as expected: {}", repository.name,
                           error.what());
  }
}

}  // namespace heddle::hub
