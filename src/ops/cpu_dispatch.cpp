#include "ops/cpu_dispatch.h"

namespace heddle::ops {

CpuCapability heddle_cpu_capability() {
#if defined(__x86_64__) || defined(_M_X64)
  static const CpuCapability capability = [] {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (!avx2) return CpuCapability::kBaseline;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return avx512 ? CpuCapability::kAvx512 : CpuCapability::kAvx2;
  }();
  return capability;
#else
  return CpuCapability::kBaseline;
#endif
}

}  // namespace heddle::ops
