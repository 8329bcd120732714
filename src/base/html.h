#pragma once

#include <string>
#include <string_view>

namespace heddle {

/// The text as HTML shows it, in an element or a quoted attribute. Control characters but line ends
/// and tabs, which are not text of HTML, become "?".
std::string escape_html(std::string_view text);

}  // namespace heddle
