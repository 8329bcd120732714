#include "hub/repository.h"

#include <algorithm>
#include <cctype>
#include <string>
#include <vector>

#include "base/errors.h"
#include "base/quote.h"
#include "base/text.h"

namespace heddle::hub {
namespace {

bool is_name_part(std::string_view part) {
  return !part.empty() && part.front() != '.' && part.front() != '-' &&
         part.find("..") == std::string_view::npos &&
         std::all_of(part.begin(), part.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.';
         });
}

bool take_prefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

}  // namespace

std::optional<Repository> parse_repository(std::string_view text, Kind kind) {
  Repository found;
  found.kind = kind;
  std::string_view rest = text;
  if (take_prefix(rest, "ms://")) found.hub = Hub::kModelScope;
  found.has_scheme = found.hub == Hub::kModelScope || take_prefix(rest, "hf://");
  if (found.has_scheme) {
    if (take_prefix(rest, "datasets/")) found.kind = Kind::kDataset;
    if (take_prefix(rest, "models/")) found.kind = Kind::kModel;
  }
  found.revision = found.hub == Hub::kModelScope ? "master" : "main";
  std::vector<std::string> parts = text::split(rest, '/');
  bool is_name = parts.size() == 2 || (found.has_scheme && parts.size() > 2);
  if (is_name) {
    if (const std::size_t at = parts[1].find('@'); at != std::string::npos) {
      found.revision = parts[1].substr(at + 1);
      parts[1].resize(at);
    }
    found.name = parts[0] + "/" + parts[1];
    is_name = is_name_part(parts[0]) && is_name_part(parts[1]) && is_name_part(found.revision);
    parts.erase(parts.begin(), parts.begin() + 2);
    found.path = text::join(parts, "/");
  }
  if (is_name) return found;
  if (found.has_scheme) {
    throw_error<ConfigError>(
        "'{}': expected {}owner/name, with @revision or /path behind it if need be",
        text::shown(text), found.hub == Hub::kModelScope ? "ms://" : "hf://");
  }
  return std::nullopt;
}

}  // namespace heddle::hub
