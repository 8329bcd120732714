#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "serve/model/model_thread.h"
#include "serve/quotas.h"
#include "serve/store/keys.h"
#include "serve/tinker/service.h"

namespace heddle::serve::admin {

/// Parts of a server that its page shows.
struct Sources {
  const ModelThread& model;
  const tinker::Service& tinker;
  DataDirectory& data;
  const Keys& keys;
  const Quotas& quotas;
  std::function<std::vector<std::string>()> adapters;  ///< Served by name.
};

/// State of a server as JSON, with the last minutes of its rates. Of the loop's thread.
class State {
 public:
  explicit State(Sources sources) : sources_(std::move(sources)) {}

  /// Notes rates and queues; every kSample_s.
  void sample();
  static constexpr double kSample_s = 2;

  /// {"model", "queue", "runs", "tenants", "adapters", "checkpoints", "keys", "series"}. Keys are
  /// shown by their first characters.
  nlohmann::json json() const;

 private:
  using Clock = std::chrono::steady_clock;
  struct Sample {
    Clock::time_point time;
    double tokens_per_s;
    std::int64_t waiting, answers;
  };
  std::int64_t tokens() const;
  nlohmann::json runs() const;
  nlohmann::json checkpoints() const;
  nlohmann::json keys() const;
  nlohmann::json series() const;

  Sources sources_;
  std::deque<Sample> samples_;
  Clock::time_point last_time_ = Clock::now();
  std::int64_t last_tokens_ = 0;
};

}  // namespace heddle::serve::admin
