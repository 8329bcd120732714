#include "ckpt/config_bounds.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/text.h"

namespace heddle::ckpt {
namespace {

/// A model of a test has a few thousand weights, and a head beside the files another few.
constexpr double kSpare = 1 << 22;

using Factors = std::vector<std::pair<const char*, std::int64_t>>;

double product(const Factors& factors) {
  double all = 1;
  for (const auto& [key, value] : factors) all *= static_cast<double>(value);
  return all;
}

/// The matrices of one layer, the larger ones of each kind.
std::vector<Factors> matrices(const models::qwen3_5::Config& c) {
  const std::pair<const char*, std::int64_t> hidden = {"hidden_size", c.hidden_size};
  std::vector<Factors> all = {
      {{"num_attention_heads", c.num_attention_heads}, {"head_dim", c.head_dim}, hidden},
      {{"num_key_value_heads", c.num_key_value_heads}, {"head_dim", c.head_dim}, hidden},
      {{"linear_num_key_heads", c.linear_num_key_heads},
       {"linear_key_head_dim", c.linear_key_head_dim},
       hidden},
      {{"linear_num_value_heads", c.linear_num_value_heads},
       {"linear_value_head_dim", c.linear_value_head_dim},
       hidden},
      {{"linear_conv_kernel_dim", c.linear_conv_kernel_dim},
       {"linear_num_value_heads", c.linear_num_value_heads},
       {"linear_value_head_dim", c.linear_value_head_dim}}};
  if (c.is_moe()) {
    all.push_back({{"num_experts", c.num_experts},
                   {"moe_intermediate_size", c.moe_intermediate_size},
                   hidden});
    all.push_back(
        {{"shared_expert_intermediate_size", c.shared_expert_intermediate_size}, hidden});
  }
  // Layers without experts, which a mixture of experts need not have.
  if (std::find(c.sparse_mlp.begin(), c.sparse_mlp.end(), false) != c.sparse_mlp.end())
    all.push_back({{"intermediate_size", c.intermediate_size}, hidden});
  return all;
}

}  // namespace

void require_size_of_files(const models::qwen3_5::Config& config, const ModelDirectory& directory) {
  double held = 0;
  for (const StoredTensor& tensor : directory.tensors()) held += static_cast<double>(tensor.numel());
  const double most = 2 * held + kSpare;
  const auto check = [&](const Factors& factors) {
    if (product(factors) <= most) return;
    std::vector<std::string> shown;
    for (const auto& [key, value] : factors) shown.push_back(fmt::format("'{}' {}", key, value));
    throw_error<ModelError>("{}: {} are {} weights, and the files of the model hold {} in all",
                            (directory.path() / "config.json").string(),
                            fmt::join(shown, " times "), text::format_count(product(factors)),
                            text::format_count(held));
  };
  check({{"vocab_size", config.vocab_size}, {"hidden_size", config.hidden_size}});
  for (const Factors& matrix : matrices(config)) check(matrix);
  const auto tensors = static_cast<std::int64_t>(directory.tensors().size());
  if (config.num_hidden_layers > tensors) {
    throw_error<ModelError>("{}: 'num_hidden_layers' is {}, and the files hold {} tensors in all",
                            (directory.path() / "config.json").string(), config.num_hidden_layers,
                            tensors);
  }
}

}  // namespace heddle::ckpt
