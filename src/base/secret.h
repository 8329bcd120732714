#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace heddle::text {

/// Stands for a key, token or password wherever a configuration or a message is written.
inline constexpr std::string_view kHidden = "(hidden)";

/// A URL in two: its name and password as they stand there ("ann:p%40w"), or "", and all the rest.
struct UrlParts {
  std::string user, rest;
};
UrlParts split_user(std::string_view url);

/// A URL without the name and password that it may hold: "https://(hidden)@host/path".
std::string without_password(std::string_view url);

/// Holds the secret of a job of several ranks, which is for this program alone.
inline constexpr std::string_view kJobSecretVariable = "HEDDLE_LAUNCH_SECRET";

/// The environment for a program that the user names: this process's without the job's secret. Ends
/// with a null pointer, as exec() takes it.
std::vector<char*> environment_of_programs();

}  // namespace heddle::text
