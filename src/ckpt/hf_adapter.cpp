#include "ckpt/hf_adapter.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <span>
#include <utility>

#include "base/errors.h"
#include "base/log.h"
#include "base/text.h"
#include "ckpt/adapter_names.h"
#include "ckpt/checked_tensor.h"
#include "ckpt/expert_pairs.h"
#include "ckpt/hf_shared_factors.h"
#include "ckpt/hf_vocabulary.h"
#include "ckpt/staging_directory.h"
#include "ckpt/tensor_io.h"
#include "hub/cache.h"
#include "ops/autograd.h"

namespace heddle::ckpt {
namespace {

using models::Head;

constexpr std::size_t kPairsAtOnce = 128;  // in memory

const SavedParameter* find_saved(const AdapterDirectory& directory,
                                 bool (*is_it)(const std::string&)) {
  const auto& saved = directory.saved();
  const auto found = std::find_if(saved.begin(), saved.end(),
                                  [&](const SavedParameter& s) { return is_it(s.name); });
  return found == saved.end() ? nullptr : &*found;
}

bool is_on_head(const LoraPair& pair) { return pair.module == "lm_head"; }

/// Adds scaling B A to what this rank owns of a table. a [rank, in], b [out, rank].
void add_low_rank(nn::Parameter& table, const at::Tensor& a, const at::Tensor& b, double scaling,
                  const std::string& where) {
  if (b.size(0) != table.global_shape()[0] || a.size(1) != table.global_shape()[1]) {
    throw_error<ModelError>("{} and its pair make a change of [{}, {}], this model needs [{}]",
                            where, b.size(0), a.size(1), fmt::join(table.global_shape(), ", "));
  }
  for (nn::Box& box : table.boxes(table.owned())) {
    const at::Tensor rows = b.narrow(0, box.global.offset[0], box.global.size[0]);
    const at::Tensor columns = a.narrow(1, box.global.offset[1], box.global.size[1]);
    const at::Tensor delta = (at::mm(rows, columns) * scaling).to(box.tensor.device());
    box.tensor.copy_(box.tensor.to(delta.scalar_type()) + delta);
  }
}

/// Adapters on embedding and head become part of the tables, which other code reads as they are.
void add_to_tables(const AdapterDirectory& directory, const std::vector<const LoraPair*>& pairs,
                   Model& model) {
  const bool on_both = std::any_of(pairs.begin(), pairs.end(),
                                   [](const LoraPair* pair) { return pair->is_embedding; });
  for (const LoraPair* pair : pairs) {
    const auto dtype = model.context().wide_dtype();
    const at::Tensor a = read_finite_tensor(pair->a, dtype), b = read_finite_tensor(pair->b, dtype);
    if (pair->is_embedding) {
      add_low_rank(model.embedding_weight(), b.t(), a.t(), pair->scaling, pair->a.where());
      continue;
    }
    if (model.head() != Head::kLanguageModel) {
      throw_error<ModelError>("{}: LoRA on lm_head, and this model has another head",
                              directory.path().string());
    }
    // ensure_weight_tying: the head's adapter is the embedding's, written twice.
    if (model.tied() && on_both) continue;
    add_low_rank(model.head_weight(), a, b, pair->scaling, pair->a.where());
  }
}

/// The last part of a model's name or path, that of the Hub for a snapshot in a cache.
std::string last_name(const std::string& base) {
  const std::string name = std::filesystem::exists(base) ? hub::model_name(base) : base;
  const Path path = without_trailing_slash(name);
  return path.filename().string();
}

void say_of_base(const AdapterDirectory& directory, const std::string& base) {
  const std::string& named = directory.config().base_model_name_or_path;
  if (named.empty() || base.empty() || last_name(named) == last_name(base)) return;
  log::warning("{}: the adapter was made for {} and is put on {}", directory.path().string(), named,
               base);
}

void say_of_vision(const AdapterDirectory& directory) {
  std::vector<std::string> modules;
  for (const LoraPair& pair : directory.vision_pairs()) modules.push_back(pair.module);
  for (const SavedParameter& saved : directory.vision_saved()) modules.push_back(saved.name);
  if (modules.empty()) return;
  log::warning(
      "{}: {} vision modules are not used, because text does not pass through them (`heddle "
      "export` "
      "merges them): {}",
      directory.path().string(), modules.size(), text::list_some(modules));
}

/// Modules that target_modules names and the file leaves out are as in the base model.
void say_of_missing(const AdapterDirectory& directory, Model& model,
                    const std::set<std::string>& present) {
  std::vector<std::string> missing;
  model.visit_linears([&](nn::Linear& linear) {
    std::string name = linear.module();
    if (name.starts_with(model.prefix())) name.replace(0, model.prefix().size(), "model.");
    if (directory.config().targets(name) && !present.contains(name)) missing.push_back(name);
  });
  if (missing.empty()) return;
  log::warning(
      "{}: target_modules names {} module(s) of which the file holds no factors; "
      "they stay as in the base model: {}",
      directory.path().string(), missing.size(), text::list_some(missing));
}

std::vector<StoredTensor> stored_in(const AdapterDirectory& directory) {
  std::vector<StoredTensor> all;
  for (const LoraPair& pair : directory.pairs()) all.insert(all.end(), {pair.a, pair.b});
  for (const SavedParameter& saved : directory.saved()) all.push_back(saved.tensor);
  return all;
}

/// Before the tensor is read, which may be of any size.
void require_shape(const nn::Parameter& parameter, const StoredTensor& stored) {
  if (stored.shape == parameter.global_shape()) return;
  throw_error<ModelError>("{} is [{}], this model needs [{}]", stored.where(),
                          fmt::join(stored.shape, ", "), fmt::join(parameter.global_shape(), ", "));
}

/// Factors of pairs, read by all threads: requests of a server wait for them.
std::vector<std::pair<at::Tensor, at::Tensor>> read_factors(
    std::span<const LoraPair* const> pairs) {
  std::vector<std::pair<at::Tensor, at::Tensor>> factors(pairs.size());
  at::parallel_for(0, std::ssize(pairs), 1, [&](std::int64_t first, std::int64_t last) {
    for (auto i = static_cast<std::size_t>(first); i < static_cast<std::size_t>(last); ++i)
      factors[i] = {read_finite_tensor(pairs[i]->a), read_finite_tensor(pairs[i]->b)};
  });
  return factors;
}

}  // namespace

adapters::Adaptable adaptable(Model& model) {
  return {[&](const std::function<void(nn::Linear&)>& visit) { model.visit_linears(visit); },
          [&](const std::function<void(nn::ExpertWeights&)>& visit) {
            model.visit_expert_weights(visit);
          }};
}

std::int64_t vocabulary_rows(const AdapterDirectory& directory) {
  std::int64_t rows = 0;
  for (const SavedParameter& saved : directory.saved()) {
    const bool vocabulary = is_embedding(saved.name) || is_head(saved.name);
    if (vocabulary && saved.tensor.shape.size() == 2)
      rows = std::max(rows, static_cast<std::int64_t>(saved.tensor.shape[0]));
  }
  return rows;
}

std::int64_t label_rows(const AdapterDirectory& directory) {
  const SavedParameter* const score =
      find_saved(directory, [](const std::string& name) { return name == "score.weight"; });
  return score != nullptr && score->tensor.shape.size() == 2
             ? static_cast<std::int64_t>(score->tensor.shape[0])
             : 0;
}

bool unties_head(const AdapterDirectory& directory) {
  const SavedParameter* const embedding = find_saved(directory, is_embedding);
  const SavedParameter* const head = find_saved(directory, is_head);
  const bool differ = embedding != nullptr && head != nullptr &&
                      !at::equal(read_tensor(embedding->tensor), read_tensor(head->tensor));
  if (directory.config().ensure_weight_tying) {
    if (!differ) return false;
    throw_error<ModelError>("{}: 'ensure_weight_tying' is true, but {} and {} differ",
                            directory.path().string(), embedding->name, head->name);
  }
  const bool is_adapted =
      std::any_of(directory.pairs().begin(), directory.pairs().end(),
                  [](const LoraPair& pair) { return pair.is_embedding || is_on_head(pair); });
  if (is_adapted || differ) return true;
  if (embedding != nullptr && head != nullptr) return false;
  const SavedParameter* const one = embedding != nullptr ? embedding : head;
  return one != nullptr && !one->is_base;
}

namespace {

/// A name of a file's text spelling as the model has it.
std::string name_in(const Model& model, const std::string& name) {
  constexpr std::string_view kText = "model.";
  return name.starts_with(kText) ? model.prefix() + name.substr(kText.size()) : name;
}

/// Name of the layer or of the experts' parameter that a pair or stacked experts change.
template <class Pair>
std::string key_of(const Model& model, const Pair& pair) {
  const std::string module = name_in(model, pair.module);
  return pair.parameter.empty() ? module : module + "." + pair.parameter;
}

/// Fills parameters of modules_to_save.
void load_saved(const AdapterDirectory& directory, Model& model) {
  std::map<std::string, nn::Parameter*> parameters;
  for (nn::Parameter* parameter : model.parameters()) parameters[parameter->name()] = parameter;
  const bool is_tied = model.tied() && model.head() == Head::kLanguageModel;
  const bool has_embedding = find_saved(directory, is_embedding) != nullptr;
  for (const SavedParameter& saved : directory.saved()) {
    // A tied model has one table, which is written twice or under either name.
    const bool is_table = is_tied && is_head(saved.name);
    if (is_table && has_embedding) continue;
    const auto it = is_table ? parameters.find(model.embedding_weight().name())
                             : parameters.find(name_in(model, saved.name));
    if (it == parameters.end()) {
      throw_error<ModelError>("{}: modules_to_save holds '{}', which this model does not have",
                              directory.path().string(), saved.name);
    }
    if (saved.tensor.shape != it->second->global_shape()) {
      throw_error<ModelError>("{}: modules_to_save holds '{}' as [{}], this model has [{}]",
                              directory.path().string(), saved.name,
                              fmt::join(saved.tensor.shape, ", "),
                              fmt::join(it->second->global_shape(), ", "));
    }
    it->second->write_owned(read_finite_tensor(saved.tensor));
  }
}

/// Fills what this rank owns of a set's factors. Throws ModelError for pairs that have no place.
void fill_factors(const AdapterDirectory& directory, const Model& model,
                  std::span<const LoraPair* const> pairs, std::span<const StackedExperts> stacked,
                  adapters::LoraSet& set) {
  std::map<std::string, adapters::Lora*> by_module;
  for (const auto& lora : set.adapters()) by_module[lora->module()] = lora.get();
  std::map<std::string, adapters::ExpertLora*> by_parameter;
  for (const auto& lora : set.expert_adapters()) by_parameter[lora->parameter()] = lora.get();
  std::vector<std::string> homeless;
  for (const LoraPair* pair : pairs) {
    const std::string key = key_of(model, *pair);
    const auto lora = by_module.find(key);
    if (lora == by_module.end()) {
      if (!by_parameter.contains(key)) homeless.push_back(key);
      continue;
    }
    require_shape(lora->second->a(), pair->a);
    require_shape(lora->second->b(), pair->b);
  }
  if (!homeless.empty()) {
    throw_error<ModelError>(
        "{}: has factors on {} module(s) that adapter.targets and adapter.target_parameters leave "
        "out: {}; name them too, or leave both settings out to go on with all",
        directory.path().string(), homeless.size(), text::list_some(homeless));
  }
  for (std::size_t first = 0; first < pairs.size(); first += kPairsAtOnce) {
    const std::span some = pairs.subspan(first, std::min(kPairsAtOnce, pairs.size() - first));
    const auto factors = read_factors(some);
    for (std::size_t i = 0; i < some.size(); ++i) {
      const auto& [a, b] = factors[i];
      const std::string key = key_of(model, *some[i]);
      if (const auto expert = by_parameter.find(key); expert != by_parameter.end()) {
        expert->second->set_from_peft(a, b);
        continue;
      }
      adapters::Lora& lora = *by_module.at(key);
      lora.a().write_owned(a);
      lora.b().write_owned(b);
    }
  }
  for (const StackedExperts& experts : stacked) {
    adapters::ExpertLora& lora = *by_parameter.at(key_of(model, experts));
    const auto [a, b] =
        experts.factors(lora.experts(), lora.b().global_shape()[1], lora.a().global_shape()[2]);
    lora.set(a, b);
  }
}

/// The pairs on routed experts.
std::vector<ExpertPair> expert_pairs(Model& model, std::span<const LoraPair* const> pairs) {
  std::map<std::string, nn::ExpertWeights*> experts;
  model.visit_expert_weights(
      [&](nn::ExpertWeights& weights) { experts[weights.weight().name()] = &weights; });
  std::vector<ExpertPair> of_experts;
  for (const LoraPair* pair : pairs)
    if (const auto found = experts.find(key_of(model, *pair)); found != experts.end())
      of_experts.emplace_back(pair, found->second);
  return of_experts;
}

/// Adapters that begin without the values of a directory.
void say_of_new(const AdapterDirectory& directory, const Model& model,
                const adapters::LoraSet& set) {
  std::set<std::string> present;
  for (const LoraPair& pair : directory.pairs()) present.insert(key_of(model, pair));
  std::vector<std::string> added;
  for (const auto& lora : set.adapters())
    if (!present.contains(lora->module())) added.push_back(lora->module());
  for (const auto& lora : set.expert_adapters())
    if (!present.contains(lora->parameter())) added.push_back(lora->parameter());
  if (added.empty()) return;
  log::warning("{}: holds no factors of {} adapter(s), which begin anew: {}",
               directory.path().string(), added.size(), text::list_some(added));
}

}  // namespace

std::unique_ptr<adapters::LoraSet> load_adapter(
    const AdapterDirectory& directory, Model& model, const std::string& base,
    const std::function<void(adapters::LoraSet&)>& divide, bool keeps_head,
    std::optional<nn::ExpertFactors> expert_factors) {
  const ops::NoGradient guard;
  say_of_base(directory, base);
  say_of_vision(directory);
  std::vector<const LoraPair*> pairs, table_pairs;
  for (const LoraPair& pair : directory.pairs()) {
    const bool is_in_table = pair.is_embedding || (is_on_head(pair) && !keeps_head);
    (is_in_table ? table_pairs : pairs).push_back(&pair);
  }
  std::set<std::string> present;
  for (const LoraPair& pair : directory.pairs()) present.insert(pair.module);
  say_of_missing(directory, model, present);
  const std::vector<StackedExperts> stacked = stack_experts(pairs);
  std::vector<adapters::LoraSet::Module> modules;
  for (const LoraPair* pair : pairs)
    modules.push_back({key_of(model, *pair), pair->rank, pair->scaling});
  for (const StackedExperts& experts : stacked)
    modules.push_back({key_of(model, experts), experts.rank, 1});
  adapters::LoraOptions options;
  options.rank = directory.config().rank;
  options.alpha = directory.config().alpha;
  options.rslora = directory.config().use_rslora;
  options.expert_factors = expert_factors.value_or(nn::ExpertFactors::kPairs);
  if (!expert_factors && stacked.empty())
    options.expert_factors = expert_factors_of(directory, expert_pairs(model, pairs));
  auto set =
      std::make_unique<adapters::LoraSet>(adaptable(model), modules, options, model.context());
  if (divide) divide(*set);
  fill_factors(directory, model, pairs, stacked, *set);
  load_saved(directory, model);
  add_to_tables(directory, table_pairs, model);
  require_unchanged(stored_in(directory));
  return set;
}

void fill_adapter(const AdapterDirectory& directory, Model& model, const std::string& base,
                  adapters::LoraSet& set) {
  const ops::NoGradient guard;
  say_of_base(directory, base);
  std::vector<const LoraPair*> pairs;
  for (const LoraPair& pair : directory.pairs()) pairs.push_back(&pair);
  fill_factors(directory, model, pairs, {}, set);
  say_of_new(directory, model, set);
  const auto of_experts = expert_pairs(model, pairs);
  if (!of_experts.empty() && set.options().expert_factors == nn::ExpertFactors::kPairs &&
      expert_factors_of(directory, of_experts) == nn::ExpertFactors::kSharedOuter) {
    log::warning(
        "{}: the experts of a layer have a factor in common, and here each trains its own; "
        "adapter.shared_expert_factors=true goes on with one",
        directory.path().string());
  }
  load_saved(directory, model);
  require_unchanged(stored_in(directory));
}

}  // namespace heddle::ckpt
