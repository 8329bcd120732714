#include "rl/published.h"

#include <fmt/format.h>

#include "ckpt/adapter_names.h"

namespace heddle::rl {

sync::Visit published(const config::RunConfig& config, const assembly::ModelOnRanks& model) {
  return [&config, &model](const std::function<void(nn::Parameter&)>& visit) {
    if (!model.adapters) {
      model.model->visit_parameters(visit);
      return;
    }
    model.adapters->visit_parameters(visit);
    model.model->visit_parameters([&](nn::Parameter& parameter) {
      if (ckpt::is_saved_whole(config.adapter.modules_to_save, parameter.name())) visit(parameter);
    });
  };
}

std::string hash_text(const sync::Manifest& manifest, std::uint64_t weights_hash) {
  return fmt::format("{:016x}/{:016x}", manifest.hash(), weights_hash);
}

}  // namespace heddle::rl
