#include <algorithm>
#include <map>
#include <utility>

#include "base/errors.h"
#include "base/files.h"
#include "ckpt/adapter_directory.h"
#include "ckpt/staging_directory.h"

namespace heddle::ckpt {
namespace {

/// The module name under which PEFT finds a pair again: parameters of one module are wrapped in
/// each other.
std::string wrapped_module(const AdapterConfig& config, const std::string& module,
                           const std::string& parameter) {
  if (parameter.empty()) {
    if (!config.targets(module)) {
      throw_error<InternalError>("LoRA on '{}', which target_modules does not name", module);
    }
    return module;
  }
  const auto parameters = targeted_parameters(config, module);
  std::string wrapped = module;
  for (auto name = parameters.rbegin(); name != parameters.rend(); ++name) {
    if (*name == parameter) return wrapped;
    wrapped += ".base_layer";
  }
  throw_error<InternalError>("LoRA on '{}.{}', which target_parameters does not name", module,
                             parameter);
}

void check_rank(const AdapterConfig& config, const std::string& key,
                const AdapterTensors::Pair& pair, AdapterForm form) {
  const std::int64_t rank = config.rank_of(key);
  const bool is_pair = pair.a.dim() == 2 && pair.b.dim() == 2 &&
                       makes_pair(pair.a.size(0), pair.b.size(1), rank, pair.parameter, form);
  const std::int64_t rows = is_pair ? std::max(pair.a.size(0), pair.b.size(1)) : 0;
  const bool fits = is_pair && (pair.parameter.empty() ? rows == rank : rows % rank == 0);
  if (!fits) {
    throw_error<InternalError>(
        "LoRA on '{}': A is [{}] and B is [{}], the configuration's rank is {}", key,
        fmt::join(pair.a.sizes(), ", "), fmt::join(pair.b.sizes(), ", "), rank);
  }
}

}  // namespace

void write_adapter(const Path& path, const AdapterConfig& config, const AdapterTensors& tensors,
                   AdapterSpelling spelling, std::optional<at::ScalarType> dtype,
                   const TokenizerSource& tokenizer, bool overwrite, const Files& files,
                   const AddFiles& add_files) {
  std::map<std::string, at::Tensor> by_name;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (!by_name.emplace(std::string(kAdapterPrefix) + name, tensor).second) {
      throw_error<InternalError>("the adapter holds '{}' twice", name);
    }
  };
  for (const AdapterTensors::Pair& pair : tensors.pairs) {
    const std::string module = to_spelling(pair.module, spelling);
    check_rank(config, pair.parameter.empty() ? module : module + "." + pair.parameter, pair,
               tensors.form);
    const std::string wrapped = wrapped_module(config, module, pair.parameter);
    add(wrapped + ".lora_A.weight", pair.a);
    add(wrapped + ".lora_B.weight", pair.b);
  }
  for (const NamedTensor& saved : tensors.saved) {
    std::string name = to_spelling(saved.name, spelling);
    // Under LoRA, PEFT keeps the module's own parameters one level deeper.
    const auto dot = name.rfind('.');
    const std::string module = std::string(kAdapterPrefix) + name.substr(0, dot);
    if (dot != std::string::npos && by_name.contains(module + ".lora_A.weight")) {
      name.insert(dot, ".base_layer");
    }
    add(name, saved.tensor);
  }

  check_output_directory(path, overwrite, kAdapterConfig);
  const Path place = output_place(path);
  StagingDirectory staging(place, place.string() + ".tmp");
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : by_name) specs.push_back(spec_of(name, tensor, dtype));
  const bool is_compact = tensors.form == AdapterForm::kCompact;
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  if (is_compact) metadata[kExpertFactorsKey] = kSharedOuter;
  SafetensorsWriter writer(staging.path() / (is_compact ? kCompactWeights : kPeftWeights),
                           std::move(specs), metadata);
  for (const TensorSpec& spec : writer.order()) {
    append_tensor(writer, spec.name, by_name.at(spec.name), spec.dtype);
  }
  writer.commit();
  files::write_atomically(staging.path() / kAdapterConfig, config.to_json().dump(2) + "\n");
  if (!tokenizer.directory.empty()) copy_tokenizer(tokenizer, staging.path());
  write_files(files, staging.path());
  if (add_files) add_files(staging.path());
  AdapterDirectory::open(staging.path());  // what cannot be read back must not take the final name
  staging.commit();
}

}  // namespace heddle::ckpt
