// Checks decode_step with sums in double over several steps with carried caches, and times it.
//   heddle_decode_step check [ROWS]   the exit status is 1 if a result is wrong
//   heddle_decode_step short ROWS     few layers and steps, for compute-sanitizer
//   heddle_decode_step one ROWS       one step with one set, for its slow tools
//   heddle_decode_step time [STEPS]
// With changes by adapters, in all cases below or in one:
//   heddle_decode_step adapters [ROWS]
//   heddle_decode_step parts [STEPS]    times those of some matrices alone
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "reference.cuh"

namespace heddle::bench_cuda {
namespace {

struct Exchange {
  uint32_t* words = allocate<uint32_t>(ops::cuda::decode_step_words());
  void clear() const {
    check(cudaMemset(words, 0xff, static_cast<size_t>(ops::cuda::decode_step_words()) * 4));
    check(cudaMemset(words, 0, ops::cuda::kDecodeStepHead * 4));
  }
};

double number(float x) { return static_cast<double>(x); }
double number(double x) { return x; }
double number(bf16 x) { return static_cast<double>(__bfloat162float(x)); }

template <class T>
std::vector<T> host(const T* from, int64_t count) {
  std::vector<T> to(static_cast<size_t>(count));
  check(cudaMemcpy(to.data(), from, to.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return to;
}
template <class T, class U>
double error(const T* got, const U* expected, int64_t count) {
  const auto a = host(got, count);
  const auto b = host(expected, count);
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double e = number(a[i]) - number(b[i]);
    difference += e * e, norm += number(b[i]) * number(b[i]);
  }
  return std::sqrt(difference / norm);
}
template <class T>
uint64_t bits(const T* data, int64_t count) {
  uint64_t mixed = 0;
  for (const T v : host(data, count)) {
    uint32_t word = 0;
    memcpy(&word, &v, sizeof v);
    mixed = (mixed ^ word) * 0x9E3779B97F4A7C15;
  }
  return mixed;
}

/// All caches are those of before the step but for what it writes: errors over whole caches.
bool check_steps(const char* name, int rows, int layers, const std::vector<int64_t>& lengths,
                 int steps, double most, const Mixture* mixture = nullptr) {
  const CacheSizes sizes{rows + 2, rows * 140 + 3};
  const int vocabulary = 2 * 132 * 37 + 10, positions = 4200;
  const DecodeStepModel m = make_model(layers, vocabulary, sizes);
  Sequences sequences(rows, lengths, sizes, vocabulary, positions);
  const Caches before(m, sizes);
  std::optional<Adapters> adapters;
  if (mixture != nullptr) adapters.emplace(m, rows, *mixture);
  Reference reference(m, sizes, adapters ? &*adapters : nullptr);
  const Exchange exchange;
  const auto all = [&](bool compares) {
    exchange.clear();
    uint64_t mixed = 0;
    for (int step = 0; step < steps; ++step) {
      sequences.begin(step);
      check(cudaMemset(sequences.logits, 0xff, static_cast<size_t>(rows) * vocabulary * 4));
      ops::cuda::decode_step(m, sequences.step(), exchange.words, nullptr,
                             adapters ? &adapters->changes : nullptr);
      check(cudaDeviceSynchronize());
      if (compares) reference.step(sequences.step());
      mixed = mixed * 31 + bits(sequences.logits, int64_t{rows} * vocabulary);
    }
    for (int l = 0; l < layers; ++l) {
      if (!m.layer[l].is_attention) mixed = mixed * 31 + bits(m.layer[l].states, sizes.states());
    }
    return mixed;
  };
  const uint64_t first = all(true);
  double worst[3] = {};
  for (int l = 0; l < layers; ++l) {
    const DecodeStepLayer& layer = m.layer[l];
    const size_t i = static_cast<size_t>(l);
    const auto take = [&](int at, double e) { worst[at] = !(e <= worst[at]) ? e : worst[at]; };
    if (layer.is_attention) {
      take(2, error(static_cast<bf16*>(layer.keys), reference.first[i], sizes.keys()));
      take(2, error(static_cast<bf16*>(layer.values), reference.second[i], sizes.keys()));
    } else {
      take(0, error(layer.states, reference.states[i], sizes.states()));
      take(1, error(static_cast<bf16*>(layer.conv_states), reference.first[i], sizes.conv()));
    }
  }
  const double logits = error(sequences.logits, reference.logits, int64_t{rows} * vocabulary);
  before.restore(m, sizes);
  const bool same = all(false) == first;
  const bool right = same && logits < most && worst[0] < most && worst[1] < most && worst[2] < most;
  std::printf(
      "%s%s%s, %d rows, %d layers, %d steps: logits %.1e, states %.1e, inputs of convolutions "
      "%.1e, keys and values %.1e, again %s: %s\n",
      name, mixture ? ", " : "", mixture ? mixture->name : "", rows, layers, steps, logits,
      worst[0], worst[1], worst[2], same ? "the same bits" : "OTHER BITS",
      right ? "right" : "WRONG");
  std::fflush(stdout);
  for (int l = 0; l < layers; ++l) {
    const DecodeStepLayer& layer = m.layer[l];
    for (const void* data :
         {layer.norm_mixer, layer.norm_mlp, layer.inputs[0], layer.inputs[1], layer.inputs[2],
          layer.inputs[3], layer.out, layer.gate, layer.up, layer.down,
          static_cast<const void*>(layer.keys), static_cast<const void*>(layer.values),
          static_cast<const void*>(layer.states), static_cast<const void*>(layer.conv_states)})
      cudaFree(const_cast<void*>(data));
  }
  return right;
}

bool check_rows(int rows) {
  const auto lengths = [&](int64_t longest) {
    std::vector<int64_t> v;
    for (int row = 0; row < rows; ++row)
      v.push_back(row == 0 ? longest : (row * 613 + 1) % (longest + 1));
    return v;
  };
  bool right = check_steps("one layer", rows, 1, lengths(0), 1, 1.5e-2);
  right = check_steps("four layers", rows, 4, lengths(14), 4, 3e-2) && right;
  right = check_steps("four layers, long", rows, 4, lengths(4093), 4, 3e-2) && right;
  return check_steps("all layers", rows, 24, lengths(300), 3, 0.1) && right;
}

/// Sets of several ranks, rows without one, subsets of the matrices.
const std::vector<Mixture> kMixtures = {
    {"one set of rank 16", {0}, {16}},
    {"one set of rank 64", {0}, {64}},
    {"a set each", {0, 1, 2, 3, 4, 5, 6, 7}, {16, 16, 16, 16, 16, 16, 16, 16}},
    {"a set each of rank 64", {7, 6, 5, 4, 3, 2, 1, 0}, {64, 64, 64, 64, 64, 64, 64, 64}},
    {"mixed ranks and rows without", {0, -1, 1, 1, -1, 2, 3, 3}, {8, 64, 16, 32}},
    {"odd ranks", {0, 1, 1, 2, 3, 3, 4, -1}, {1, 5, 12, 47, 63}},
    {"q and v", {0, 0, 1, 1, 0, 0, -1, -1}, {16, 8}, 0x05},
    {"gate, up and down", {0, 1}, {16, 24}, 0xe0},
    {"outputs", {1, 0}, {16, 4}, 0x10},
    {"some matrices of some layers", {0, 1, 2, 0}, {16, 8, 16}, 0xff, true},
    {"no set at all", {-1}, {16}},
};

bool check_adapters(int rows, bool is_short) {
  std::vector<int64_t> lengths;
  for (int row = 0; row < rows; ++row) lengths.push_back((row * 613 + 14) % 97);
  bool right = true;
  for (const Mixture& mixture : kMixtures) {
    right = check_steps("one layer", rows, 1, lengths, 1, 1.5e-2, &mixture) && right;
    right = check_steps("four layers", rows, 4, lengths, is_short ? 2 : 4, 3e-2, &mixture) && right;
  }
  if (is_short) return right;
  for (const size_t i : {0, 2})
    right = check_steps("all layers", rows, 24, lengths, 3, 0.1, &kMixtures[i]) && right;
  return right;
}

double time_us(const DecodeStepModel& m, const DecodeStepRows& rows, const Exchange& exchange,
               int steps, const DecodeStepChanges* changes = nullptr) {
  exchange.clear();
  cudaEvent_t from, to;
  check(cudaEventCreate(&from));
  check(cudaEventCreate(&to));
  const auto launch = [&] { ops::cuda::decode_step(m, rows, exchange.words, nullptr, changes); };
  for (int i = 0; i < 5; ++i) launch();
  float best = 1e9f;
  for (int again = 0; again < 3; ++again) {
    check(cudaEventRecord(from));
    for (int i = 0; i < steps; ++i) launch();
    check(cudaEventRecord(to));
    check(cudaEventSynchronize(to));
    float ms;
    check(cudaEventElapsedTime(&ms, from, to));
    best = std::min(best, ms / static_cast<float>(steps) * 1000);
  }
  return static_cast<double>(best);
}

void time_steps(int steps) {
  const CacheSizes sizes{16, 8 * 140};
  const int vocabulary = 248320;
  const DecodeStepModel m = make_model(24, vocabulary, sizes);
  const Exchange exchange;
  const auto only = [&](bool attention, int times) {
    DecodeStepModel some = m;
    some.layers = 0;
    for (int i = 0; i < times; ++i) {
      for (int l = 0; l < 24; ++l) {
        if (m.layer[l].is_attention == attention) some.layer[some.layers++] = m.layer[l];
      }
    }
    return some;
  };
  for (const int rows : {1, 2, 4, 8}) {
    for (const int64_t length : {128, 4000}) {
      const Sequences s(rows, std::vector<int64_t>(static_cast<size_t>(rows), length), sizes,
                        vocabulary, 4200);
      const double all = time_us(m, s.step(), exchange, steps);
      std::printf("%d rows, %d tokens: %.1f us a step", rows, static_cast<int>(length), all);
      for (const size_t i : {0, 1, 2}) {
        if (i == 2 && rows == 1) continue;
        const Adapters adapters(m, rows, kMixtures[i]);
        const double changed = time_us(m, s.step(), exchange, steps, &adapters.changes);
        std::printf(", %s %.1f (%.2f)", kMixtures[i].name, changed, all / changed);
      }
      std::printf("\n");
      std::fflush(stdout);
      if (rows == 2 || rows == 4) continue;
      const DecodeStepModel six = only(true, 1), twelve = only(true, 2), delta = only(false, 1);
      const double a = time_us(six, s.step(), exchange, steps),
                   b = time_us(twelve, s.step(), exchange, steps),
                   c = time_us(delta, s.step(), exchange, steps), attention = (b - a) / 6;
      std::printf("  %.2f a layer with attention, %.2f with the delta rule, %.1f the rest\n",
                  attention, (c - (a - 6 * attention)) / 18, a - 6 * attention);
      std::fflush(stdout);
    }
  }
}

/// Times steps with changes of some matrices alone.
void time_parts(int steps) {
  const CacheSizes sizes{16, 8 * 140};
  const int vocabulary = 248320;
  const DecodeStepModel m = make_model(24, vocabulary, sizes);
  const Exchange exchange;
  const std::pair<const char*, unsigned> parts[] = {{"none", 0},           {"all", 0xff},
                                                    {"inputs", 0x0f},      {"output", 0x10},
                                                    {"gate and up", 0x60}, {"down", 0x80}};
  for (const int rows : {1, 8}) {
    const Sequences s(rows, std::vector<int64_t>(static_cast<size_t>(rows), 128), sizes, vocabulary,
                      4200);
    std::printf("%d rows: %.1f us a step", rows, time_us(m, s.step(), exchange, steps));
    for (const auto& [name, matrices] : parts) {
      const Adapters adapters(m, rows, {name, {0}, {16}, matrices});
      std::printf(", %s %.1f", name, time_us(m, s.step(), exchange, steps, &adapters.changes));
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

int run(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "check";
  const int number = count > 2 ? std::atoi(arguments[2]) : 0;
  if (what == "time") {
    time_steps(number ? number : 50);
    return 0;
  }
  if (what == "parts") {
    time_parts(number ? number : 50);
    return 0;
  }
  if (what == "short")
    return check_adapters(number, true) &&
                   check_steps("four layers", number, 4,
                               std::vector<int64_t>(static_cast<size_t>(number), 40), 2, 3e-2)
               ? 0
               : 1;
  if (what == "one")
    return check_steps("four layers", number, 4,
                       std::vector<int64_t>(static_cast<size_t>(number), 40), 1, 3e-2,
                       &kMixtures[0])
               ? 0
               : 1;
  bool right = true;
  for (const int rows : {1, 2, 4, 8}) {
    if (number != 0 && number != rows) continue;
    right = (what == "adapters" ? check_adapters(rows, false) : check_rows(rows)) && right;
  }
  return right ? 0 : 1;
}

}  // namespace
}  // namespace heddle::bench_cuda

int main(int count, char** arguments) {
  try {
    return heddle::bench_cuda::run(count, arguments);
  } catch (const std::exception& e) {
    std::printf("failed: %s\n", e.what());
    return 1;
  }
}
