// Time of a publication of weights from one device to another, from the first call until the
// receiver has checked and written all of them:
//
//     heddle_sync_bench SHAPE DEVICE [BUCKET_MIB] [REPEATS] [TRAINED]
//
// SHAPE: qwen3.5-0.8b, qwen3.5-4b or tiny, published in bf16. DEVICE cuda: cuda:0 publishes to
// cuda:1. cpu: by Gloo between two threads. TRAINED float32: the sender's memory. Beside it the
// same tensors one by one: queued one after the other without a check, and each acknowledged before
// the next, as interfaces do that update one named parameter a call.
// Each publication has other weights: one tensor is drawn anew before it. Both sides tell how much
// memory they took beside the weights, and how much they hold after the first and the last one;
// with many REPEATS the times of the first and the last quarter tell whether the rate stays.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "device/device.h"
#include "sync/invitation.h"
#include "sync/weight_sync.h"

using namespace heddle;
using Clock = std::chrono::steady_clock;

namespace {

struct Settings {
  std::string preset;
  c10::ScalarType published = at::kBFloat16;
  c10::ScalarType trained = at::kBFloat16;  ///< Dtype of the sender's memory.
  c10::Device sender = c10::kCPU, receiver = c10::kCPU;
  std::int64_t bucket_bytes = 0;
  int repeats = 0;
};

/// Names and shapes of the weights of a Qwen3.5; with experts `intermediate` is the width of each.
struct Shape {
  const char* name;
  std::int64_t hidden, layers, key_heads, value_heads, attention_heads, kv_heads, intermediate;
  std::int64_t experts = 0;
  bool is_tied = true;
};
constexpr Shape kShapes[] = {{"qwen3.5-0.8b", 1024, 24, 16, 16, 8, 2, 3584},
                             {"qwen3.5-4b", 2560, 32, 16, 32, 16, 4, 9216},
                             {"qwen3.5-9b", 4096, 32, 16, 32, 16, 4, 12288, 0, false},
                             {"qwen3.5-35b-a3b", 2048, 40, 16, 32, 16, 2, 512, 256, false},
                             {"tiny", 64, 4, 2, 4, 2, 1, 160}};

std::vector<sync::TensorInfo> tensors_of(const std::string& name, c10::ScalarType dtype) {
  const auto* const shape = std::find_if(std::begin(kShapes), std::end(kShapes),
                                         [&](const Shape& known) { return name == known.name; });
  if (shape == std::end(kShapes)) throw std::runtime_error("no shape is named " + name);
  const Shape& s = *shape;
  constexpr std::int64_t kHeadDim = 256, kLinearDim = 128;
  const std::int64_t keys = s.key_heads * kLinearDim, values = s.value_heads * kLinearDim;
  std::vector<sync::TensorInfo> all;
  const auto add = [&](const std::string& tensor, std::vector<std::int64_t> sizes) {
    all.push_back({tensor, std::move(sizes), dtype});
  };
  const std::int64_t vocabulary = name == "tiny" ? 4096 : 248320;
  add("embed_tokens", {vocabulary, s.hidden});
  if (!s.is_tied) add("lm_head", {vocabulary, s.hidden});
  add("norm", {s.hidden});
  for (std::int64_t k = 0; k < s.layers; ++k) {
    const std::string layer = fmt::format("layers.{}.", k);
    add(layer + "input_layernorm", {s.hidden});
    add(layer + "post_attention_layernorm", {s.hidden});
    if (s.experts > 0) {
      add(layer + "mlp.gate", {s.experts, s.hidden});
      add(layer + "mlp.experts.gate_up_proj", {s.experts, 2 * s.intermediate, s.hidden});
      add(layer + "mlp.experts.down_proj", {s.experts, s.hidden, s.intermediate});
      add(layer + "mlp.shared_expert_gate", {1, s.hidden});
    }
    const std::string mlp = layer + (s.experts > 0 ? "mlp.shared_expert." : "mlp.");
    add(mlp + "gate_proj", {s.intermediate, s.hidden});
    add(mlp + "up_proj", {s.intermediate, s.hidden});
    add(mlp + "down_proj", {s.hidden, s.intermediate});
    if (k % 4 == 3) {
      add(layer + "self_attn.q_proj", {2 * s.attention_heads * kHeadDim, s.hidden});
      add(layer + "self_attn.k_proj", {s.kv_heads * kHeadDim, s.hidden});
      add(layer + "self_attn.v_proj", {s.kv_heads * kHeadDim, s.hidden});
      add(layer + "self_attn.o_proj", {s.hidden, s.attention_heads * kHeadDim});
      add(layer + "self_attn.q_norm", {kHeadDim});
      add(layer + "self_attn.k_norm", {kHeadDim});
    } else {
      add(layer + "linear_attn.in_proj_qkv", {2 * keys + values, s.hidden});
      add(layer + "linear_attn.in_proj_z", {values, s.hidden});
      add(layer + "linear_attn.in_proj_b", {s.value_heads, s.hidden});
      add(layer + "linear_attn.in_proj_a", {s.value_heads, s.hidden});
      add(layer + "linear_attn.conv1d", {2 * keys + values, 1, 4});
      add(layer + "linear_attn.A_log", {s.value_heads});
      add(layer + "linear_attn.dt_bias", {s.value_heads});
      add(layer + "linear_attn.norm", {kLinearDim});
      add(layer + "linear_attn.out_proj", {s.hidden, values});
    }
  }
  return all;
}

/// Tensors on a device whose elements follow from `seed`; `dtype`: of the memory.
std::vector<sync::Part> parts_on(const Settings& settings, c10::Device device,
                                 c10::ScalarType dtype, double seed) {
  device::start(device);
  std::vector<sync::Part> parts;
  for (sync::TensorInfo& info : tensors_of(settings.preset, settings.published)) {
    const at::Tensor tensor = at::empty(info.shape, at::TensorOptions(device).dtype(dtype));
    at::Tensor(tensor).normal_(seed, 0.02);
    nn::Box box{whole_region(info.shape), tensor};
    parts.push_back({std::move(info), {std::move(box)}});
  }
  return parts;
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void acknowledge(sync::Channel& channel) {
  at::Tensor one = at::zeros({1}, at::kLong);
  channel.sum(one);
}

/// Both ends run it; returns the seconds.
double one_by_one(sync::Channel& channel, const std::vector<sync::Part>& parts, c10::Device device,
                  bool acknowledges) {
  acknowledge(channel);
  const auto begin = Clock::now();
  for (const sync::Part& part : parts) {
    for (const nn::Box& box : part.boxes) {
      at::Tensor tensor = box.tensor.to(part.info.dtype);
      channel.start_broadcast(tensor, 0).wait();
      if (!acknowledges) continue;
      device::synchronize(device);
      acknowledge(channel);
    }
  }
  device::synchronize(device);
  acknowledge(channel);
  return seconds_since(begin);
}

double median_of(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

/// Bytes that tensors of one side have on its device.
class MemoryOfSide {
 public:
  explicit MemoryOfSide(c10::Device device)
      : device_(device), before_(device::memory(device).used_bytes) {}
  void published() {
    after_last_ = device::memory(device_).used_bytes;
    if (after_first_ == 0) after_first_ = after_last_;
  }
  void print(const char* side) const {
    const auto mib = [&](std::int64_t bytes) {
      return static_cast<double>(bytes - before_) / (1 << 20);
    };
    fmt::print(
        "{}: at most {:.1f} MiB beside the weights; {:.1f} after the first, {:.1f} after the "
        "last\n",
        side, mib(device::memory(device_).peak_bytes), mib(after_first_), mib(after_last_));
  }

 private:
  c10::Device device_;
  std::int64_t before_, after_first_ = 0, after_last_ = 0;
};

void print_quarters(const std::vector<double>& seconds) {
  const auto quarter = static_cast<std::ptrdiff_t>(seconds.size() / 4);
  if (quarter < 5) return;
  fmt::print("{:34} {:8.4f} s median of the first quarter, {:8.4f} s of the last, {:8.4f} s most\n",
             "", median_of({seconds.begin(), seconds.begin() + quarter}),
             median_of({seconds.end() - quarter, seconds.end()}),
             *std::max_element(seconds.begin(), seconds.end()));
}

void print(const char* what, std::vector<double> seconds, std::int64_t bytes) {
  std::sort(seconds.begin(), seconds.end());
  const double median = median_of(seconds);
  fmt::print("{:34} {:8.4f} s median, {:8.4f} s least, {:7.1f} GB/s\n", what, median, seconds[0],
             static_cast<double>(bytes) / median / 1e9);
  std::fflush(stdout);
}

/// Tensor by tensor is timed a few times only.
int singles_of(const Settings& settings) { return std::min(settings.repeats, 9); }

/// Hash of each published version.
using Hashes = std::vector<std::uint64_t>;

void send(const Settings& settings, comm::StandaloneMeeting meeting, Hashes& hashes) {
  const auto parts = parts_on(settings, settings.sender, settings.trained, 1);
  sync::Publisher publisher(comm::Group("trainers"), parts,
                            {settings.bucket_bytes, false, settings.sender});
  auto channel = sync::make_channel(meeting.wait());
  sync::Channel& wire = *channel;
  publisher.connect(std::move(channel), 0);
  MemoryOfSide memory(settings.sender);
  std::vector<double> seconds;
  for (int k = 0; k < settings.repeats + 2; ++k) {
    at::Tensor(parts[static_cast<std::size_t>(k) % parts.size()].boxes[0].tensor).normal_(1, 0.02);
    device::synchronize(settings.sender);
    const sync::SyncReport report = publisher.publish(k + 1);
    if (report.damaged != 0) throw std::runtime_error("a bucket arrived damaged");
    if (k >= 2) seconds.push_back(report.seconds);
    hashes.push_back(report.weights_hash);
    memory.published();
  }
  const std::int64_t bytes = publisher.manifest().bytes();
  fmt::print("{}: {} tensors, {:.3f} GB in {} buckets of at most {:.1f} MiB, {} publications\n",
             settings.preset, parts.size(), static_cast<double>(bytes) / 1e9,
             publisher.manifest().buckets().size(),
             static_cast<double>(publisher.manifest().largest_bucket()) / (1 << 20), hashes.size());
  memory.print("sender");
  print("buckets, checked on both sides", seconds, bytes);
  print_quarters(seconds);
  for (const bool acknowledges : {false, true}) {
    std::vector<double> singly;
    for (int k = 0; k < singles_of(settings); ++k)
      singly.push_back(one_by_one(wire, parts, settings.sender, acknowledges));
    print(acknowledges ? "one by one, each acknowledged" : "one by one, queued, unchecked", singly,
          bytes);
  }
}

void receive(const Settings& settings, comm::StandaloneMeeting meeting, Hashes& hashes) {
  const auto parts = parts_on(settings, settings.receiver, settings.published, 2);
  sync::Subscriber subscriber(parts, {settings.bucket_bytes, false, settings.receiver});
  auto channel = sync::make_channel(meeting.wait());
  sync::Channel& wire = *channel;
  subscriber.connect(std::move(channel), 0);
  MemoryOfSide memory(settings.receiver);
  for (int k = 0; k < settings.repeats + 2; ++k) {
    subscriber.receive();
    hashes.push_back(subscriber.weights_hash());
    memory.published();
  }
  if (settings.receiver != settings.sender) memory.print("receiver");
  // The engine's memory holds the last version now: its checksum takes the place of the received
  // one.
  hashes.back() = sync::Publisher(comm::Group("rollout"), parts,
                                  {settings.bucket_bytes, false, settings.receiver})
                      .weights_hash();
  for (const bool acknowledges : {false, true}) {
    for (int k = 0; k < singles_of(settings); ++k)
      one_by_one(wire, parts, settings.receiver, acknowledges);
  }
}

}  // namespace

int main(int count, char** words) try {
  if (count < 3) {
    fmt::print(stderr, "usage: {} SHAPE cuda|cpu [BUCKET_MIB] [REPEATS] [float32]\n", words[0]);
    return 2;
  }
  Settings settings;
  settings.preset = words[1];
  if (std::string(words[2]) != "cpu") {
    settings.sender = device::parse(std::string(words[2]) + ":0");
    settings.receiver = device::parse(std::string(words[2]) + ":1");
  }
  settings.bucket_bytes = (count > 3 ? std::atoll(words[3]) : 256) << 20;
  settings.repeats = count > 4 ? std::atoi(words[4]) : 9;
  if (count > 5 && std::string(words[5]) == "float32") settings.trained = at::kFloat;
  comm::Listener listener(std::uint16_t{0});
  const sync::Invitation invitation{listener.local_endpoint(), "bench", 0, 2};
  const comm::Seconds timeout(60);
  Hashes sent, received;
  std::exception_ptr failure;
  std::thread receiver(
      [&, meeting = comm::StandaloneMeeting::start(invitation.options(1, timeout))]() mutable {
        try {
          receive(settings, std::move(meeting), received);
        } catch (...) {
          failure = std::current_exception();
        }
      });
  try {
    send(settings,
         comm::StandaloneMeeting::start(invitation.options(0, timeout), std::move(listener)), sent);
  } catch (...) {
    receiver.detach();
    throw;
  }
  receiver.join();
  if (failure) std::rethrow_exception(failure);
  if (sent != received) throw std::runtime_error("the receiver's weights are not the sender's");
  const std::set<std::uint64_t> different(sent.begin(), sent.end());
  fmt::print("the receiver's weights are the sender's in {} versions, {} of them different\n",
             sent.size(), different.size());
  return 0;
} catch (const std::exception& error) {
  fmt::print(stderr, "error: {}\n", error.what());
  return 1;
}
