#include "comm/device_watch.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <future>
#include <list>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "comm/world.h"

namespace heddle::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kInterval{500};
/// Longest wait for an abort.
constexpr std::chrono::seconds kLongestAbort{10};

struct Watched {
  std::string operation;
  std::vector<std::int64_t> ranks;
  Backend backend;
  c10::intrusive_ptr<c10d::Work> work;
};

/// Whether it has ended well. Throws what it ended with.
bool has_ended(c10d::Work& work) {
  if (!work.isCompleted()) return false;
  if (const std::exception_ptr error = work.exception()) std::rethrow_exception(error);
  return true;
}

}  // namespace

class DeviceWatch::Thread {
 public:
  explicit Thread(World& world)
      : world_(world), thread_([this](const std::stop_token& stop) { run(stop); }) {}

  void add(Watched watched) {
    const std::scoped_lock lock(mutex_);
    if (pending_.empty()) progress_ = Clock::now();
    pending_.push_back(std::move(watched));
  }

  void know(Backend backend) {
    const std::scoped_lock lock(mutex_);
    backends_.push_back(std::move(backend));
  }

  void forget(const Backend& backend) {
    const std::scoped_lock lock(mutex_);
    std::erase(backends_, backend);
    pending_.remove_if([&](const Watched& w) { return w.backend == backend; });
  }

  void check() const {
    if (!has_failed_) return;
    const std::scoped_lock lock(mutex_);
    throw_error<CommError>("{}", failure_);
  }

  void give_up(const std::string& why) {
    std::vector<std::future<void>> aborts;
    {
      const std::scoped_lock lock(mutex_);
      if (backends_.empty()) return;
      if (!has_failed_) failure_ = why;
      has_failed_ = true;
      world_.set_broken();
      aborts = abort_all();
    }
    const auto deadline = Clock::now() + kLongestAbort;
    for (const std::future<void>& abort : aborts) abort.wait_until(deadline);
  }

 private:
  void run(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, stop, kInterval, [&] { return stop.stop_requested(); })) {
      std::optional<std::string> cause = remove_ended();
      if (pending_.empty()) continue;
      const Watched oldest = pending_.front();
      const Seconds waited = Clock::now() - progress_;
      // The store is asked, and ranks are given time to show a sign of life, with the lock open.
      lock.unlock();
      if (!cause) cause = cause_to_give_up(oldest, waited);
      lock.lock();
      if (!cause) continue;
      failure_ = fmt::format("{} on rank {} gave up after {:.1f} s: {}", oldest.operation,
                             world_.rank(), waited.count(), *cause);
      has_failed_ = true;
      world_.set_broken();
      abort_all();
      return;
    }
  }

  /// The error of one that has ended with an error; it stays the oldest.
  std::optional<std::string> remove_ended() {
    try {
      for (auto it = pending_.begin(); it != pending_.end();) {
        if (has_ended(*it->work)) {
          it = pending_.erase(it);
          progress_ = Clock::now();
        } else {
          ++it;
        }
      }
    } catch (const std::exception& error) {
      const std::string text = error.what();
      return text.substr(0, text.find('\n'));
    }
    return std::nullopt;
  }

  std::optional<std::string> cause_to_give_up(const Watched& oldest, Seconds waited) const {
    try {
      if (auto failure = world_.failure_of_another()) return failure;
    } catch (const CommError& error) {
      return error.what();
    }
    if (waited <= world_.timeout()) return std::nullopt;
    return world_.diagnose(oldest.ranks);
  }

  /// On threads of their own, as an abort may itself wait for a rank that is gone.
  std::vector<std::future<void>> abort_all() {
    std::vector<std::future<void>> aborts;
    for (const Backend& backend : backends_) {
      std::packaged_task<void()> abort([backend] {
        try {
          backend->abort();
        } catch (const std::exception&) {
          // The failure that is being reported is the one to name.
        }
      });
      aborts.push_back(abort.get_future());
      std::thread(std::move(abort)).detach();
    }
    return aborts;
  }

  World& world_;
  mutable std::mutex mutex_;
  std::condition_variable_any wake_;
  std::vector<Backend> backends_;
  std::list<Watched> pending_;
  Clock::time_point progress_ =
      Clock::now();  ///< When a collective last ended, or the first began.
  std::string failure_;
  std::atomic<bool> has_failed_ = false;
  std::jthread thread_;  // last: it uses the others
};

DeviceWatch::DeviceWatch(World& world) : thread_(std::make_unique<Thread>(world)) {}
DeviceWatch::~DeviceWatch() = default;

void DeviceWatch::add(std::string operation, const std::vector<std::int64_t>& ranks,
                      Backend backend, c10::intrusive_ptr<c10d::Work> work) {
  thread_->add({std::move(operation), ranks, std::move(backend), std::move(work)});
}
void DeviceWatch::know(Backend backend) { thread_->know(std::move(backend)); }
void DeviceWatch::forget(const Backend& backend) { thread_->forget(backend); }
void DeviceWatch::check() const { thread_->check(); }
void DeviceWatch::give_up(const std::string& why) { thread_->give_up(why); }

}  // namespace heddle::comm
