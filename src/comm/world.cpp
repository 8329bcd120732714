#include "comm/world.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "base/text.h"
#include "comm/device_watch.h"
#include "comm/look.h"
#include "comm/part_loss.h"

namespace heddle::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr Seconds kPulseInterval{0.5};
// A rank is called silent when its pulse is the same in so many looks in a row. Looks are counted
// and not the time: where the host stood still, nobody's pulse has gone on.
constexpr int kDiagnosisLooks = 14;
constexpr Seconds kBetweenLooks{0.25};

constexpr const char* kPulse = "pulse/";
std::string pulse_key(std::int64_t rank) { return kPulse + std::to_string(rank); }
std::string arrival_key(std::int64_t rank) { return fmt::format("arrived/{}", rank); }

Store store_of(const JobPart& part, const Store& job) {
  return part.name.empty() ? job : job.below(part.name);
}

/// Why the ranks of a part must not wait for each other any more.
std::optional<std::string> loss_of(const JobPart& part, const Store& store) {
  if (part.name.empty()) return std::nullopt;
  return store.find(kPartLossKey);
}

}  // namespace

std::string pulse_key(const std::string& part, std::int64_t rank) {
  return (part.empty() ? "" : part + "/") + pulse_key(rank);
}

std::string local_address(const Endpoint& peer) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(peer.address().c_str(), std::to_string(peer.port).c_str(), &hints, &found) != 0)
    return "127.0.0.1";
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, &freeaddrinfo);
  // Connecting a datagram socket sends nothing; it only asks for the route.
  const int descriptor = ::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  char text[NI_MAXHOST] = "127.0.0.1";
  if (descriptor >= 0 && ::connect(descriptor, found->ai_addr, found->ai_addrlen) == 0 &&
      ::getsockname(descriptor, reinterpret_cast<sockaddr*>(&own), &length) == 0) {
    getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text, sizeof text, nullptr, 0,
                NI_NUMERICHOST);
  }
  if (descriptor >= 0) ::close(descriptor);
  return text;
}

/// A thread that tells the store twice a second that this rank runs, and what it does.
class World::Pulse {
 public:
  Pulse(Store store, std::int64_t rank) : store_(std::move(store)), key_(pulse_key(rank)) {
    beat();
    thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  }

  void set_activity(const std::string& activity) {
    const std::scoped_lock lock(mutex_);
    activity_ = activity;
  }

  /// From here on nobody asks the store: each question would wait until the deadline.
  void lose(const std::string& reason) {
    const std::scoped_lock lock(mutex_);
    if (loss_.empty()) {
      loss_ =
          fmt::format("the job's store is lost, its process has ended or is frozen: {}", reason);
    }
  }
  /// Why the store can no longer be asked; "" as long as it answers.
  std::string loss() const {
    const std::scoped_lock lock(mutex_);
    return loss_;
  }

 private:
  void beat() {
    std::string text;
    {
      const std::scoped_lock lock(mutex_);
      text = fmt::format("{} {}", ++count_, activity_.empty() ? "computing" : activity_);
    }
    store_.set(key_, text);
  }

  void run(const std::stop_token& stop) {
    std::mutex mutex;
    std::unique_lock lock(mutex);
    std::condition_variable_any wake;
    while (!wake.wait_for(lock, stop, kPulseInterval, [&] { return stop.stop_requested(); })) {
      try {
        beat();
      } catch (const std::exception& error) {
        // The next collective says so, also where it would end well without the store: a job that
        // nobody watches any more must not go on.
        lose(error.what());
        return;
      }
    }
  }

  Store store_;
  std::string key_;
  mutable std::mutex mutex_;
  std::string activity_ = "starting", loss_;
  std::int64_t count_ = 0;
  std::jthread thread_;  // last: it uses the others
};

World::World(LaunchEnvironment environment, JobPart part, Store job_store, Seconds timeout)
    : environment_(std::move(environment)),
      part_(std::move(part)),
      timeout_(timeout),
      job_store_(std::move(job_store)),
      store_(store_of(part_, job_store_)),
      address_(environment_.local_world == environment_.world
                   ? "127.0.0.1"
                   : local_address(environment_.master)) {}

World::~World() { device_groups_.clear(); }

