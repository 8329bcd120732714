#pragma once

#include "ops/cpu_dispatch.h"

/// The interface between cpu/rule.cpp, which knows tensors and threads, and cpu/vector/,
/// which knows vectors. Plain C++.
namespace heddle::ops::gdn_cpu {

/// Tokens between the kept states; a whole number of chunks.
constexpr long kSegment = 64;

/// Pointers by dtype of the storage ("x") or of the computation ("c": float, or double for double).
/// q, k, v and their gradients have a token stride in elements; everything else is contiguous.
struct RuleArgs {
  long Hk, Hv, K, V, T;
  double scale;
  bool normalize;
  const int* cu_seqlens;
  const long* first_segment;  // [S+1] of kSegment tokens
  const void *q, *k, *v;      // x
  long q_stride, k_stride, v_stride;
  const void *g, *beta;  // c [T,Hv]
  const void* initial;   // c [S,Hv,K,V] or null

  // Forward results; null where not wanted.
  void* o;      // x [T,Hv,V]
  void* final;  // c [S,Hv,K,V]
  // Written by the forward for the backward; null when nothing is kept.
  void* error;   // c [Hv,T,V]: e = u / beta
  void* states;  // c [segments,Hv,K,V]: the state at the start of each segment

  // Backward.
  const void* d_o;      // x [T,Hv,V]
  const void* d_final;  // c [S,Hv,K,V] or null
  void *dq, *dk, *dv;   // x
  long dq_stride, dk_stride, dv_stride;
  void *dg, *dbeta;  // c [T,Hv]
  void* d_initial;   // c [S,Hv,K,V] or null
  // When the value heads of a group are shared out: [parts,T,Hk,K] of c each, gradients of the
  // normalised rows; null when one unit does the whole group.
  void *dq_parts, *dk_parts;
};

/// Value heads [first_head, first_head + heads) of one key head of one sequence; `part` numbers the
/// share within the group.
struct RuleUnit {
  long sequence, key_head, first_head, heads, part;
};

/// Arrays of functions are indexed by dtype: float, bf16, double.
struct RuleKernels {
  /// Bytes that one unit works in.
  unsigned long (*forward_bytes)(const RuleArgs&, long heads);
  unsigned long (*backward_bytes)(const RuleArgs&, long heads);
  void (*forward[3])(const RuleArgs&, const RuleUnit&, void* scratch);
  void (*backward[3])(const RuleArgs&, const RuleUnit&, void* scratch);
  /// dq and dk of tokens [first, last) from `parts` shares.
  void (*reduce[3])(const RuleArgs&, long parts, long first, long last);
  /// One token of one sequence and one value head: the state [K,V] is updated, o [V] written. q and
  /// k are raw rows. The second index is 1 for states of bf16, which are rounded to nearest even.
  void (*step[3][2])(const RuleArgs&, long row, long head, void* state);
};

HEDDLE_CPU_DECLARE(const RuleKernels& rule_kernels())

}  // namespace heddle::ops::gdn_cpu
