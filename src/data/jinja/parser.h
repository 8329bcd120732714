#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "data/jinja/ast.h"

namespace heddle::data::jinja {

/// Throws DataError with name, line and construct for a syntax error and for what is not supported.
std::shared_ptr<const Template> parse_template(std::string_view source, const std::string& name);

}  // namespace heddle::data::jinja
