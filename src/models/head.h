#pragma once

#include "base/named_enum.h"

namespace heddle::models {

/// Output layer on the trunk.
enum class Head { kLanguageModel, kClassify, kEmbed };
constexpr auto names_of(Head) { return spelled("lm", "classify", "embed"); }

}  // namespace heddle::models
