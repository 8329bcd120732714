#pragma once

#include "ops/cpu_dispatch.h"

/// The interface between cpu/causal_conv1d.cpp, which knows tensors and threads, and cpu/vector/.
/// Plain C++.
namespace heddle::ops::conv_cpu {

inline constexpr long kBlockTokens = 64;     ///< Tokens of one unit of work.
inline constexpr long kBlockChannels = 512;  ///< Channels of one unit of work.
inline constexpr long kMaxTaps = 8;

/// Storage ("x") or computation ("c") dtype; states and weights come with channels fastest.
struct ConvArgs {
  long C, W;
  const int* cu_seqlens;
  const void* x;  // x [T,C]
  long x_stride;
  const void* weight;   // c [W,C]
  const void* initial;  // c [S,W-1,C] or null
  void* y;              // x [T,C]
  const void* dy;       // x [T,C]
  const void* d_final;  // c [S,W-1,C] or null
  void* dx;             // x [T,C]
  void* d_initial;      // c [S,W-1,C] or null
  void* dw_blocks;      // c [blocks,W,C]: each unit writes its own
};

/// Tokens [first, last) of a sequence, channels [channel, channel + channels).
struct ConvUnit {
  long sequence, first, last, channel, channels, block;
};

struct ConvKernels {
  unsigned long scratch_bytes;
  void (*forward[3])(const ConvArgs&, const ConvUnit&, void* scratch);
  void (*backward[3])(const ConvArgs&, const ConvUnit&, void* scratch);
  /// One token: y [C] from x [C], weight c [C,W] and state x [C,W-1], which is shifted.
  void (*step[3])(const void* x, const void* weight, void* state, void* y, long C, long W);
};

HEDDLE_CPU_DECLARE(const ConvKernels& conv_kernels())

}  // namespace heddle::ops::conv_cpu
