#include "reward/worker_pool.h"

#include <poll.h>
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <future>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/errors.h"
#include "base/json.h"
#include "base/log.h"
#include "base/quote.h"
#include "base/text.h"
#include "reward/wire.h"
#include "reward/worker.h"

namespace heddle::reward {
namespace {

/// So many workers in a row that never answer, and none that ever did: it is the program.
constexpr int kMostSilent = 3;
/// Workers that end before their first answer may be more: that costs no time to find out.
constexpr int kMostStillborn = 8;
/// Workers have so long to end by themselves when the run does.
constexpr std::chrono::seconds kLeave{3};

}  // namespace

/// A thread that lives as long as the pool: the system ends a worker with the thread that started
/// it, and a write to a worker that has ended must not end the program.
class WorkerPool::OwnThread {
 public:
  OwnThread() : thread_([this] { work(); }) {}
  ~OwnThread() {
    run([this] { is_ended_ = true; });
    thread_.join();
  }
  OwnThread(const OwnThread&) = delete;
  OwnThread& operator=(const OwnThread&) = delete;

  /// Returns when the call has, and throws what it throws.
  void run(std::function<void()> call) {
    std::packaged_task<void()> task(std::move(call));
    auto done = task.get_future();
    {
      const std::lock_guard lock(mutex_);
      task_ = std::move(task);
    }
    wake_.notify_one();
    done.get();
  }

 private:
  void work() {
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
    while (!is_ended_) {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return task_.valid(); });
      auto task = std::move(task_);
      lock.unlock();
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::packaged_task<void()> task_;
  bool is_ended_ = false;  ///< For the thread alone.
  std::thread thread_;
};

/// Work of the pool's thread.
class WorkerPool::Loop {
 public:
  explicit Loop(const ProcessOptions& options) : options_(options), seats_(count(options)) {}

  std::vector<Answer> ask(const std::vector<Request>& requests) {
    try {
      return answers(requests);
    } catch (...) {
      // Workers may still be busy with requests that nobody waits for any more.
      if (options_.stop.stop_requested()) finish_all();
      for (Seat& seat : seats_) seat = {};
      throw;
    }
  }

  void close() {
    finish_all();
    seats_.clear();
  }
  std::size_t size() const { return seats_.size(); }

 private:
  struct Item {
    const Request* request;
    Answer answer;
    int tries;
  };
  struct Seat {
    std::unique_ptr<Worker> worker;
    bool has_answered = false;
    std::string id;  ///< Of the request that it works on; empty: none.
    std::size_t item = 0;
    std::int64_t process = -1;  ///< The worker's number.
    Clock::time_point deadline;
  };

  /// Workers that hold a sandbox or a browser can give it back.
  void finish_all() {
    const auto until = Clock::now() + kLeave;
    for (Seat& seat : seats_) {
      if (seat.worker) seat.worker->finish(std::max(Clock::duration(0), until - Clock::now()));
    }
  }

  std::vector<Answer> answers(const std::vector<Request>& requests) {
    items_.clear();
    for (const Request& request : requests) items_.push_back({&request, {}, 0});
    unanswered_ = items_.size();
    waiting_.clear();
    for (std::size_t k = 0; k < items_.size(); ++k) waiting_.push_back(k);
    while (unanswered_ > 0) {
      if (options_.stop.stop_requested()) throw_error<Error>("{}: given up", options_.key);
      hand_out();
      wait();
      for (std::size_t number = 0; number < seats_.size(); ++number) {
        serve(number);
        // Two workers may be late in one round: the first that makes it too many says so.
        require_sound();
      }
    }
    std::vector<Answer> found;
    for (Item& item : items_) found.push_back(std::move(item.answer));
    return found;
  }

  static std::size_t count(const ProcessOptions& options) {
    if (options.workers < 1 || options.timeout_s <= 0 || options.start_timeout_s < 0)
      throw_error<ConfigError>("rl.reward: expected at least one worker and a positive timeout");
    return static_cast<std::size_t>(options.workers);
  }

