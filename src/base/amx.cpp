#include "base/amx.h"

#include <cstdlib>

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace heddle {

bool has_amx_without_tiles() {
#ifdef __x86_64__
  constexpr unsigned kAmxTile = 1U << 24;  // CPUID 7.0, edx
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kAmxTile) == 0) return false;
  // eax: the largest palette. It describes the tiles, and 0 is the one without any.
  return __get_cpuid_count(0x1d, 0, &eax, &ebx, &ecx, &edx) == 0 || eax == 0;
#else
  return false;
#endif
}

void avoid_amx_without_tiles() {
  if (has_amx_without_tiles()) setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", /*overwrite=*/0);
}

}  // namespace heddle
