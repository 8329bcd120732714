#pragma once

#include <string_view>

namespace heddle::config {

/// Throws YAML::ParserException, with the line, for what is no YAML in UTF-8: a control character,
/// or another encoding. yaml-cpp guesses encodings and takes some of these bytes for marks of its
/// own; with some texts it never comes to an end. Call it before any YAML::Load of a file.
void require_yaml_text(std::string_view text);

}  // namespace heddle::config
