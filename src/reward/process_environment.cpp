#include <utility>

#include "base/errors.h"
#include "base/json.h"
#include "reward/environment.h"
#include "reward/wire.h"
#include "reward/worker_pool.h"

namespace heddle::reward {
namespace {

/// An episode stays with one worker, which keeps its state.
class ProcessEnvironment final : public Environment {
 public:
  ProcessEnvironment(std::shared_ptr<WorkerPool> pool, std::int64_t episode)
      : pool_(std::move(pool)), episode_(episode) {}
  ~ProcessEnvironment() override {
    if (!is_open_) return;
    try {
      ask({{"op", "close"}});
    } catch (const std::exception&) {
      // The worker that is told to forget the episode has ended, so it has.
    }
  }

  std::string reset(std::uint64_t seed, const Row& row) override {
    is_open_ = true;
    const Json answer =
        ask({{"op", "reset"},
             {"seed", seed},
             {"row", {{"prompt", row.prompt}, {"answer", row.truth}, {"meta", row.meta}}}});
    return text_of(answer, "observation");
  }

  Step step(const std::string& action) override {
    if (!is_open_) throw_error<InternalError>("a step of an episode that is over");
    const Json answer = ask({{"op", "step"}, {"action", action}});
    Step step;
    step.done = flag_of(answer, "done");
    step.truncated = flag_of(answer, "truncated");
    if (!step.done || answer.contains("observation"))
      step.observation = text_of(answer, "observation");
    const auto reward = answer.find("reward");
    if (reward == answer.end() || !is_reward(*reward))
      refuse("'reward' must be a number, at most 1e9", answer);
    step.reward = reward->get<double>();
    if (step.done) {
      ask({{"op", "close"}});
      is_open_ = false;
    }
    return step;
  }

 private:
  Json ask(Json body) {
    body["episode"] = episode_;
    const std::size_t worker = static_cast<std::size_t>(episode_) % pool_->size();
    const auto answers = pool_->ask({{std::move(body), worker}});
    if (answers[0].error) {
      is_open_ = false;
      throw_error<Error>("episode {}: {}", episode_, *answers[0].error);
    }
    const Json& value = answers[0].value;
    if (const auto error = value.find("error"); error != value.end() && !error->is_null())
      throw_error<Error>("episode {}: {}", episode_, json::shown(*error));
    return value;
  }

  [[noreturn]] void refuse(const std::string& why, const Json& answer) const {
    throw_error<Error>("episode {}: {}, found {}", episode_, why, json::shown(answer));
  }
  std::string text_of(const Json& answer, const char* key) const {
    const auto value = answer.find(key);
    if (value == answer.end() || !value->is_string())
      refuse(fmt::format("'{}' must be text", key), answer);
    return value->get<std::string>();
  }
  bool flag_of(const Json& answer, const char* key) const {
    const auto value = answer.find(key);
    if (value == answer.end()) return false;
    if (!value->is_boolean()) refuse(fmt::format("'{}' must be true or false", key), answer);
    return value->get<bool>();
  }

  std::shared_ptr<WorkerPool> pool_;
  std::int64_t episode_;
  bool is_open_ = false;
};

}  // namespace

ProcessEnvironments::ProcessEnvironments(const ProcessOptions& options)
    : pool_(std::make_shared<WorkerPool>(options)) {}

std::unique_ptr<Environment> ProcessEnvironments::environment() {
  return std::make_unique<ProcessEnvironment>(pool_, episodes_++);
}

}  // namespace heddle::reward
