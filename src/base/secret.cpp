#include "base/secret.h"

#include <unistd.h>

namespace heddle::text {

UrlParts split_user(std::string_view url) {
  const std::size_t scheme = url.find("://");
  if (scheme == std::string_view::npos) return {"", std::string(url)};
  const std::size_t begin = scheme + 3;
  // A password may hold an @ that is not escaped: the last one before the path counts.
  const std::size_t at = url.substr(0, url.find_first_of("/?#", begin)).rfind('@');
  if (at == std::string_view::npos || at < begin) return {"", std::string(url)};
  return {std::string(url.substr(begin, at - begin)),
          std::string(url.substr(0, begin)).append(url.substr(at + 1))};
}

std::string without_password(std::string_view url) {
  const auto [user, rest] = split_user(url);
  if (user.empty()) return rest;
  return std::string(rest).insert(rest.find("://") + 3, std::string(kHidden) + "@");
}

std::vector<char*> environment_of_programs() {
  std::vector<char*> variables;
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string_view variable = *at;
    const std::size_t equals = variable.find('=');
    if (variable.substr(0, equals) != kJobSecretVariable) variables.push_back(*at);
  }
  variables.push_back(nullptr);
  return variables;
}

}  // namespace heddle::text
