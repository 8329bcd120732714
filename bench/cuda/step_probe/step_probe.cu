// Times one step of generation of 0.8B as one persistent kernel (step.cuh), and checks it against
// sums in double. Every layer is one of the gated delta rule, whose mixer is a cheap stand-in.
//   heddle_step_probe [STEPS]      the exit status is 1 if a result is wrong
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "reference.cuh"
#include "step.cuh"

namespace heddle::step_probe {
namespace {

bf16* random(int64_t count, float scale) {
  static unsigned seed = 1;
  bf16* to;
  check(cudaMalloc(&to, count * 2));
  bench_cuda::fill<<<1024, 256>>>(to, count, seed += 7919, scale);
  check(cudaGetLastError());
  return to;
}

Model make_model() {
  const auto norm = [](int depth) { return std::sqrt(3.f / static_cast<float>(depth)); };
  const int64_t layers = kMostLayers;
  Model m;
  m.inputs = random(layers * kInputs * kWidth, norm(kWidth));
  m.out = random(layers * kWidth * kMixer, norm(kMixer));
  m.gate_up = random(layers * 2 * kInner * kWidth, norm(kWidth));
  m.down = random(layers * kWidth * kInner, norm(kInner));
  m.head = random(int64_t{kVocabulary} * kWidth, norm(kWidth));
  m.norm_inputs = random(layers * kWidth, 1.7f), m.norm_gate_up = random(layers * kWidth, 1.7f);
  m.norm_head = random(kWidth, 1.7f);
  m.a_inputs = random(layers * kInputAdapters * kRank * kWidth, norm(kWidth));
  m.b_inputs = random(layers * kInputs * kRank, norm(kRank));
  m.a_out = random(layers * kMixer * kRank, norm(kMixer));
  m.b_out = random(layers * kWidth * kRank, norm(kRank));
  m.a_gate_up = random(layers * 2 * kRank * kWidth, norm(kWidth));
  m.b_gate_up = random(layers * 2 * kInner * kRank, norm(kRank));
  m.a_down = random(layers * kInner * kRank, norm(kInner));
  m.b_down = random(layers * kWidth * kRank, norm(kRank));
  m.embedding = random(kMostSequences * kWidth, 1.f);
  return m;
}

struct Buffers {
  Exchange e;
  int64_t words;
  Buffers() {
    const int64_t row = kInputs / 2 + kMixer / 2 + kWidth / 2 + kInner / 2 + kWidth / 2 +
                        2 * kCtas * kLowWords + 6 * 64;
    words = row * kMostSequences;
    u32* at;
    check(cudaMalloc(&at, words * 4));
    const auto take = [&](int count) {
      u32* from = at;
      at += int64_t{kMostSequences} * count;
      return from;
    };
    e.inputs = take(kInputs / 2), e.mixed = take(kMixer / 2), e.middle = take(kWidth / 2);
    e.inner = take(kInner / 2), e.residual = take(kWidth / 2);
    e.low_mixed = take(kCtas * kLowWords), e.low_inner = take(kCtas * kLowWords);
    check(cudaMalloc(&e.logits, int64_t{kMostSequences} * kVocabulary * 4));
  }
  /// All words of the round before the first, numbers NaN.
  void clear() const {
    check(cudaMemset(e.inputs, 0xff, words * 4));
    check(cudaMemset(e.logits, 0xff, int64_t{kMostSequences} * kVocabulary * 4));
  }
};

template <int kRows, bool kLora, Mode kMode, int kWarps>
struct Variant {
  static void launch(const Model& m, const Exchange& e, int layers, u32 step) {
    const auto kernel = step_kernel<kRows, kLora, kMode, kWarps>;
    constexpr int kBytes =
        kSlotsThatFit<kRows, kWarps> * kSlotBytes + static_cast<int>(sizeof(Shared<kRows, kWarps>));
    static const bool once = [&] {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
      return true;
    }();
    static_cast<void>(once);
    Model model = m;
    Exchange exchange = e;
    void* arguments[] = {&model, &exchange, &layers, &step};
    check(cudaLaunchCooperativeKernel(kernel, dim3(kCtas), dim3(kWarps * 32 + 128), arguments,
                                      kBytes, nullptr));
  }
};

float error(const std::vector<double>& expected, const u32* words) {
  std::vector<u32> got(expected.size() / 2);
  check(cudaMemcpy(got.data(), words, got.size() * 4, cudaMemcpyDeviceToHost));
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    u32 word = got[i / 2] & ~kRoundBit;
    word = i % 2 ? word & 0xffff0000u : word << 16;
    float v;
    memcpy(&v, &word, 4);
    const double d = static_cast<double>(v * kRead) - expected[i];
    difference += d * d, norm += expected[i] * expected[i];
  }
  return static_cast<float>(std::sqrt(difference / norm));
}

std::vector<float> logits(const Buffers& b, int rows) {
  std::vector<float> got(int64_t{rows} * kVocabulary);
  check(cudaMemcpy(got.data(), b.e.logits, got.size() * 4, cudaMemcpyDeviceToHost));
  return got;
}

template <class V>
bool is_right(const char* name, Reference& reference, const Model& m, const Buffers& b, int rows,
              bool lora, int layers) {
  b.clear();
  for (u32 step = 0; step < 3; ++step) V::launch(m, b.e, layers, step);
  check(cudaDeviceSynchronize());
  const auto first = logits(b, rows);
  check(cudaMemset(b.e.logits, 0xff, first.size() * 4));
  V::launch(m, b.e, layers, 3);
  const auto got = logits(b, rows);
  bool same = memcmp(first.data(), got.data(), got.size() * 4) == 0;
  const Results r = reference.step(m, rows, layers, lora);
  double difference = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double d = static_cast<double>(got[i]) - r.logits[i];
    difference += d * d, norm += r.logits[i] * r.logits[i];
  }
  const double last = std::sqrt(difference / norm);
  const float of[5] = {error(r.inputs, b.e.inputs), error(r.mixed, b.e.mixed),
                       error(r.middle, b.e.middle), error(r.inner, b.e.inner),
                       error(r.residual, b.e.residual)};
  const double most = layers == 1 ? 1.5e-2 : 0.1;
  bool right = same && last < most;
  for (const float v : of) right = right && static_cast<double>(v) < most;
  std::printf("%s, %d layers: errors %.1e %.1e %.1e %.1e %.1e, logits %.1e, again %s: %s\n", name,
              layers, static_cast<double>(of[0]), static_cast<double>(of[1]),
              static_cast<double>(of[2]), static_cast<double>(of[3]), static_cast<double>(of[4]),
              last, same ? "the same bits" : "OTHER BITS", right ? "right" : "WRONG");
  std::fflush(stdout);
  return right;
}

