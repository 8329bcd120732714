#include "serve/metrics/pass_metrics.h"

#include <fmt/format.h>

#include <ctime>
#include <vector>

namespace heddle::serve {
namespace {

const std::vector<double> kSequences = {1, 2, 4, 8, 16, 32, 64, 128, 256};
const std::vector<double> kTokens = {1, 4, 16, 64, 256, 1024, 4096, 16384, 65536};
const std::vector<double> kSets = {1, 2, 4, 8, 16, 32, 64};

constexpr std::size_t kMostNames = 64;  ///< Adapters that one label names at most.

const char* name_of(ModelPass::Kind kind) {
  switch (kind) {
    case ModelPass::Kind::kPrompt:
      return "prompt";
    case ModelPass::Kind::kDecode:
      return "decode";
    case ModelPass::Kind::kTrain:
      return "train";
  }
  return "";
}

/// "a,b,c"; beyond kMostNames the number of the others: labels cost memory at whoever reads them.
std::string joined(const std::set<std::string>& names) {
  std::string text;
  std::size_t told = 0;
  for (const std::string& name : names) {
    if (told == kMostNames) return fmt::format("{},+{}", text, names.size() - told);
    if (told++ > 0) text += ",";
    text += name;
  }
  return text;
}

}  // namespace

PassMetrics::PassMetrics(Registry& registry, std::int64_t most_adapters)
    : registry_(registry), most_adapters_(std::to_string(most_adapters)) {
  registry.declare_counter("heddle_passes_total",
                           "Passes of the model, by kind and by how the device was given them.");
  registry.declare_histogram("heddle_pass_sequences", "Sequences of a pass.", kSequences);
  registry.declare_histogram("heddle_pass_tokens", "Tokens of a pass.", kTokens);
  registry.declare_histogram("heddle_pass_adapter_sets",
                             "Different sets of adapters of a pass, the base model among them.",
                             kSets);
  registry.declare_gauge("vllm:num_requests_waiting", "Answers that wait for memory.");
  registry.declare_gauge("vllm:num_requests_running", "Answers that are being generated.");
  registry.declare_gauge("vllm:kv_cache_usage_perc",
                         "Part of the memory for keys and values that is taken, up to 1.");
  registry.declare_counter("vllm:num_preemptions_total",
                           "Answers that gave their memory to others and went on later.");
  registry.declare_gauge("vllm:lora_requests_info",
                         "Adapters of the answers that run and wait; the value is the time of the "
                         "last change, in seconds since 1970.");
  registry.declare_gauge("heddle_queue_depth",
                         "Jobs (training, loading, saving) that wait for the model.");
  queued({});
}

void PassMetrics::passed(const ModelPass& pass) {
  const Labels kind = {{"kind", name_of(pass.kind)}};
  Labels how = kind;
  how["queued"] = pass.recorded ? "recorded" : "launched";
  registry_.add("heddle_passes_total", how);
  registry_.observe("heddle_pass_sequences", kind, static_cast<double>(pass.sequences));
  registry_.observe("heddle_pass_tokens", kind, static_cast<double>(pass.tokens));
  registry_.observe("heddle_pass_adapter_sets", kind, static_cast<double>(pass.sets));
}

void PassMetrics::queued(const ModelQueue& queue) {
  registry_.set("vllm:num_requests_waiting", {}, static_cast<double>(queue.waiting));
  registry_.set("vllm:num_requests_running", {}, static_cast<double>(queue.running));
  registry_.set("vllm:kv_cache_usage_perc", {}, queue.cache_use);
  registry_.set("heddle_queue_depth", {}, static_cast<double>(queue.jobs));
  registry_.add("vllm:num_preemptions_total", {},
                static_cast<double>(queue.interruptions -
                                    std::exchange(interruptions_, queue.interruptions)));
  told_adapters(queue);
}

void PassMetrics::told_adapters(const ModelQueue& queue) {
  std::pair now(queue.running_adapters, queue.waiting_adapters);
  if (adapters_ == now) return;
  // One series at a time: the names are labels, as vLLM has them.
  registry_.clear("vllm:lora_requests_info");
  registry_.set("vllm:lora_requests_info",
                {{"max_lora", most_adapters_},
                 {"running_lora_adapters", joined(now.first)},
                 {"waiting_lora_adapters", joined(now.second)}},
                static_cast<double>(std::time(nullptr)));
  adapters_ = std::move(now);
}

}  // namespace heddle::serve
