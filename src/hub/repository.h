#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace heddle::hub {

enum class Hub { kHuggingFace, kModelScope };
enum class Kind { kModel, kDataset };

/// Files under one name on a hub.
struct Repository {
  Hub hub = Hub::kHuggingFace;
  Kind kind = Kind::kModel;
  std::string name;      ///< "owner/name"
  std::string revision;  ///< a branch, a tag or a commit
  std::string path;      ///< A file or pattern inside of it; "": all that is of use.
  bool has_scheme = false;
};

/// "owner/name", "owner/name@revision", "hf://[datasets/]owner/name[@revision][/path]" and ms:// of
/// the same form. Nothing for any other text, which is a path then. Throws ConfigError for a
/// scheme without such a name.
std::optional<Repository> parse_repository(std::string_view text, Kind kind);

}  // namespace heddle::hub
