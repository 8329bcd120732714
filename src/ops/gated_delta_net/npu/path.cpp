#include "ops/gated_delta_net/npu/path.h"

#include <fmt/format.h>

#include "device/npu_chip.h"

namespace heddle::ops::gated_delta_rule_npu {
namespace {

enum Row { kDouble, kTraining, kFloat, kChip, kHeads, kNative };

Row row_of(const Environment& e) {
  if (e.dtype == c10::ScalarType::Double) return kDouble;
  if (e.is_training) return kTraining;
  if (e.dtype != c10::ScalarType::BFloat16) return kFloat;
  const auto chip = device::npu_chip(e.soc);
  if (!chip || !chip->has_native_gdn) return kChip;
  const bool fits = e.head_k_dim == 128 && e.head_v_dim == 128 && e.num_k_heads <= 64 &&
                    e.num_v_heads <= 64 && e.num_k_heads > 0 && e.num_v_heads % e.num_k_heads == 0;
  return fits ? kNative : kHeads;
}

}  // namespace

const std::vector<PathRow>& path_rows() {
  static const std::vector<PathRow> kRows = {
      {"float64", "", "an NPU has no float64; set model.dtype to bfloat16 or float32"},
      {"training", "npu.chunk64",
       "npu_chunk_gated_delta_rule has no backward and keeps its state in bf16"},
      {"generation, dtype not bfloat16", "npu.chunk64",
       "npu_chunk_gated_delta_rule takes bf16 only"},
      {"generation, a chip without the operator", "npu.chunk64",
       "CANN offers npu_chunk_gated_delta_rule on A2 and A3 only"},
      {"generation, heads not of 128, or more than 64", "npu.chunk64",
       "npu_chunk_gated_delta_rule takes heads of 128, at most 64 of them"},
      {"generation in bfloat16 on A2 or A3, heads of 128", "npu.native",
       "npu_chunk_gated_delta_rule reads the prompt; tokens are generated with fp32 states"},
  };
  return kRows;
}

Path choose_path(const Environment& environment) {
  const PathRow& row = path_rows().at(row_of(environment));
  return {std::string(row.kernel), std::string(row.reason)};
}

}  // namespace heddle::ops::gated_delta_rule_npu
