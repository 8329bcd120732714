#include "ckpt/config_bounds.h"

#include <string>

#include "base/errors.h"
#include "base/text.h"

namespace heddle::ckpt {
namespace {

/// A model of a test has a few thousand weights, and a head beside the files another few.
constexpr double kSpare = 1 << 22;

}  // namespace

void require_size_of_files(const models::Config& config, const ModelDirectory& directory) {
  const std::string source = (directory.path() / "config.json").string();
  double held = 0;
  for (const StoredTensor& tensor : directory.tensors())
    held += static_cast<double>(tensor.numel());
  const auto check = [&](const std::string& what, std::int64_t out, std::int64_t in,
                         std::int64_t copies) {
    const double asked =
        static_cast<double>(out) * static_cast<double>(in) * static_cast<double>(copies);
    if (asked <= 2 * held + kSpare) return;
    throw_error<ModelError>(
        "{}: its sizes give {} {} weights ({} x {} x {}), and the files of the model hold {} in "
        "all",
        source, what, text::format_count(asked), copies, out, in, text::format_count(held));
  };
  check("the embedding (vocab_size, hidden_size)", config.vocab_size, config.hidden_size, 1);
  for (const models::LayerShape& layer : config.layers) {
    for (const models::Product& product : layer.products())
      check(product.name, product.out, product.in, 1);
    if (layer.moe) {
      check("mlp.experts (num_experts, moe_intermediate_size, hidden_size)",
            layer.moe->moe_intermediate_size, layer.moe->hidden_size, layer.moe->num_experts);
    }
  }
  const auto tensors = static_cast<std::int64_t>(directory.tensors().size());
  if (config.num_hidden_layers() > tensors) {
    throw_error<ModelError>("{}: 'num_hidden_layers' is {}, and the files hold {} tensors in all",
                            source, config.num_hidden_layers(), tensors);
  }
}

}  // namespace heddle::ckpt
