// Entry points: checks, the layout of the saved buffer and the workspace, and the order of kernels.
#include "gated_delta_net.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "args.h"
#include "ops/cuda/tensor_map.h"

namespace heddle::ops::cuda {
namespace gdn {

void check_launch(const char* what) {
  cudaError_t e = cudaGetLastError();
  if (e != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(e));
}

namespace {

/// Hands out 256-byte aligned pieces; with a null base it only measures.
struct Arena {
  char* base;
  size_t used = 0;
  template <class T>
  T* take(size_t count) {
    size_t at = used;
    used += (count * sizeof(T) + 255) / 256 * 256;
    return base == nullptr ? nullptr : reinterpret_cast<T*>(base + at);
  }
};

/// Pieces of one sequence: the join walks them one by one, and each adds rounding.
constexpr int kMaxPieces = 32;

int max_chunks(const GatedDeltaNetShape& s) { return s.tokens / kChunk + s.sequences; }

constexpr int kWhole = std::numeric_limits<int>::max();

/// Forward time in us when the longest sequence is cut into `pieces` and every other one into
/// pieces no longer, from times measured on an H200 (README.md): a CTA's for a chunk, with one half
/// of V and with both; for a chunk of the ends of a segment, where a quarter of the heads is taken
/// to need its transition; for a step of the join.
double modelled_time(const GatedDeltaNetShape& s, int longest, int pieces, double sms) {
  int length = ((longest + kChunk - 1) / kChunk + pieces - 1) / pieces;
  int segments = s.sequences + (pieces > 1 ? s.tokens / kChunk / length : 0);
  bool halves = segments * s.v_heads <= kSplitValues;
  // All tokens in sequences like the longest one.
  double ctas = double(s.tokens) / longest * s.v_heads * pieces;
  // Equal segments run in waves. Where lengths differ, longest first, short ones fill the gaps: the
  // waves are then as fine as the mean sequence, and no less than the longest segment in all.
  double mean = std::ceil(double(s.tokens) / s.sequences / kChunk);
  double wave = std::min<double>(length, mean), work = (halves ? 2 : 1) * ctas / sms * length;
  double walk = std::max<double>(length, std::ceil(work / wave) * wave) * (halves ? 1.6 : 2.7);
  if (pieces == 1) return walk;
  double ends = 1.25 * length * std::max(1.0, 0.75 * ctas / sms), join = 2.4 * (pieces - 2);
  return walk + ends + join + 12;
}

int segment_chunks(const GatedDeltaNetShape& s) {
  int device = 0, sms = 0;
  if (cudaGetDevice(&device) == cudaSuccess)
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  return gated_delta_net_segment_chunks(s, sms);
}
/// A sequence of n chunks has at most (n - 1) / segment_chunks joints, and n - 1 whole chunks.
int max_joints(const GatedDeltaNetShape& s) { return s.tokens / kChunk / segment_chunks(s); }
int max_segments(const GatedDeltaNetShape& s) { return s.sequences + max_joints(s); }

size_t place_saved(Args& a, const GatedDeltaNetShape& s, bool for_backward, void* base) {
  Arena m{static_cast<char*>(base)};
  size_t chunks = max_chunks(s);
  a.first_chunk = m.take<int>(s.sequences + 1);
  a.first_segment = m.take<int>(s.sequences + 1);
  a.segments = m.take<Segment>(max_segments(s));
  a.chunks = m.take<ChunkInfo>(chunks);
  a.decay = m.take<float>(chunks * s.v_heads * kChunk);
  a.strength = m.take<float>(chunks * s.v_heads * kChunk);
  a.q_rms = m.take<float>(chunks * s.k_heads * kChunk);
  a.k_rms = m.take<float>(chunks * s.k_heads * kChunk);
  a.solve = m.take<__nv_bfloat16>(chunks * s.v_heads * kChunk * kChunk);
  size_t joint_heads = size_t(max_joints(s)) * s.v_heads;
  a.joint_states = m.take<float>(joint_heads * s.head_dim * s.head_dim);
  a.transitions = m.take<float>(joint_heads * s.head_dim * s.head_dim);
  a.carries = m.take<int>(joint_heads);
  // The backward's pointers must not move with the flag, so the optional part comes last.
  a.u = for_backward ? m.take<__nv_bfloat16>(size_t(s.tokens) * s.v_heads * s.head_dim) : nullptr;
  return m.used;
}

size_t place_workspace(Args& a, const GatedDeltaNetShape& s, void* base) {
  Arena m{static_cast<char*>(base)};
  size_t count = size_t(max_chunks(s)) * s.v_heads * s.head_dim * s.head_dim;
  a.states = m.take<__nv_bfloat16>(count);
  a.d_states = m.take<__nv_bfloat16>(count);
  a.joint_gradients = m.take<float>(size_t(max_joints(s)) * s.v_heads * s.head_dim * s.head_dim);
  return m.used;
}

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("gated_delta_net (cuda): ") + what);
}

const __nv_bfloat16* checked(const GatedDeltaNetTensor& t, int heads, int head_dim, bool empty) {
  require(empty || t.data != nullptr, "null tensor");
  require(reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.stride % 8 == 0,
          "tensors and token strides must be multiples of 16 bytes");
  require(t.stride >= int64_t(heads) * head_dim, "token stride below heads * head_dim");
  return static_cast<const __nv_bfloat16*>(t.data);
}

Args make_args(const GatedDeltaNetShape& s, const GatedDeltaNetOptions& o,
               const GatedDeltaNetInputs& in) {
  require(s.head_dim == 64 || s.head_dim == 128 || s.head_dim == 256,
          "head_dim must be 64, 128 or 256");
  require(s.tokens >= 0 && s.sequences >= 1 && s.sequences <= 65535,
          "tokens must be >= 0 and sequences within 1..65535");
  require(s.segment_chunks >= 0, "segment_chunks must be >= 0");
  require(s.longest >= 0 && s.longest <= s.tokens, "longest must be within 0..tokens");
  require(s.k_heads >= 1 && s.k_heads <= 65535 && s.v_heads >= 1 && s.v_heads % s.k_heads == 0,
          "v_heads must be a positive multiple of k_heads");
  Args a{};
  a.tokens = s.tokens;
  a.sequences = s.sequences;
  a.k_heads = s.k_heads;
  a.v_heads = s.v_heads;
  a.max_chunks = max_chunks(s);
  a.segment_chunks = segment_chunks(s);
  a.max_segments = max_segments(s);
  a.max_joints = max_joints(s);
  a.scale = o.scale;
  a.normalize = o.normalize_qk;
  bool empty = s.tokens == 0;
  a.q = checked(in.q, s.k_heads, s.head_dim, empty);
  a.k = checked(in.k, s.k_heads, s.head_dim, empty);
  a.v = checked(in.v, s.v_heads, s.head_dim, empty);
  a.q_stride = in.q.stride;
  a.k_stride = in.k.stride;
  a.v_stride = in.v.stride;
  require((empty || (in.g && in.beta)) && in.cu_seqlens, "g, beta and cu_seqlens are required");
  a.g = in.g;
  a.beta = in.beta;
  a.cu_seqlens = in.cu_seqlens;
  a.initial_state = in.initial_state;
  return a;
}

}  // namespace

