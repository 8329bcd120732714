// Times a layer's mixer in a step of generation with states of fp32 and of bf16, after a check that
// the second are the first, rounded once: outputs and states are compared bit by bit over steps.
//   heddle_mixer_bench [check] [SEQUENCES ...]      the exit status is 1 if a check fails
#include <cuda_bf16.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "ops/gated_delta_net/cuda/decode.h"
#include "random_matrix.cuh"

namespace {

using namespace heddle::ops::cuda;
using bf16 = __nv_bfloat16;
using heddle::bench_cuda::check;
using heddle::bench_cuda::fill;

constexpr int kDim = 128, kWidth = 4;

struct Heads {
  const char* model;
  int keys, values, layers;
};
constexpr Heads kHeads[] = {{"0.8B", 16, 16, 18}, {"4B", 16, 32, 24}};

bf16* random(int64_t count, unsigned seed, float scale = 1) {
  bf16* data;
  check(cudaMalloc(&data, static_cast<std::size_t>(count) * sizeof(bf16)));
  fill<<<1024, 256>>>(data, count, seed, scale);
  return data;
}

__global__ void widen(const bf16* from, float* to, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x)
    to[i] = __bfloat162float(from[i]);
}

/// Counts numbers of `rounded` that are not those of `wide`, rounded.
__global__ void compare(const bf16* rounded, const float* wide, int64_t count, int* different) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    if (__bfloat16_as_ushort(rounded[i]) != __bfloat16_as_ushort(__float2bfloat16_rn(wide[i])))
      atomicAdd(different, 1);
  }
}

/// Inputs of the mixers of `sets` layers, whose states differ.
struct Problem {
  GdnDecodeShape shape;
  GdnMixerInputs in{};
  int64_t states;  ///< States of a layer.
  bf16 *half, *conv, *y, *y_wide;
  float* wide;
  int* different;

  Problem(const Heads& heads, int batch, int sets)
      : shape{batch, heads.keys, heads.values, kDim, Element::kFloat32},
        states(int64_t{batch} * heads.values * kDim * kDim) {
    const int channels = (2 * heads.keys + heads.values) * kDim;
    const int64_t rows = int64_t{batch} * heads.values;
    in.qkv = {random(int64_t{batch} * channels, 1), channels, 0};
    in.a = {random(rows, 2), heads.values, 0};
    in.b = {random(rows, 3), heads.values, 0};
    in.z = {random(rows * kDim, 4), int64_t{heads.values} * kDim, kDim};
    in.conv_weight = random(int64_t{channels} * kWidth, 5, 0.5f);
    in.a_log = random(heads.values, 6), in.dt_bias = random(heads.values, 7);
    in.norm_weight = random(kDim, 8);
    in.conv_weight_type = in.a_log_type = in.dt_bias_type = in.norm_weight_type =
        Element::kBFloat16;
    in.width = kWidth;
    in.scale = 0.088f, in.eps = 1e-6f;
    conv = random(int64_t{batch} * channels * (kWidth - 1) * 2, 9);
    in.conv_states = conv;
    half = random(states * sets, 10);
    y = random(rows * kDim, 11), y_wide = random(rows * kDim, 11);
    check(cudaMalloc(&wide, static_cast<std::size_t>(states * sets) * sizeof(float)));
    widen<<<1024, 256>>>(half, wide, states * sets);
    check(cudaMalloc(&different, sizeof(int)));
    std::vector<int64_t> slots(static_cast<std::size_t>(batch));
    for (std::size_t i = 0; i < slots.size(); ++i)
      slots[i] = static_cast<int64_t>(slots.size() - 1 - i);
    int64_t* on_device;
    check(cudaMalloc(&on_device, slots.size() * sizeof(int64_t)));
    check(cudaMemcpy(on_device, slots.data(), slots.size() * sizeof(int64_t),
                     cudaMemcpyHostToDevice));
    in.slots = on_device;
  }
  ~Problem() {
    for (const void* memory :
         {in.qkv.data, in.a.data, in.b.data, in.z.data, in.conv_weight, in.a_log, in.dt_bias,
          in.norm_weight, static_cast<const void*>(half), static_cast<const void*>(conv),
          static_cast<const void*>(y), static_cast<const void*>(y_wide),
          static_cast<const void*>(wide), static_cast<const void*>(different),
          static_cast<const void*>(in.slots)})
      cudaFree(const_cast<void*>(memory));
  }

