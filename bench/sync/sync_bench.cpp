// Time of a publication of weights from one device to another, from the first call until the
// receiver has checked and written all of them:
//
//     heddle_sync_bench PRESET DEVICE [BUCKET_MIB] [REPEATS]
//
// DEVICE cuda: cuda:0 publishes to cuda:1. cpu: by Gloo between two threads. Beside it the same
// tensors one by one: queued one after the other without a check, and each acknowledged before the
// next, as interfaces do that update one named parameter a call.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ops/zeros.h>

#include "assembly/model_on_ranks.h"
#include "device/device.h"
#include "models/registry.h"
#include "sync/invitation.h"
#include "sync/weight_sync.h"

using namespace heddle;
using Clock = std::chrono::steady_clock;

namespace {

struct Settings {
  std::string preset;
  c10::Device sender = c10::kCPU, receiver = c10::kCPU;
  std::int64_t bucket_bytes = 0;
  int repeats = 0;
};

std::vector<sync::Part> parts_of(const assembly::ModelOnRanks& placed) {
  return sync::received_parts([&](const std::function<void(nn::Parameter&)>& use) {
    placed.model->visit_parameters(use);
  });
}

assembly::ModelOnRanks model_on(const Settings& settings, c10::Device device,
                                assembly::Purpose purpose, std::uint64_t seed) {
  device::start(device);
  runtime::Context context;
  context.device = device;
  context.dtype = device.is_cpu() ? at::kFloat : at::kBFloat16;
  context.seed = seed;
  assembly::ModelRecipe recipe;
  recipe.config = models::preset(settings.preset);
  recipe.purpose = purpose;
  recipe.weights = assembly::Weights::kRandomOnDevice;
  return assembly::place(recipe, context);
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
      at::Tensor tensor = box.tensor.is_contiguous() ? box.tensor : box.tensor.contiguous();
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

void print(const char* what, std::vector<double> seconds, std::int64_t bytes) {
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  fmt::print("{:34} {:8.4f} s median, {:8.4f} s least, {:7.1f} GB/s\n", what, median, seconds[0],
             static_cast<double>(bytes) / median / 1e9);
  std::fflush(stdout);
}

void send(const Settings& settings, comm::StandaloneMeeting meeting, std::uint64_t& hash) {
  const auto placed = model_on(settings, settings.sender, assembly::Purpose::kTrain, 1);
  const auto parts = parts_of(placed);
  sync::Publisher publisher(comm::Group("trainers"), parts,
                            {settings.bucket_bytes, false, settings.sender});
  auto channel = sync::make_channel(meeting.wait());
  sync::Channel& wire = *channel;
  publisher.connect(std::move(channel), 0);
  const std::int64_t before = device::memory(settings.sender).used_bytes;
  std::vector<double> seconds;
  for (int k = 0; k < settings.repeats + 2; ++k) {
    const sync::SyncReport report = publisher.publish(k + 1);
    if (report.damaged != 0) throw std::runtime_error("a bucket arrived damaged");
    if (k >= 2) seconds.push_back(report.seconds);
    hash = report.weights_hash;
  }
  const std::int64_t bytes = publisher.manifest().bytes();
  fmt::print("{}: {} tensors, {:.3f} GB in {} buckets of at most {:.0f} MiB; {:.2f} GB of memory "
             "beside the weights\n",
             settings.preset, parts.size(), static_cast<double>(bytes) / 1e9,
             publisher.manifest().buckets().size(),
             static_cast<double>(publisher.manifest().largest_bucket()) / (1 << 20),
             static_cast<double>(device::memory(settings.sender).peak_bytes - before) / 1e9);
  print("buckets, checked on both sides", seconds, bytes);
  for (const bool acknowledges : {false, true}) {
    std::vector<double> singly;
    for (int k = 0; k < settings.repeats; ++k)
      singly.push_back(one_by_one(wire, parts, settings.sender, acknowledges));
    print(acknowledges ? "one by one, each acknowledged" : "one by one, queued, unchecked", singly,
          bytes);
  }
}

void receive(const Settings& settings, comm::StandaloneMeeting meeting, std::uint64_t& hash) {
  const auto placed = model_on(settings, settings.receiver, assembly::Purpose::kGenerate, 2);
  const auto parts = parts_of(placed);
  sync::Subscriber subscriber(parts, {settings.bucket_bytes, false, settings.receiver});
  auto channel = sync::make_channel(meeting.wait());
  sync::Channel& wire = *channel;
  subscriber.connect(std::move(channel), 0);
  for (int k = 0; k < settings.repeats + 2; ++k) subscriber.receive();
  // Of what lies in the engine's memory now.
  hash = sync::Publisher(comm::Group("rollout"), parts,
                         {settings.bucket_bytes, false, settings.receiver})
             .weights_hash();
  for (const bool acknowledges : {false, true}) {
    for (int k = 0; k < settings.repeats; ++k)
      one_by_one(wire, parts, settings.receiver, acknowledges);
  }
}

}  // namespace

int main(int count, char** words) try {
  if (count < 3) {
    fmt::print(stderr, "usage: {} PRESET cuda|cpu [BUCKET_MIB] [REPEATS]\n", words[0]);
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
  comm::Listener listener(std::uint16_t{0});
  const sync::Invitation invitation{listener.local_endpoint(), "bench", 0, 2};
  const comm::Seconds timeout(60);
  std::uint64_t sent = 0, received = 1;
  std::exception_ptr failure;
  std::thread receiver([&, meeting = comm::StandaloneMeeting::start(
                               invitation.options(1, timeout))]() mutable {
    try {
      receive(settings, std::move(meeting), received);
    } catch (...) {
      failure = std::current_exception();
    }
  });
  try {
    send(settings, comm::StandaloneMeeting::start(invitation.options(0, timeout), std::move(listener)),
         sent);
  } catch (...) {
    receiver.detach();
    throw;
  }
  receiver.join();
  if (failure) std::rethrow_exception(failure);
  if (sent != received) throw std::runtime_error("the receiver's weights are not the sender's");
  fmt::print("the receiver's weights are the sender's: {:016x}\n", sent);
  return 0;
} catch (const std::exception& error) {
  fmt::print(stderr, "error: {}\n", error.what());
  return 1;
}
