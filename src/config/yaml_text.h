#pragma once

#include <string>
#include <string_view>

namespace heddle::config {

/// Throws YAML::ParserException, with the line, for what is no YAML in UTF-8: a control character,
/// or another encoding, which yaml-cpp would guess. Call it before any YAML::Load of a file.
void require_yaml_text(std::string_view text);

/// Whether a second document follows. YAML::LoadAll never ends where a document begins with a
/// comma, as it takes that for ever new documents. Throws YAML::Exception.
bool has_second_document(const std::string& text);

}  // namespace heddle::config