  void step(Element type, int set, bf16* to, cudaStream_t stream) const {
    GdnDecodeShape own = shape;
    own.state_type = type;
    GdnMixerInputs inputs = in;
    const int64_t first = set * states;
    if (type == Element::kBFloat16) {
      inputs.states = half + first;
    } else {
      inputs.states = wide + first;
    }
    gated_delta_net_decode(own, inputs, to, stream);
  }
};

bool rounds_once(const Heads& heads, int batch) {
  const Problem p(heads, batch, 1);
  const int64_t channels = (2 * heads.keys + heads.values) * kDim,
                conv = int64_t{batch} * channels * (kWidth - 1);
  bool is_right = true;
  for (int step = 0; step < 3; ++step) {
    widen<<<1024, 256>>>(p.half, p.wide, p.states);
    // Both steps shift the same inputs of the convolution.
    check(cudaMemcpy(p.conv + conv, p.conv, static_cast<std::size_t>(conv) * 2,
                     cudaMemcpyDeviceToDevice));
    p.step(Element::kFloat32, 0, p.y_wide, nullptr);
    check(cudaMemcpy(p.conv, p.conv + conv, static_cast<std::size_t>(conv) * 2,
                     cudaMemcpyDeviceToDevice));
    p.step(Element::kBFloat16, 0, p.y, nullptr);
    check(cudaMemset(p.different, 0, sizeof(int)));
    compare<<<1024, 256>>>(p.half, p.wide, p.states, p.different);
    int different = 0;
    check(cudaMemcpy(&different, p.different, sizeof(int), cudaMemcpyDeviceToHost));
    std::vector<uint16_t> a(static_cast<std::size_t>(batch) * heads.values * kDim), b = a;
    check(cudaMemcpy(a.data(), p.y, a.size() * 2, cudaMemcpyDeviceToHost));
    check(cudaMemcpy(b.data(), p.y_wide, b.size() * 2, cudaMemcpyDeviceToHost));
    is_right = is_right && different == 0 && a == b;
  }
  if (!is_right) std::printf("FAILED: %s, %d sequences\n", heads.model, batch);
  return is_right;
}

double microseconds(const Problem& p, Element type, int sets) {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  const auto layers = [&] {
    for (int set = 0; set < sets; ++set) p.step(type, set, p.y, stream);
  };
  layers();
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  layers();
  check(cudaStreamEndCapture(stream, &graph));
  check(cudaGraphInstantiate(&replay, graph, 0));
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  constexpr int kReplays = 20;
  for (int i = 0; i < 3; ++i) check(cudaGraphLaunch(replay, stream));
  check(cudaEventRecord(begin, stream));
  for (int i = 0; i < kReplays; ++i) check(cudaGraphLaunch(replay, stream));
  check(cudaEventRecord(end, stream));
  check(cudaEventSynchronize(end));
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin, end));
  check(cudaGraphExecDestroy(replay));
  check(cudaGraphDestroy(graph));
  check(cudaStreamDestroy(stream));
  return 1e3 * ms / kReplays / sets;
}

void time_mixer(const Heads& heads, int batch) {
  const Problem p(heads, batch, heads.layers);
  for (const Element type : {Element::kFloat32, Element::kBFloat16}) {
    const double us = microseconds(p, type, heads.layers),
                 bytes = 2.0 * static_cast<double>(p.states * bytes_of(type));
    std::printf("%-5s %4d sequences, %s states: %8.1f us, %5.2f TB/s of states\n", heads.model,
                batch, type == Element::kBFloat16 ? "bf16" : "fp32", us, bytes / us * 1e-6);
  }
}

}  // namespace

int main(int count, char** arguments) {
  bool checks_only = false, is_right = true;
  std::vector<int> batches;
  for (int i = 1; i < count; ++i) {
    if (std::strcmp(arguments[i], "check") == 0) {
      checks_only = true;
    } else {
      batches.push_back(std::atoi(arguments[i]));
    }
  }
  for (const Heads& heads : kHeads) {
    for (const int batch : {1, 3, 17, 40}) is_right = rounds_once(heads, batch) && is_right;
  }
  std::printf("states of bf16 are those of fp32, rounded once: %s\n", is_right ? "yes" : "NO");
  if (batches.empty()) batches = {1, 8, 64, 256};
  for (const Heads& heads : kHeads) {
    for (const int batch : batches) {
      if (!checks_only) time_mixer(heads, batch);
    }
  }
  return is_right ? 0 : 1;
}
