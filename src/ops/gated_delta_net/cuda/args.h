// Arguments of every kernel of this folder, and the layout of the saved buffer and the workspace.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "gated_delta_net.h"

namespace heddle::ops::cuda::gdn {

constexpr int kChunk = 64;
constexpr float kLog2e = 1.4426950408889634f;

struct ChunkInfo {
  int token;     // first token of the chunk
  int length;    // 1 to 64
  int sequence;  // of the batch
  int index;     // within the sequence
};

/// A run of chunks of one sequence, which one CTA walks per value head. A sequence is one segment
/// unless it is split (segment_chunks); a joint is the state between two segments of a sequence.
struct Segment {
  int sequence;       // of the batch, -1: unused entry of the table
  int token, length;  // first token, tokens
  int first_chunk;    // global number
  int entry, exit;    // joints at its ends, -1 where the sequence begins or ends
};

/// Tensors that are moved as 64 x 64 boxes: [tokens, heads * head_dim], see make_maps.
enum Map { kMapQ, kMapK, kMapV, kMapU, kMapO, kMapGradO, kMapGradV, kMapCount };

/// Device pointers. "chunk" arrays are indexed by the global chunk number, sequences in order.
struct Args {
  CUtensorMap maps[kMapCount];  // filled only for the wgmma kernels
  int tokens, sequences, k_heads, v_heads, max_chunks;
  int segment_chunks;            // a longer sequence is split
  int max_segments, max_joints;  // upper bounds; without joints no sequence is split
  float scale;
  bool normalize;
  const __nv_bfloat16 *q, *k, *v;
  int64_t q_stride, k_stride, v_stride;
  const float *g, *beta, *initial_state;
  const int* cu_seqlens;

  // Saved by the forward.
  int* first_chunk;    // [sequences + 1]; the last entry is the number of chunks
  int* first_segment;  // [sequences + 1], likewise
  Segment* segments;   // [max_segments], longest first
  ChunkInfo* chunks;   // [max_chunks]
  float* decay;        // [chunk, v_head, 64] in-chunk cumulative g in base 2, constant past the end
  float* strength;     // [chunk, v_head, 64] beta, 0 past the end
  float *q_rms, *k_rms;  // [chunk, k_head, 64] 1 / norm, 0 past the end
  __nv_bfloat16* solve;  // [chunk, v_head] swizzled 64 x 64 image of T', see prepare_kernel
  // Joints of split sequences; S being the state at a segment's entry, its exit has M S + S_ext.
  float* joint_states;  // [joint, v_head, K, V]
  float* transitions;   // [joint, v_head, K, K] in tf32: M of the segment that begins at the joint
  int* carries;         // [joint, v_head]: 0 where that segment forgets its entry and M is not set
  __nv_bfloat16* u;     // [token, v_head, V], null when not for backward

  // Forward outputs.
  __nv_bfloat16* o;
  int64_t o_stride;
  float* final_state;

  // Backward. Tensors dv and u share the token layout; states and d_states are swizzled images
  // [chunk, v_head, part, 64 (rows of V), K], transposed.
  const __nv_bfloat16* d_o;
  int64_t do_stride, dq_stride, dk_stride, dv_stride;
  const float* d_final_state;
  __nv_bfloat16 *states, *d_states;
  float* joint_gradients;  // like joint_states
  __nv_bfloat16 *dq, *dk, *dv;
  float *dg, *dbeta, *d_initial_state;
};

/// The checked arguments of an entry point; separate so that the benchmark can time single kernels.
Args forward_args(const GatedDeltaNetShape& shape, const GatedDeltaNetOptions& options,
                  const GatedDeltaNetInputs& in, const GatedDeltaNetForward& out);
Args backward_args(const GatedDeltaNetShape& shape, const GatedDeltaNetOptions& options,
                   const GatedDeltaNetInputs& in, const GatedDeltaNetBackward& out);
/// Throws std::invalid_argument where wgmma kernels are asked for that do not exist here.
bool use_hopper(GatedDeltaNetKernel kernel, int head_dim);
/// Describes every tensor that is set to the bulk copy engine.
void make_maps(Args& a, int head_dim);

/// Kernels in launch order; hopper: wgmma, otherwise mma.sync.
void launch_plan(const Args& a, cudaStream_t s);
void launch_prepare(const Args& a, int head_dim, bool hopper, cudaStream_t s);
/// The states at the joints; nothing to do without joints.
void launch_joints(const Args& a, int head_dim, bool hopper, cudaStream_t s);
void launch_forward(const Args& a, int head_dim, bool hopper, cudaStream_t s);
void launch_serial(const Args& a, int head_dim, bool hopper, cudaStream_t s);
void launch_gradients(const Args& a, int head_dim, bool hopper, cudaStream_t s);
void launch_wide_gradients(const Args& a, cudaStream_t s);  // head_dim 256, mma.sync

/// From the gradient ext left at every joint to the whole gradient.
void launch_join_gradients(const Args& a, int head_dim, cudaStream_t s);

/// Whether the serial kernels give each value head two CTAs: with no more segment-heads than this,
/// both halves find an SM of their own (an H200 has 132).
constexpr int kSplitValues = 80;
inline bool split_values(const Args& a) { return a.max_segments * a.v_heads <= kSplitValues; }

/// Dynamic shared memory of a CTA of each of these kernels, the largest variant.
size_t forward_shared_bytes(int head_dim, bool hopper);
size_t serial_shared_bytes(int head_dim, bool hopper);
size_t gradients_shared_bytes(int head_dim, bool hopper);
size_t wide_gradients_shared_bytes();

/// Throws std::runtime_error naming `what` when the last launch failed.
void check_launch(const char* what);

/// Launches kernel(a...). early: its CTAs may become resident while the kernel before it in the
/// stream still runs (sm_90); before they read or write memory they call wait_for_previous_kernel.
template <class... A>
void launch_after(void (*kernel)(A...), dim3 grid, int threads, size_t shared_bytes, bool early,
                  cudaStream_t stream, const A&... a) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, a...);
}

}  // namespace heddle::ops::cuda::gdn
