// CUDA kernels of the gated delta rule, forward and backward, over packed sequences. Plain C++
// header: raw pointers, sizes and a stream. Mathematics and notation: docs/gdn.md.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace heddle::ops::cuda {

/// kPortable: mma.sync, sm_80 and later. kHopper: wgmma, sm_90a, head_dim 64 and 128. kAuto takes
/// kHopper where it can run.
enum class GatedDeltaNetKernel { kAuto, kPortable, kHopper };

/// tokens: length of the packed axis (= cu_seqlens[sequences]); v_heads a multiple of k_heads (1 to
/// 8 times); head_dim K = V = 64, 128 or 256. segment_chunks: sequences of more than so many chunks
/// of 64 tokens are split into segments that run at once; 0: chosen from the shape. longest: tokens
/// of the longest sequence, for that choice alone; 0: not known, all are taken to be equally long.
struct GatedDeltaNetShape {
  int tokens = 0;
  int sequences = 0;
  int k_heads = 0;
  int v_heads = 0;
  int head_dim = 128;
  int segment_chunks = 0;
  int longest = 0;
};

/// scale multiplies q (usually head_dim^-0.5). normalize_qk: q and k are given raw and are divided
/// by sqrt(sum x^2 + 1e-6) inside; gradients are then those of the raw q and k.
struct GatedDeltaNetOptions {
  float scale = 0.0883883476f;
  bool normalize_qk = true;
  GatedDeltaNetKernel kernel = GatedDeltaNetKernel::kAuto;
};

/// A bf16 tensor [tokens, heads, head_dim]: heads contiguous, tokens `stride` elements apart (so
/// that a slice of a fused projection can be passed). Base and stride are multiples of 16 bytes.
struct GatedDeltaNetTensor {
  void* data = nullptr;
  int64_t stride = 0;
};

/// Inputs both directions read. g: natural-log decay <= 0; beta: write strength, 0 to 2; fp32
/// [tokens, v_heads], contiguous. cu_seqlens: int32 [sequences + 1] on the device, non-decreasing;
/// empty sequences allowed. initial_state: fp32 [sequences, v_heads, K, V] or null.
struct GatedDeltaNetInputs {
  GatedDeltaNetTensor q, k, v;
  const float* g = nullptr;
  const float* beta = nullptr;
  const int* cu_seqlens = nullptr;
  const float* initial_state = nullptr;
};

/// final_state: fp32 [sequences, v_heads, K, V] or null. saved: gated_delta_net_saved_bytes(shape,
/// for_backward) bytes, 256-byte aligned; the backward reads it (and needs for_backward = true).
struct GatedDeltaNetForward {
  GatedDeltaNetTensor o;
  float* final_state = nullptr;
  void* saved = nullptr;
  bool for_backward = true;
};

/// d_final_state, d_initial_state: fp32 [sequences, v_heads, K, V] or null. dg, dbeta: fp32
/// [tokens, v_heads]. dbeta is 0 where |beta| < 1e-18. workspace:
/// gated_delta_net_workspace_bytes(shape).
struct GatedDeltaNetBackward {
  GatedDeltaNetTensor d_o;
  const float* d_final_state = nullptr;
  const void* saved = nullptr;
  void* workspace = nullptr;
  GatedDeltaNetTensor dq, dk, dv;
  float* dg = nullptr;
  float* dbeta = nullptr;
  float* d_initial_state = nullptr;
};

/// segment_chunks, or what 0 stands for on a device of so many multiprocessors (0: not known):
/// INT_MAX where no sequence is split. The one place where that is decided, from the shape alone.
/// Splitting costs the backward two launches and shortens it less, so it must save 12 us and a
/// tenth of the forward; more pieces than needed must save a twentieth.
int gated_delta_net_segment_chunks(const GatedDeltaNetShape& shape, int multiprocessors);

/// Bytes the forward keeps (about 400 B per token and value head for training, 136 B otherwise, and
/// where sequences are split 2 fp32 states per segment). This, the workspace and both directions
/// must see the same current device.
size_t gated_delta_net_saved_bytes(const GatedDeltaNetShape& shape, bool for_backward);

/// Scratch bytes of one backward call (2 head_dim^2 bf16 values per 64 tokens and value head).
size_t gated_delta_net_workspace_bytes(const GatedDeltaNetShape& shape);

/// Largest dynamic shared memory of a CTA over all kernels of a path, to compare with the device's
/// limit (227 KB on sm_90, 163 KB on sm_80). kernel must not be kAuto.
size_t gated_delta_net_shared_bytes(int head_dim, GatedDeltaNetKernel kernel);

/// The kernel that kAuto means on the current device; throws nothing, kPortable when the build
/// lacks sm_90a code.
GatedDeltaNetKernel gated_delta_net_kernel_for_device();

/// Enqueue on `stream`; no host synchronisation, no allocation, capturable in a CUDA graph. Results
/// are bitwise reproducible. Throw std::invalid_argument on a shape that does not fit and
/// std::runtime_error on a CUDA error.
void gated_delta_net_forward(const GatedDeltaNetShape& shape, const GatedDeltaNetOptions& options,
                             const GatedDeltaNetInputs& in, const GatedDeltaNetForward& out,
                             cudaStream_t stream);
void gated_delta_net_backward(const GatedDeltaNetShape& shape, const GatedDeltaNetOptions& options,
                              const GatedDeltaNetInputs& in, const GatedDeltaNetBackward& out,
                              cudaStream_t stream);

}  // namespace heddle::ops::cuda