template <class V>
double time_us(const Model& m, const Buffers& b, int layers, int steps) {
  b.clear();
  cudaEvent_t from, to;
  check(cudaEventCreate(&from));
  check(cudaEventCreate(&to));
  u32 step = 0;
  for (int i = 0; i < 5; ++i) V::launch(m, b.e, layers, step++);
  float best = 1e9f;
  for (int again = 0; again < 3; ++again) {
    check(cudaEventRecord(from));
    for (int i = 0; i < steps; ++i) V::launch(m, b.e, layers, step++);
    check(cudaEventRecord(to));
    check(cudaEventSynchronize(to));
    float ms;
    check(cudaEventElapsedTime(&ms, from, to));
    best = std::min(best, ms / static_cast<float>(steps) * 1000);
  }
  return static_cast<double>(best);
}

template <int kRows, bool kLora, Mode kMode, int kWarps>
bool measure(Reference& reference, const Model& m, const Buffers& b, int steps) {
  using V = Variant<kRows, kLora, kMode, kWarps>;
  const char* modes[] = {"whole", "chain without weights", "stream without waiting"};
  char name[200];
  std::snprintf(name, sizeof name, "%d rows, %s, %s, %d warps", kRows, kLora ? "LoRA r16" : "base",
                modes[kMode], kWarps);
  bool right = true;
  if (kMode == kWhole) {
    right = is_right<V>(name, reference, m, b, kRows, kLora, 1);
    right = is_right<V>(name, reference, m, b, kRows, kLora, kMostLayers) && right;
  }
  const double head = time_us<V>(m, b, 0, steps), all = time_us<V>(m, b, kMostLayers, steps);
  std::printf("%s: %.1f us a step, %.1f head alone, %.2f a layer\n", name, all, head,
              (all - head) / kMostLayers);
  std::fflush(stdout);
  return right;
}

template <int kRows>
bool measure_rows(Reference& reference, const Model& m, const Buffers& b, int steps) {
  bool right = measure<kRows, false, kWhole, 8>(reference, m, b, steps);
  right = measure<kRows, true, kWhole, 8>(reference, m, b, steps) && right;
  measure<kRows, false, kChainOnly, 8>(reference, m, b, steps);
  measure<kRows, true, kChainOnly, 8>(reference, m, b, steps);
  measure<kRows, false, kStreamOnly, 8>(reference, m, b, steps);
  measure<kRows, true, kStreamOnly, 8>(reference, m, b, steps);
  right = measure<kRows, false, kWhole, 16>(reference, m, b, steps) && right;
  return measure<kRows, true, kWhole, 16>(reference, m, b, steps) && right;
}

int run(int steps) {
  const Model m = make_model();
  const Buffers b;
  Reference reference;
  const bool right = measure_rows<1>(reference, m, b, steps);
  return measure_rows<8>(reference, m, b, steps) && right ? 0 : 1;
}

}  // namespace
}  // namespace heddle::step_probe

int main(int count, char** arguments) {
  try {
    return heddle::step_probe::run(count > 1 ? std::atoi(arguments[1]) : 50);
  } catch (const std::exception& e) {
    std::printf("failed: %s\n", e.what());
    return 1;
  }
}
