#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "serve/model/backend.h"

namespace heddle::serve {

/// The thread that owns the model: it takes turns between jobs (training, loading) and passes of
/// generation. All calls may come from any thread.
class ModelThread {
 public:
  /// Told of the passes of each turn and of what is left to do, on the model's thread.
  using Observer = std::function<void(const std::vector<ModelPass>&, const ModelQueue&)>;

  explicit ModelThread(std::unique_ptr<Backend> backend, Observer observer = {});
  /// Ends after the job under way; generations that have not ended fail.
  ~ModelThread();
  ModelThread(const ModelThread&) = delete;
  ModelThread& operator=(const ModelThread&) = delete;

  const ModelFacts& facts() const { return facts_; }

  /// Runs the job, which must not throw, after those that were given before. `tokens`: that it
  /// passes through the model, for its deadline.
  void run(std::function<void(Backend&)> job, std::int64_t tokens = 0);
  /// Seconds that the turn under way has taken at `now`, if it is over its deadline: turn_s, and a
  /// tenth of a second more for each of its tokens.
  std::optional<double> overdue(double turn_s, std::chrono::steady_clock::time_point now) const;
  GenerationId generate(Generation generation, GenerationEvents events);
  /// Ends a generation; it hears nothing more. Does nothing to one that has ended.
  void cancel(GenerationId id);
  /// Generations that wait or run.
  std::int64_t generations() const { return generations_; }

 private:
  struct Job {
    std::function<void(Backend&)> work;
    std::int64_t tokens = 0;
  };
  /// A job, or a pass of generation, that is under way.
  struct Turn {
    std::chrono::steady_clock::time_point begun;
    std::int64_t tokens = 0;
  };
  struct Active {
    GenerationId id;
    GenerationEvents events;
  };
  void loop();
  void start(GenerationId id, const Generation& generation, GenerationEvents events);
  void step();
  void observe();
  void begin_turn(std::int64_t tokens);
  void end_turn();
  void fail_all(const std::string& message);
  void give(std::function<void()> work);

  std::unique_ptr<Backend> backend_;
  Observer observer_;
  ModelFacts facts_;
  std::atomic<GenerationId> next_id_ = 0;
  std::atomic<std::int64_t> generations_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::optional<Turn> turn_;
  std::deque<std::function<void()>> requests_;  ///< Starts and ends of generations.
  bool is_ending_ = false;
  std::map<GenerationId, Active> active_;  ///< By the back end's id; of the model's thread.
  std::thread thread_;
};

}  // namespace heddle::serve
