#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

/// Which kernel of the gated delta rule runs in which environment on an Ascend NPU.
namespace heddle::ops::gated_delta_rule_npu {

struct Environment {
  std::string_view soc;  ///< "Ascend910B3"
  bool is_training = true;
  c10::ScalarType dtype = c10::ScalarType::BFloat16;
  std::int64_t num_k_heads = 0, num_v_heads = 0, head_k_dim = 0, head_v_dim = 0;  ///< Of a rank.
};

struct Path {
  std::string kernel;  ///< "npu.native", "npu.chunk64"; empty: refused.
  std::string reason;
};

/// The first row of the table that fits. Packing, states, tensor and context parallelism work on
/// every row.
Path choose_path(const Environment& environment);

/// The table as docs/ascend.md shows it: condition, kernel, reason.
struct PathRow {
  std::string_view condition, kernel, reason;
};
const std::vector<PathRow>& path_rows();

}  // namespace heddle::ops::gated_delta_rule_npu
