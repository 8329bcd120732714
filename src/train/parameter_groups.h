#pragma once

#include <string>
#include <vector>

#include "config/run_config.h"
#include "nn/parameter.h"

namespace heddle::train {

/// Kinds of parameters by their published names.
bool is_embedding(const std::string& name);
bool is_head(const std::string& name);

/// Whether Muon updates it: a matrix inside a block, or a stack of experts' matrices, with more
/// than one row and column. Embeddings, heads, norms, biases and convolutions are AdamW's.
bool is_hidden_matrix(const nn::Parameter& parameter);

/// Learning rates of parameters as shares of optim.lr.
struct LearningRates {
  double head = 1, embeddings = 1, lora_b = 1;
  double share_of(const std::string& name) const;
};
LearningRates learning_rates(const config::OptimSection& optim,
                             const config::AdapterSection& adapter);
/// Throws ConfigError where a group with a rate of its own has no trained parameter in the model.
void require_groups(const config::OptimSection& optim,
                    const std::vector<nn::Parameter*>& parameters);

}  // namespace heddle::train
