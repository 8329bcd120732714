#include "models/qwen3_vl/family.h"

namespace heddle::models::qwen3_vl {

std::vector<std::pair<std::string, Json>> presets() { return {}; }

}  // namespace heddle::models::qwen3_vl
