#pragma once

/// Run-time choice among the instruction sets that cpu/vector/*.cpp are compiled for. Plain C++:
/// the vector sources include this header too.
///
/// A vector source fills the namespace HEDDLE_CPU_ARCH (baseline, avx2 or avx512) inside its
/// operator's namespace; its plain header declares the entry for all of them, and the operator
/// picks one:
///
///     namespace heddle::ops::swiglu_cpu {
///     struct Kernels { void (*forward)(...); };
///     HEDDLE_CPU_DECLARE(const Kernels& kernels())
///     }  // namespace
///     ...
///     const Kernels& kernels = HEDDLE_CPU_SELECT(kernels)();   // inside the same namespace
namespace heddle::ops {

enum class CpuCapability { kBaseline, kAvx2, kAvx512 };

/// The widest instruction set that this processor, its operating system and this build have.
/// AVX-512 means F, BW, VL and DQ.
CpuCapability heddle_cpu_capability();

}  // namespace heddle::ops

#if defined(__x86_64__) || defined(_M_X64)
#define HEDDLE_CPU_DECLARE(declaration) \
  namespace baseline {                  \
  declaration;                          \
  }                                     \
  namespace avx2 {                      \
  declaration;                          \
  }                                     \
  namespace avx512 {                    \
  declaration;                          \
  }
#define HEDDLE_CPU_SELECT(function)                                                     \
  (::heddle::ops::heddle_cpu_capability() == ::heddle::ops::CpuCapability::kAvx512      \
       ? avx512::function                                                               \
       : (::heddle::ops::heddle_cpu_capability() == ::heddle::ops::CpuCapability::kAvx2 \
              ? avx2::function                                                          \
              : baseline::function))
/// `function` of every namespace, narrowest first, for tests of all variants: run the first
/// 1 + heddle_cpu_capability() of them.
#define HEDDLE_CPU_EACH(function) \
  { baseline::function, avx2::function, avx512::function }
#else
#define HEDDLE_CPU_EACH(function) \
  { baseline::function }
#define HEDDLE_CPU_DECLARE(declaration) \
  namespace baseline {                  \
  declaration;                          \
  }
#define HEDDLE_CPU_SELECT(function) (baseline::function)
#endif