bool use_hopper(GatedDeltaNetKernel kernel, int head_dim) {
  GatedDeltaNetKernel best = gated_delta_net_kernel_for_device();
  require(kernel != GatedDeltaNetKernel::kHopper || head_dim <= 128,
          "the wgmma kernels have head_dim 64 and 128, the mma.sync kernels 256 too");
  if (head_dim > 128) best = GatedDeltaNetKernel::kPortable;
  require(kernel != GatedDeltaNetKernel::kHopper || best == GatedDeltaNetKernel::kHopper,
          "the wgmma kernels need a device of compute capability 9.0 and a build for sm_90a");
  return (kernel == GatedDeltaNetKernel::kAuto ? best : kernel) == GatedDeltaNetKernel::kHopper;
}

void make_maps(Args& a, int head_dim) {
  auto make = [&](Map m, const __nv_bfloat16* p, int heads, int64_t stride) {
    if (p == nullptr || a.tokens == 0) return;
    a.maps[m] = tensor_map(p, a.tokens, int64_t(heads) * head_dim, stride, /*box_rows=*/64);
  };
  make(kMapQ, a.q, a.k_heads, a.q_stride);
  make(kMapK, a.k, a.k_heads, a.k_stride);
  make(kMapV, a.v, a.v_heads, a.v_stride);
  make(kMapU, a.u, a.v_heads, int64_t(a.v_heads) * head_dim);
  make(kMapO, a.o, a.v_heads, a.o_stride);
  make(kMapGradO, a.d_o, a.v_heads, a.do_stride);
  make(kMapGradV, a.dv, a.v_heads, a.dv_stride);
}

Args forward_args(const GatedDeltaNetShape& shape, const GatedDeltaNetOptions& options,
                  const GatedDeltaNetInputs& in, const GatedDeltaNetForward& out) {
  Args a = make_args(shape, options, in);
  require(out.saved != nullptr, "saved buffer is required");
  place_saved(a, shape, out.for_backward, out.saved);
  a.o =
      const_cast<__nv_bfloat16*>(checked(out.o, shape.v_heads, shape.head_dim, shape.tokens == 0));
  a.o_stride = out.o.stride;
  a.final_state = out.final_state;
  if (use_hopper(options.kernel, shape.head_dim)) make_maps(a, shape.head_dim);
  return a;
}