Store open_job_store(const LaunchEnvironment& environment, Seconds timeout) {
  if (environment.has_agent_store)
    return Store::connect_unguarded(environment.master, timeout).below(kStorePrefix);
  Endpoint place = environment.master;
  // `heddle launch` says where it listens; a scheduler names the host alone.
  const bool is_one_host = environment.local_world == environment.world;
  if (is_one_host && environment.launcher != kHeddleLaunch && place.kind == Endpoint::Kind::kName)
    place = make_endpoint("127.0.0.1", place.port, "loopback");
  if (!environment.serves_store)
    return Store::connect(place, timeout, environment.secret).below(kStorePrefix);
  Endpoint everywhere;
  everywhere.port = place.port;
  return Store::serve(Listener(is_one_host ? place : everywhere), timeout, environment.secret)
      .below(kStorePrefix);
}

void count_out(const Store& job_store, const LaunchEnvironment& environment, std::int64_t ranks) {
  // A rank counts once, whoever speaks for it.
  std::int64_t left = 0;
  for (std::int64_t rank = environment.rank; rank < environment.rank + ranks; ++rank) {
    if (job_store.add(fmt::format("left/{}", rank), 1) == 1) left = job_store.add("left", 1);
  }
  if (left >= environment.world) job_store.set(kEmptyKey, "1");
  if (environment.serves_store) job_store.wait(kEmptyKey, kLeaving);
}

std::shared_ptr<World> World::join(const LaunchEnvironment& environment, Seconds timeout,
                                   const JobPart& part) {
  return meet(environment, part, open_job_store(environment, timeout), timeout);
}

std::shared_ptr<World> World::serve(const LaunchEnvironment& environment, Listener listener,
                                    Seconds timeout) {
  return meet(environment, {},
              Store::serve(std::move(listener), timeout, environment.secret).below(kStorePrefix),
              timeout);
}

std::shared_ptr<World> World::meet(const LaunchEnvironment& environment, const JobPart& part,
                                   const Store& job_store, Seconds timeout) {
  if (environment.announces_job) job_store.set(kJobKey, environment.nonce);
  const JobPart whole{"", 0, environment.world};
  std::shared_ptr<World> world(
      new World(environment, part.name.empty() ? whole : part, job_store, timeout));
  world->arrive();
  world->pulse_ = std::make_unique<Pulse>(world->store_.reconnected(), world->rank());
  world->device_watch_ = std::make_unique<DeviceWatch>(*world);
  return world;
}

void World::arrive() {
  const std::string where = store_.endpoint().to_string();
  const auto job = job_store_.wait(kJobKey, timeout_);
  if (!job) {
    throw_error<CommError>("rendezvous at {}: rank {} waited {:.3g} s for rank 0 to open job '{}'",
                           where, rank(), timeout_.count(), environment_.nonce);
  }
  if (*job != environment_.nonce) {
    // A stranger must not end the job that it came upon.
    throw_error<CommError>(
        "rendezvous at {}: it belongs to another job ('{}'), rank {} is of job '{}'; is this a "
        "process of an earlier run, do two jobs use one port, or does --job-id differ between the "
        "hosts?",
        where, *job, rank(), environment_.nonce);
  }
  // A rank that is refused leaves its reason: the others would wait for it until the deadline.
  const auto refuse = [&](const std::string& reason) {
    const std::string message = fmt::format("rendezvous at {}: {}", where, reason);
    fail(message);
    throw CommError(message);
  };
  const std::string size_text = store_.set_if_absent("size", std::to_string(size()));
  if (size_text != std::to_string(size())) {
    refuse(
        fmt::format("rank {} was told of {} ranks, another one of {}", rank(), size(), size_text));
  }
  // A process that comes after all have met is a late duplicate, and none of the job's business.
  if (store_.find("complete")) {
    throw_error<CommError>(
        "rendezvous at {}: all {} ranks of job '{}' have met already; this process, rank {}, is of "
        "another start",
        where, size(), environment_.nonce, rank());
  }
  if (store_.add(arrival_key(rank()), 1) != 1) {
    refuse(fmt::format(
        "two processes say that they are rank {} of {}; is one of them of an earlier start?",
        rank(), size()));
  }
  if (store_.add("arrived", 1) == size()) store_.set("complete", "1");
  const auto deadline = Clock::now() + timeout_;
  while (!store_.wait("complete", kLookForFailures)) {
    if (const auto failure = job_store_.find(kFailureKey)) {
      count_out();
      const auto space = failure->find(' ');
      throw_error<CommError>("rank {} failed: {}", failure->substr(0, space),
                             failure->substr(space + 1));
    }
    if (const auto loss = loss_of(part_, store_)) throw CommError(*loss);
    if (Clock::now() < deadline) continue;
    throw_error<CommError>("rendezvous at {}: rank {} waited {:.3g} s (parallel.timeout_s) for {}",
                           where, rank(), timeout_.count(), missing_ranks());
  }
}

