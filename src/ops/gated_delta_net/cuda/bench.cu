// Times the CUDA gated delta rule: forward with nothing saved, forward, backward and each kernel,
// bf16, head size 128, normalisation of q and k included. Gates: logsigmoid(normal)/16, a quarter
// of the heads without decay.
//   gdn_cuda_bench [portable|hopper] [k_heads v_heads batch length segment_chunks]...
#include <algorithm>
#include <cmath>
#include <functional>
#include <string>

#include "args.h"
#include "test_support.h"

namespace heddle::ops::cuda::gdn {
namespace {

__device__ float uniform(uint64_t i, uint32_t stream) {  // in (0, 1)
  uint64_t z = i * 0x9e3779b97f4a7c15ull + stream * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return ((z ^ (z >> 31)) >> 40) * 5.9604644775390625e-8f + 2.98e-8f;
}
__device__ float normal(uint64_t i, uint32_t stream) {
  return sqrtf(-2 * logf(uniform(i, stream))) * cospif(2 * uniform(i, stream + 1));
}
__global__ void fill_normal(__nv_bfloat16* x, size_t n, uint32_t stream) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    x[i] = __float2bfloat16(normal(i, stream));
}
__global__ void fill_gates(float* g, float* beta, size_t n, int heads) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n;
       i += gridDim.x * blockDim.x) {
    g[i] = int(i % heads) < heads / 4 ? 0.f : -log1pf(expf(-normal(i, 90))) / 16;
    beta[i] = 1 / (1 + expf(-normal(i, 92)));
  }
}

/// Median over 7 trials of the mean of 5 calls between events, in ms.
double time_ms(const std::function<void()>& f) {
  cudaEvent_t a, b;
  GDN_CUDA(cudaEventCreate(&a));
  GDN_CUDA(cudaEventCreate(&b));
  for (int i = 0; i < 3; ++i) f();
  std::vector<float> t(7);
  for (auto& x : t) {
    GDN_CUDA(cudaEventRecord(a));
    for (int i = 0; i < 5; ++i) f();
    GDN_CUDA(cudaEventRecord(b));
    GDN_CUDA(cudaEventSynchronize(b));
    GDN_CUDA(cudaEventElapsedTime(&x, a, b));
    x /= 5;
  }
  GDN_CUDA(cudaGetLastError());
  cudaEventDestroy(a);
  cudaEventDestroy(b);
  std::sort(t.begin(), t.end());
  return t[3];
}

void bench(int k_heads, int v_heads, int batch, int length, GatedDeltaNetKernel kernel,
           int segment_chunks = 0) {
  const int d = 128, tokens = batch * length;
  GatedDeltaNetShape shape{tokens, batch, k_heads, v_heads, d, segment_chunks};
  GatedDeltaNetOptions options{0.0883883476f, true, kernel};
  size_t nk = size_t(tokens) * k_heads * d, nv = size_t(tokens) * v_heads * d,
         ng = size_t(tokens) * v_heads;
  Buffer<__nv_bfloat16> q(nk), k(nk), v(nv), d_o(nv), o(nv), dq(nk), dk(nk), dv(nv);
  Buffer<float> g(ng), beta(ng), dg(ng), dbeta(ng);
  std::vector<int> cu(batch + 1);
  for (int i = 0; i <= batch; ++i) cu[i] = i * length;
  Buffer<int> bcu(cu);
  Buffer<char> saved(gated_delta_net_saved_bytes(shape, true)),
      workspace(gated_delta_net_workspace_bytes(shape));
  fill_normal<<<1024, 256>>>(q.p, nk, 10);
  fill_normal<<<1024, 256>>>(k.p, nk, 20);
  fill_normal<<<1024, 256>>>(v.p, nv, 30);
  fill_normal<<<1024, 256>>>(d_o.p, nv, 40);
  fill_gates<<<1024, 256>>>(g.p, beta.p, ng, v_heads);
  int64_t sk = int64_t(k_heads) * d, sv = int64_t(v_heads) * d;
  GatedDeltaNetInputs in{{q.p, sk}, {k.p, sk}, {v.p, sv}, g.p, beta.p, bcu.p, nullptr};
  GatedDeltaNetForward fwd{{o.p, sv}, nullptr, saved.p, true};
  GatedDeltaNetBackward bwd;
  bwd.d_o = {d_o.p, sv};
  bwd.saved = saved.p;
  bwd.workspace = workspace.p;
  bwd.dq = {dq.p, sk};
  bwd.dk = {dk.p, sk};
  bwd.dv = {dv.p, sv};
  bwd.dg = dg.p;
  bwd.dbeta = dbeta.p;
  double f = time_ms([&] { gated_delta_net_forward(shape, options, in, fwd, nullptr); });
  double b = time_ms([&] { gated_delta_net_backward(shape, options, in, bwd, nullptr); });
  GatedDeltaNetForward inference = fwd;
  inference.for_backward = false;
  double i = time_ms([&] { gated_delta_net_forward(shape, options, in, inference, nullptr); });
  Args af = forward_args(shape, options, in, fwd), ab = backward_args(shape, options, in, bwd);
  bool hopper = use_hopper(kernel, shape.head_dim);
  double part[] = {time_ms([&] { launch_plan(af, nullptr); }),
                   time_ms([&] { launch_prepare(af, d, hopper, nullptr); }),
                   time_ms([&] { launch_joints(af, d, hopper, nullptr); }),
                   time_ms([&] { launch_forward(af, d, hopper, nullptr); }),
                   time_ms([&] { launch_serial(ab, d, hopper, nullptr); }),
                   time_ms([&] { launch_gradients(ab, d, hopper, nullptr); })};
  std::printf("%2d/%2d %2d x %6d | %7.3f %7.3f %7.3f | %6.3f %6.3f %6.3f %6.3f %6.3f %6.3f | %d\n",
              k_heads, v_heads, batch, length, i, f, b, part[0], part[1], part[2], part[3], part[4],
              part[5], af.segment_chunks);
}

}  // namespace
}  // namespace heddle::ops::cuda::gdn

int main(int argc, char** argv) {
  using namespace heddle::ops::cuda;
  std::string which = argc > 1 ? argv[1] : "";
  auto kernel =
      which == "portable" ? GatedDeltaNetKernel::kPortable : gated_delta_net_kernel_for_device();
  std::printf(
      "%s\nheads  batch x T  | inference forward backward | plan prepare joints forward serial "
      "gradients "
      "(ms) | "
      "segment chunks\n",
      kernel == GatedDeltaNetKernel::kHopper ? "hopper (wgmma)" : "portable (mma.sync)");
  for (int i = 2; i + 4 < argc; i += 5)
    gdn::bench(std::atoi(argv[i]), std::atoi(argv[i + 1]), std::atoi(argv[i + 2]),
               std::atoi(argv[i + 3]), kernel, std::atoi(argv[i + 4]));
  if (argc > 2) return 0;
  for (auto [hk, hv, b, t] : {std::array{16, 16, 4, 8192},
                              {16, 32, 4, 8192},
                              {16, 32, 1, 32768},
                              {16, 16, 1, 32768},
                              {16, 64, 4, 8192},
                              {16, 48, 4, 8192},
                              {32, 32, 4, 4096}})
    gdn::bench(hk, hv, b, t, kernel);
}