  static Clock::duration seconds(double count) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
  }

  void hand_out() {
    for (std::size_t number = 0; number < seats_.size(); ++number) {
      Seat& seat = seats_[number];
      if (!seat.id.empty()) continue;
      const auto next = std::find_if(waiting_.begin(), waiting_.end(), [&](std::size_t item) {
        return items_[item].request->worker.value_or(number) == number;
      });
      if (next == waiting_.end()) continue;
      seat.item = *next;
      waiting_.erase(next);
      if (seat.worker) end_if_unfit(seat);
      const std::int64_t process = items_[seat.item].request->process;
      if (process >= 0 && (!seat.worker || process != seat.process)) {
        finish(seat.item, {.error = "the worker that had its episode has ended",
                           .process = process,
                           .was_unasked = true});
        continue;
      }
      if (!seat.worker) {
        seat.worker = std::make_unique<Worker>(options_, options_.first_worker + number);
        seat.has_answered = false;
        seat.process = ++last_process_;
      }
      seat.id = std::to_string(++last_id_);
      Json body = {{"id", seat.id}};
      body.update(items_[seat.item].request->body);
      seat.worker->send(wire_text(body));
      seat.deadline = Clock::now() + seconds(limit_of(seat));
      ++items_[seat.item].tries;
    }
  }

  /// Ends a worker that nobody asks and that has ended or has written something.
  void end_if_unfit(Seat& seat) {
    const std::vector<std::string> lines = seat.worker->pump();
    if (!lines.empty()) {
      fail(seat, wrote(seat, lines.front()));
    } else if (seat.worker->is_gone()) {
      fail(seat, seat.worker->end_gone());
    }
  }

  static std::string wrote(const Seat& seat, const std::string& line, const std::string& why = "") {
    return fmt::format("wrote '{}', expected {}{}", text::shown(line),
                       seat.id.empty() ? "nothing: all that it was asked has been answered"
                                       : "a JSON object with the id " + seat.id,
                       why);
  }