std::string World::missing_ranks() const {
  std::vector<std::string> missing;
  for (std::int64_t r = 0; r < size(); ++r) {
    if (!store_.find(arrival_key(r))) missing.push_back(fmt::format("rank {}", r));
  }
  return fmt::format("{} of {} ranks that did not arrive: {}", missing.size(), size(),
                     text::list_some(missing, 16));
}

void World::fail(const std::string& message) noexcept {
  has_failed_ = true;
  if (pulse_ && !pulse_->loss().empty()) return;
  try {
    job_store_.set_if_absent(kFailureKey, fmt::format("{} {}", environment_.rank,
                                                      message.substr(0, message.find('\n'))));
  } catch (const std::exception&) {
    // Without a store there is nobody left to tell.
  }
  count_out();
}

void World::count_out() noexcept {
  if (is_counted_out_.exchange(true)) return;
  try {
    comm::count_out(job_store_, environment_);
  } catch (const std::exception&) {
    // The others are gone already.
  }
}

std::optional<std::string> World::failure_of_another() const {
  if (const std::string loss = pulse_->loss(); !loss.empty()) throw CommError(loss);
  std::optional<std::string> found;
  try {
    found = job_store_.find(kFailureKey);
  } catch (const CommError& error) {
    pulse_->lose(error.what());
    throw;
  }
  if (!found) return loss_of(part_, store_);
  const auto space = found->find(' ');
  const std::string who = found->substr(0, space);
  if (who == std::to_string(environment_.rank)) return std::nullopt;
  return fmt::format("rank {} failed: {}", who, found->substr(space + 1));
}

void World::leave() noexcept {
  if (!pulse_->loss().empty()) return;
  try {
    set_activity("leaving");
    device_groups_.clear();
  } catch (const std::exception&) {
    // The others are gone already.
  }
  count_out();
}

void World::set_activity(const std::string& activity) {
  pulse_->set_activity(activity);
  if (activity.empty()) return;
  if (const std::string loss = pulse_->loss(); !loss.empty()) throw CommError(loss);
}

std::string World::diagnose(const std::vector<std::int64_t>& ranks) const {
  std::vector<std::string> silent, busy;
  if (const std::string loss = pulse_->loss(); !loss.empty()) return loss;
  try {
    const Store store = store_.reconnected();
    const auto pulse_of = [&](std::int64_t r) { return store.find(pulse_key(r)).value_or(""); };
    std::map<std::int64_t, std::string> quiet;
    for (const std::int64_t r : ranks) {
      if (r != rank()) quiet[r] = pulse_of(r);
    }
    for (int look = 0; look < kDiagnosisLooks && !quiet.empty(); ++look) {
      std::this_thread::sleep_for(kBetweenLooks);
      if (const auto failure = failure_of_another()) return *failure;
      std::erase_if(quiet,
                    [&](const auto& before) { return pulse_of(before.first) != before.second; });
    }
    for (const std::int64_t r : ranks) {
      if (r == rank()) continue;
      const std::string pulse = pulse_of(r);
      const std::string activity = pulse.substr(std::min(pulse.size(), pulse.find(' ') + 1));
      if (quiet.contains(r)) {
        silent.push_back(fmt::format("rank {} (last seen {})", r,
                                     activity.empty() ? "before it arrived" : activity));
      } else {
        busy.push_back(fmt::format("rank {} is {}", r, activity));
      }
    }
  } catch (const std::exception& error) {
    return fmt::format("the store cannot be asked who is missing: {}", error.what());
  }
  if (!silent.empty()) {
    return fmt::format("no sign of life from {}", text::list_some(silent, 8));
  }
  return fmt::format("all ranks run: {}", text::list_some(busy, 8));
}

}  // namespace heddle::comm