Args backward_args(const GatedDeltaNetShape& shape, const GatedDeltaNetOptions& options,
                   const GatedDeltaNetInputs& in, const GatedDeltaNetBackward& out) {
  Args a = make_args(shape, options, in);
  require(out.saved != nullptr && out.workspace != nullptr, "saved and workspace are required");
  place_saved(a, shape, true, const_cast<void*>(out.saved));
  place_workspace(a, shape, out.workspace);
  bool empty = shape.tokens == 0;
  a.d_o = checked(out.d_o, shape.v_heads, shape.head_dim, empty);
  a.dq = const_cast<__nv_bfloat16*>(checked(out.dq, shape.k_heads, shape.head_dim, empty));
  a.dk = const_cast<__nv_bfloat16*>(checked(out.dk, shape.k_heads, shape.head_dim, empty));
  a.dv = const_cast<__nv_bfloat16*>(checked(out.dv, shape.v_heads, shape.head_dim, empty));
  a.do_stride = out.d_o.stride;
  a.dq_stride = out.dq.stride;
  a.dk_stride = out.dk.stride;
  a.dv_stride = out.dv.stride;
  a.d_final_state = out.d_final_state;
  a.d_initial_state = out.d_initial_state;
  require(empty || (out.dg && out.dbeta), "dg and dbeta are required");
  a.dg = out.dg;
  a.dbeta = out.dbeta;
  if (use_hopper(options.kernel, shape.head_dim)) make_maps(a, shape.head_dim);
  return a;
}

}  // namespace gdn

int gated_delta_net_segment_chunks(const GatedDeltaNetShape& s, int multiprocessors) {
  if (s.segment_chunks > 0) return s.segment_chunks;
  if (s.tokens == 0 || multiprocessors == 0) return gdn::kWhole;
  int longest = s.longest > 0 ? s.longest : (s.tokens + s.sequences - 1) / s.sequences;
  int chunks = (longest + gdn::kChunk - 1) / gdn::kChunk, best = gdn::kWhole;
  double whole = gdn::modelled_time(s, longest, 1, multiprocessors);
  double bound = std::min(whole - 12, 0.9 * whole);
  for (int pieces = 2; pieces <= gdn::kMaxPieces && 2 * pieces <= chunks; ++pieces) {
    double time = gdn::modelled_time(s, longest, pieces, multiprocessors);
    if (time >= bound) continue;
    bound = 0.95 * time;
    best = (chunks + pieces - 1) / pieces;
  }
  return best;
}

size_t gated_delta_net_saved_bytes(const GatedDeltaNetShape& shape, bool for_backward) {
  gdn::Args a{};
  return gdn::place_saved(a, shape, for_backward, nullptr);
}

size_t gated_delta_net_workspace_bytes(const GatedDeltaNetShape& shape) {
  gdn::Args a{};
  return gdn::place_workspace(a, shape, nullptr);
}

size_t gated_delta_net_shared_bytes(int head_dim, GatedDeltaNetKernel kernel) {
  bool hopper = kernel == GatedDeltaNetKernel::kHopper;
  return std::max({gdn::forward_shared_bytes(head_dim, hopper),
                   gdn::serial_shared_bytes(head_dim, hopper),
                   gdn::gradients_shared_bytes(head_dim, hopper)});
}

GatedDeltaNetKernel gated_delta_net_kernel_for_device() {
#ifdef HEDDLE_CUDA_SM90A
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (major == 9 && minor == 0) return GatedDeltaNetKernel::kHopper;
#endif
  return GatedDeltaNetKernel::kPortable;
}

void gated_delta_net_forward(const GatedDeltaNetShape& shape, const GatedDeltaNetOptions& options,
                             const GatedDeltaNetInputs& in, const GatedDeltaNetForward& out,
                             cudaStream_t stream) {
  gdn::Args a = gdn::forward_args(shape, options, in, out);
  bool hopper = gdn::use_hopper(options.kernel, shape.head_dim);
  gdn::launch_plan(a, stream);
  gdn::launch_prepare(a, shape.head_dim, hopper, stream);
  gdn::launch_joints(a, shape.head_dim, hopper, stream);
  gdn::launch_forward(a, shape.head_dim, hopper, stream);
}

void gated_delta_net_backward(const GatedDeltaNetShape& shape, const GatedDeltaNetOptions& options,
                              const GatedDeltaNetInputs& in, const GatedDeltaNetBackward& out,
                              cudaStream_t stream) {
  gdn::Args a = gdn::backward_args(shape, options, in, out);
  bool hopper = gdn::use_hopper(options.kernel, shape.head_dim);
  gdn::launch_serial(a, shape.head_dim, hopper, stream);
  gdn::launch_gradients(a, shape.head_dim, hopper, stream);
}

}  // namespace heddle::ops::cuda
