#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
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

  /// Runs the job, which must not throw, after those that were given before.
  void run(std::function<void(Backend&)> job);
  GenerationId generate(Generation generation, GenerationEvents events);
  /// Ends a generation; it hears nothing more. Does nothing to one that has ended.
  void cancel(GenerationId id);
  /// Generations that wait or run.
  std::int64_t generations() const { return generations_; }

 private:
  struct Active {
    GenerationId id;
    GenerationEvents events;
  };
  void loop();
  void start(GenerationId id, const Generation& generation, GenerationEvents events);
  void step();
  void observe();
  void fail_all(const std::string& message);
  void give(std::function<void()> work);

  std::unique_ptr<Backend> backend_;
  Observer observer_;
  ModelFacts facts_;
  std::atomic<GenerationId> next_id_ = 0;
  std::atomic<std::int64_t> generations_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void(Backend&)>> jobs_;
  std::deque<std::function<void()>> requests_;  ///< Starts and ends of generations.
  bool is_ending_ = false;
  std::map<GenerationId, Active> active_;  ///< By the back end's id; of the model's thread.
  std::thread thread_;
};

}  // namespace heddle::serve