  void wait() {
    std::vector<pollfd> polled;
    // Looks at `stop` so often.
    Clock::time_point until = Clock::now() + std::chrono::milliseconds(200);
    for (const Seat& seat : seats_) {
      if (!seat.worker) continue;
      polled.push_back({seat.worker->output(), POLLIN, 0});
      if (seat.worker->has_to_write()) polled.push_back({seat.worker->input(), POLLOUT, 0});
      if (seat.worker->errors() >= 0) polled.push_back({seat.worker->errors(), POLLIN, 0});
      if (!seat.id.empty()) until = std::min(until, seat.deadline);
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    ::poll(polled.data(), polled.size(), static_cast<int>(std::max<std::int64_t>(0, left)));
  }

  void serve(std::size_t number) {
    Seat& seat = seats_[number];
    if (!seat.worker) return;
    for (const std::string& line : seat.worker->pump()) {
      std::string why;
      if (!take(seat, line, why)) {
        fail(seat, wrote(seat, line, why));
        return;
      }
    }
    if (seat.worker->is_gone()) {
      const std::string reason = seat.worker->end_gone();
      if (!seat.has_answered) {
        ++stillborn_;
        last_end_ = reason;
      }
      fail(seat, reason);
    } else if (!seat.id.empty() && Clock::now() >= seat.deadline) {
      if (!seat.has_answered) ++silent_;
      fail(seat, fmt::format("gave no answer within {} s{}", limit_of(seat), said_of_start(seat)));
    }
  }

  double limit_of(const Seat& seat) const {
    return options_.timeout_s + (seat.has_answered ? 0 : options_.start_timeout_s);
  }
  std::string said_of_start(const Seat& seat) const {
    if (seat.has_answered) return " (rl.reward.timeout_s)";
    return fmt::format(" (rl.reward.timeout_s {}, and {} for its first answer)", options_.timeout_s,
                       options_.start_timeout_s);
  }

  /// Else each completion would be waited for twice as long.
  void require_sound() const {
    if (has_ever_answered_ || options_.failed) return;
    constexpr const char* kTry =
        "try it by hand: it reads one JSON object a line and writes one a line, flushed "
        "(docs/rewards.md)";
    if (silent_ >= kMostSilent) {
      throw_error<Error>("{}: '{}' was started {} times and never answered within {} s; {}",
                         options_.key, command(), silent_,
                         options_.timeout_s + options_.start_timeout_s, kTry);
    }
    if (stillborn_ >= kMostStillborn) {
      throw_error<Error>(
          "{}: '{}' was started {} times and never answered; the last time it {}; {}", options_.key,
          command(), stillborn_, last_end_, kTry);
    }
  }

  std::string command() const { return text::shown(text::join(options_.command, " ")); }

  /// False for a line that is no answer; `why` says what the parser found wrong.
  bool take(Seat& seat, const std::string& line, std::string& why) {
    Json value;
    try {
      value = json::parse<Json>(line);
    } catch (const DataError& error) {
      // Numbers that are none have their own advice.
      const bool is_text = line.find('{') == std::string::npos;
      why = fmt::format(" ({}{})", error.what(),
                        is_text ? "; text for people goes to the standard error" : "");
      return false;
    }
    if (seat.id.empty() || !value.is_object()) return false;
    const auto id = value.find("id");
    const bool is_ours = id != value.end() && (id->is_string() ? id->get<std::string>() == seat.id
                                                               : id->dump() == seat.id);
    if (!is_ours) return false;
    seat.id.clear();
    seat.worker->has_answered();
    seat.has_answered = has_ever_answered_ = true;
    finish(seat.item, {.value = std::move(value), .process = seat.process});
    return true;
  }

  void finish(std::size_t item, Answer answer) {
    items_[item].answer = std::move(answer);
    --unanswered_;
  }

  /// Ends the worker; its request goes to another one, or has failed.
  void fail(Seat& seat, const std::string& why) {
    const std::string reason = seat.worker->name() + " " + why;
    seat.worker.reset();
    const bool was_asked = !std::exchange(seat.id, {}).empty();
    const std::string about = was_asked ? items_[seat.item].request->about : "";
    log::warning("{}: {}{}; it is started anew", options_.key, reason,
                 about.empty() ? "" : ", asked about " + about);
    if (!was_asked) return;
    const Item& item = items_[seat.item];
    if (item.tries < 2 && !item.request->worker) {
      // At the end: another worker is the likelier to take it.
      waiting_.push_back(seat.item);
    } else {
      finish(seat.item, {.error = reason, .process = seat.process});
    }
  }

  ProcessOptions options_;
  std::vector<Seat> seats_;
  std::vector<Item> items_;
  std::deque<std::size_t> waiting_;
  std::size_t unanswered_ = 0;
  bool has_ever_answered_ = false;
  int silent_ = 0;        ///< Workers that were ended because their first answer did not come.
  int stillborn_ = 0;     ///< Workers that ended before it.
  std::string last_end_;  ///< How the last of these did.
  std::uint64_t last_id_ = 0;
  std::int64_t last_process_ = -1;
};

WorkerPool::WorkerPool(const ProcessOptions& options)
    : loop_(std::make_unique<Loop>(options)), thread_(std::make_unique<OwnThread>()) {}

WorkerPool::~WorkerPool() {
  thread_->run([this] { loop_->close(); });
}

std::vector<WorkerPool::Answer> WorkerPool::ask(const std::vector<Request>& requests) {
  std::vector<Answer> answers;
  thread_->run([&] { answers = loop_->ask(requests); });
  return answers;
}

std::size_t WorkerPool::size() const { return loop_->size(); }

}  // namespace heddle::reward
