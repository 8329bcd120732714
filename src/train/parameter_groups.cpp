#include "train/parameter_groups.h"

#include <algorithm>

#include "base/errors.h"

namespace heddle::train {

bool is_embedding(const std::string& name) { return name.ends_with("embed_tokens.weight"); }

bool is_head(const std::string& name) { return name == "lm_head.weight" || name == "score.weight"; }

bool is_hidden_matrix(const nn::Parameter& parameter) {
  const auto& shape = parameter.global_shape();
  if (is_embedding(parameter.name()) || is_head(parameter.name())) return false;
  if (shape.size() != 2 && shape.size() != 3) return false;
  return shape[shape.size() - 2] > 1 && shape.back() > 1;
}

double LearningRates::share_of(const std::string& name) const {
  if (name.ends_with(".lora_B.weight")) return lora_b;
  if (is_embedding(name)) return embeddings;
  return is_head(name) ? head : 1;
}

LearningRates learning_rates(const config::OptimSection& optim,
                             const config::AdapterSection& adapter) {
  LearningRates rates;
  if (optim.lr_head > 0) rates.head = optim.lr_head / optim.lr;
  if (optim.lr_embeddings > 0) rates.embeddings = optim.lr_embeddings / optim.lr;
  rates.lora_b = adapter.loraplus_lr_ratio;
  return rates;
}

void require_groups(const config::OptimSection& optim,
                    const std::vector<nn::Parameter*>& parameters) {
  const auto require = [&](double rate, const char* key, bool (*belongs)(const std::string&),
                           const char* reason) {
    const bool is_trained =
        std::any_of(parameters.begin(), parameters.end(), [&](const nn::Parameter* parameter) {
          return parameter->trainable() && belongs(parameter->name());
        });
    if (rate > 0 && !is_trained) throw_error<ConfigError>("{}: {}", key, reason);
  };
  require(optim.lr_head, "optim.lr_head", is_head,
          "this run trains no output layer of its own: it is frozen, or tied to the embedding "
          "(optim.lr_embeddings)");
  require(optim.lr_embeddings, "optim.lr_embeddings", is_embedding,
          "this run does not train the embedding: train.freeze names it, or with train.method lora "
          "adapter.modules_to_save does not");
}

}  // namespace heddle::train
