#include "serve/metrics/generation_metrics.h"

#include <utility>

namespace heddle::serve {
namespace {

// Bounds of the histograms are vLLM's.
const std::vector<double> kFirstToken = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,
                                         0.25,  0.5,   0.75, 1,    2.5,  5,    7.5,  10,
                                         20,    40,    80,   160,  640,  2560};
const std::vector<double> kBetweenTokens = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
                                            0.75, 1,     2.5,  5,     7.5, 10,   20,  40,  80};
const std::vector<double> kRequest = {0.3, 0.5, 0.8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                      30,  40,  50,  60, 120, 240, 480, 960, 1920, 7680};

double seconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

}  // namespace

GenerationMetrics::GenerationMetrics(Registry& registry, std::string model_name)
    : registry_(registry), labels_{{"model_name", std::move(model_name)}} {
  registry.declare_counter("vllm:prompt_tokens_total", "Tokens of prompts.");
  registry.declare_counter("vllm:generation_tokens_total", "Tokens generated.");
  registry.declare_counter("vllm:prefix_cache_queries_total",
                           "Tokens of prompts that were looked for in kept states.");
  registry.declare_counter("vllm:prefix_cache_hits_total", "Tokens of prompts found there.");
  registry.declare_counter("vllm:request_success_total", "Answers that ended, by why they ended.");
  registry.declare_histogram("vllm:time_to_first_token_seconds",
                             "From a request's arrival to its first token.", kFirstToken);
  registry.declare_histogram("vllm:inter_token_latency_seconds", "Between tokens of a request.",
                             kBetweenTokens);
  registry.declare_histogram("vllm:e2e_request_latency_seconds",
                             "From a request's arrival to its end.", kRequest);
  registry.declare_histogram("vllm:request_queue_time_seconds",
                             "From a request's arrival to its start.", kRequest);
  registry.declare_histogram("vllm:request_prefill_time_seconds",
                             "From a request's start to its first token.", kRequest);
  registry.declare_histogram("vllm:request_decode_time_seconds",
                             "From a request's first token to its end.", kRequest);
}

GenerationMetrics::Request::Request(GenerationMetrics& metrics, std::int64_t prompt_tokens)
    : metrics_(metrics), prompt_tokens_(prompt_tokens) {}

void GenerationMetrics::Request::token() {
  const Clock::time_point now = Clock::now();
  Registry& registry = metrics_.registry_;
  if (!first_) {
    first_ = now;
    registry.add("vllm:prompt_tokens_total", metrics_.labels_, static_cast<double>(prompt_tokens_));
    registry.observe("vllm:time_to_first_token_seconds", metrics_.labels_, seconds(now - arrival_));
  } else {
    registry.observe("vllm:inter_token_latency_seconds", metrics_.labels_, seconds(now - *last_));
  }
  last_ = now;
  registry.add("vllm:generation_tokens_total", metrics_.labels_);
}

void GenerationMetrics::answered(std::int64_t prompt_tokens, std::int64_t tokens, double seconds) {
  registry_.add("vllm:prompt_tokens_total", labels_, static_cast<double>(prompt_tokens));
  registry_.add("vllm:generation_tokens_total", labels_, static_cast<double>(tokens));
  registry_.observe("vllm:e2e_request_latency_seconds", labels_, seconds);
}

void GenerationMetrics::cached(std::int64_t prompt_tokens, std::int64_t cached_tokens) {
  registry_.add("vllm:prefix_cache_queries_total", labels_, static_cast<double>(prompt_tokens));
  registry_.add("vllm:prefix_cache_hits_total", labels_, static_cast<double>(cached_tokens));
}

void GenerationMetrics::begun(double queue_s, double prompt_s) {
  registry_.observe("vllm:request_queue_time_seconds", labels_, queue_s);
  registry_.observe("vllm:request_prefill_time_seconds", labels_, prompt_s);
}

void GenerationMetrics::ended(const std::string& reason) {
  Labels labels = labels_;
  labels["finished_reason"] = reason;
  registry_.add("vllm:request_success_total", labels);
}

void GenerationMetrics::Request::ended(const std::string& reason) {
  const Clock::time_point now = Clock::now();
  metrics_.ended(reason);
  metrics_.registry_.observe("vllm:e2e_request_latency_seconds", metrics_.labels_,
                             seconds(now - arrival_));
  if (first_) {
    metrics_.registry_.observe("vllm:request_decode_time_seconds", metrics_.labels_,
                               seconds(now - *first_));
  }
}

}  // namespace heddle::serve
