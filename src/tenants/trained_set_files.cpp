// The directory of a set: its factors in PEFT's form or the compact one and, for training to go on,
// optimizer and gradients.
#include <ATen/ops/equal.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "base/files.h"
#include "base/text.h"
#include "ckpt/adapter_directory.h"
#include "ckpt/hf_adapter.h"
#include "ckpt/tensor_io.h"
#include "device/device.h"
#include "ops/autograd.h"
#include "tenants/trained_set.h"

namespace heddle::tenants {
namespace {

constexpr const char* kState = "heddle_training.json";
constexpr const char* kTensors = "heddle_training.safetensors";
constexpr const char* kSharedFactors = "shared_expert_factors";
constexpr std::int64_t kVersion = 1;

const std::string kWeights = "weights/", kGradient = "gradient/";

/// State that training changes besides the factors that PEFT's file holds.
std::vector<ckpt::NamedTensor> tensors_of(const TrainedSet& set, bool with_gradients) {
  std::vector<ckpt::NamedTensor> tensors;
  for (ckpt::TensorPart& part : set.optimizer->state(/*with_copies=*/true)) {
    if (!part.name.starts_with(kWeights)) tensors.push_back({part.name, part.tensor});
  }
  if (!with_gradients) return tensors;
  set.factors->visit_parameters([&](nn::Parameter& factor) {
    if (factor.gradient().defined())
      tensors.push_back({kGradient + factor.name(), factor.gradient()});
  });
  return tensors;
}

nlohmann::ordered_json state_of(const TrainedSet& set, bool with_optimizer) {
  const SetOptions& o = set.options;
  return {{"version", kVersion},
          {"rank", o.rank},
          {"alpha", o.alpha},
          {"seed", o.seed},
          {"attn", o.attn},
          {"mlp", o.mlp},
          {"unembed", o.unembed},
          {kSharedFactors, o.shared_expert_factors},
          {"optimizer", with_optimizer},
          {"steps", set.optimizer->steps()}};
}

/// PEFT writes the table below an adapter on the head too: as it is in the base model, it changes
/// nothing.
bool is_as_in_base(const ckpt::SavedParameter& saved, models::Model& model) {
  if (!saved.is_base) return false;
  const nn::Parameter* table = model.tied() ? &model.embedding_weight() : nullptr;
  for (const nn::Parameter* parameter : model.parameters())
    if (table == nullptr && parameter->name() == saved.name) table = parameter;
  if (table == nullptr || saved.tensor.shape != table->global_shape()) return false;
  const at::Tensor stored = ckpt::read_tensor(saved.tensor).to(table->value().options());
  return stored.sizes() == table->value().sizes() && at::equal(stored, table->value());
}

/// The state beside PEFT's files; null if there is none.
nlohmann::json read_state(const std::filesystem::path& directory) {
  if (!std::filesystem::exists(directory / kState)) return nullptr;
  try {
    return nlohmann::json::parse(files::read(directory / kState, files::kJsonLimit));
  } catch (const nlohmann::json::exception& error) {
    throw_error<ModelError>("{}: {}", (directory / kState).string(), error.what());
  }
}

/// PEFT's form has a factor for each expert in any case.
bool shares_factors(const nlohmann::json& state) {
  return state.is_object() && state.contains(kSharedFactors) && state[kSharedFactors] == true;
}

/// The form of the factors that the state tells; nothing for an adapter from elsewhere.
std::optional<nn::ExpertFactors> told_factors(const nlohmann::json& state) {
  if (state.is_null()) return std::nullopt;
  return shares_factors(state) ? nn::ExpertFactors::kSharedOuter : nn::ExpertFactors::kPairs;
}

/// The factors of a directory that changes nothing else of the model.
std::unique_ptr<adapters::LoraSet> factors_of(assembly::ModelOnRanks& base,
                                              const std::filesystem::path& directory,
                                              const nlohmann::json& state) {
  const ckpt::AdapterDirectory files = ckpt::AdapterDirectory::open(directory);
  // They would change the base model of all sets.
  std::vector<std::string> others;
  for (const ckpt::SavedParameter& whole : files.saved())
    if (!is_as_in_base(whole, *base.model)) others.push_back(whole.tensor.name);
  for (const ckpt::LoraPair& pair : files.pairs())
    if (pair.is_embedding) others.push_back(pair.a.name);
  if (!others.empty()) {
    throw_error<ModelError>(
        "{}: {} tensor(s) are whole modules, or of the embedding, which all adapters of one base "
        "model share: {}; expected LoRA of linear layers alone, or a merged model (`heddle "
        "export`)",
        directory.string(), others.size(), text::list_some(others));
  }
  return ckpt::load_adapter(files, *base.model, base.source->path().string(), {},
                            /*keeps_head=*/true, told_factors(state));
}

/// Fills optimizer and gradients of a set whose factors are there.
void restore(const TrainedSet& set, const std::filesystem::path& directory, std::int64_t steps) {
  const ops::NoGradient guard;
  const ckpt::SafetensorsFile file(directory / kTensors, directory);
  for (ckpt::NamedTensor& tensor : tensors_of(set, /*with_gradients=*/false))
    ckpt::copy_into(file.at(tensor.name), tensor.tensor);
  set.factors->visit_parameters([&](nn::Parameter& factor) {
    const ckpt::StoredTensor* const stored = file.find(kGradient + factor.name());
    if (stored != nullptr) ckpt::copy_into(*stored, factor.gradient_buffer());
  });
  set.optimizer->set_steps(steps);
}

}  // namespace

void save_trained_set(assembly::ModelOnRanks& base, const TrainedSet& set,
                      const std::filesystem::path& directory, SavedFor purpose, bool overwrite) {
  const bool with_optimizer = purpose == SavedFor::kTraining;
  ckpt::export_adapter(
      *base.model, *set.factors, {}, *base.source, base.source->path().string(), {}, directory,
      overwrite, ckpt::read_from_memory, {{kState, state_of(set, with_optimizer).dump(2) + "\n"}},
      [&](const ckpt::Path& place) {
        if (with_optimizer)
          ckpt::write_tensors(place / kTensors, tensors_of(set, /*with_gradients=*/true));
      },
      purpose == SavedFor::kPeft ? ckpt::AdapterForm::kPeft : ckpt::AdapterForm::kCompact);
}

void save_factors(assembly::ModelOnRanks& base, const adapters::LoraSet& factors,
                  const std::filesystem::path& directory) {
  ckpt::Files files;
  if (factors.options().expert_factors == nn::ExpertFactors::kSharedOuter) {
    const nlohmann::ordered_json state = {{"version", kVersion}, {kSharedFactors, true}};
    files = {{kState, state.dump(2) + "\n"}};
  }
  ckpt::export_adapter(*base.model, factors, {}, *base.source, base.source->path().string(), {},
                       directory, /*overwrite=*/false, ckpt::read_from_memory, files, {},
                       ckpt::AdapterForm::kCompact);
}

std::unique_ptr<adapters::LoraSet> load_factors(assembly::ModelOnRanks& base,
                                                const std::filesystem::path& directory) {
  auto factors = factors_of(base, directory, read_state(directory));
  factors->visit_parameters([](nn::Parameter& factor) { factor.set_trainable(false); });
  return factors;
}

TrainedSet load_trained_set(assembly::ModelOnRanks& base, const std::filesystem::path& directory,
                            bool with_optimizer) {
  TrainedSet set;
  const nlohmann::json state = read_state(directory);
  set.factors = factors_of(base, directory, state);
  set.options = {.rank = set.factors->options().rank,
                 .alpha = set.factors->options().alpha,
                 .shared_expert_factors =
                     set.factors->options().expert_factors == nn::ExpertFactors::kSharedOuter};
  const bool has_state = state.contains("rank");  // else it is of factors alone
  if (with_optimizer && !has_state)
    throw_error<ModelError>("{}: no {}; it was not saved with its optimizer", directory.string(),
                            kState);
  require_room(*set.factors, device::free_bytes(base.context.device));
  set.optimizer = make_optimizer(base, *set.factors, set.options.seed);
  if (!has_state) return set;
  const std::string where = (directory / kState).string();
  try {
    if (state.at("version") != kVersion)
      throw_error<ModelError>("{}: version {}, this program reads {}", where,
                              state.at("version").dump(), kVersion);
    set.options = {state.at("rank"), state.at("alpha"),   state.at("seed"),     state.at("attn"),
                   state.at("mlp"),  state.at("unembed"), shares_factors(state)};
    if (!with_optimizer) return set;
    if (!state.at("optimizer").get<bool>())
      throw_error<ModelError>("{}: the set was saved without its optimizer", where);
    restore(set, directory, state.at("steps"));
  } catch (const nlohmann::json::exception& error) {
    throw_error<ModelError>("{}: {}", where, error.what());
  }
  return set;
}

}  // namespace heddle::tenants
