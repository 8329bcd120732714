#include "ckpt/adapter_directory.h"

#include <algorithm>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include "base/errors.h"
#include "base/quote.h"
#include "base/text.h"
#include "ckpt/model_directory.h"
#include "ckpt/training_checkpoint.h"

namespace heddle::ckpt {
namespace {

constexpr std::string_view kA = ".lora_A.weight";
constexpr std::string_view kB = ".lora_B.weight";
constexpr std::string_view kEmbeddingA = ".lora_embedding_A";
constexpr std::string_view kEmbeddingB = ".lora_embedding_B";
constexpr std::string_view kBaseLayer = ".base_layer";

/// `name` without the name of the adapter that a state_dict has and save_pretrained() leaves out:
/// "x.lora_A.default.weight", "x.lora_embedding_A.default", "x.modules_to_save.default.weight".
std::string without_adapter_name(std::string name) {
  const auto erase_part = [&](std::size_t begin, std::size_t end) {
    name.erase(begin, (end == std::string::npos ? name.size() : end) - begin);
  };
  for (const std::string_view half : {".lora_A.", ".lora_B."}) {
    const std::size_t at = name.rfind(half);
    if (at == std::string::npos) continue;
    const std::size_t begin = at + half.size(), end = name.find('.', begin);
    if (end != std::string::npos) erase_part(begin, end + 1);
  }
  for (const std::string_view half : {kEmbeddingA, kEmbeddingB}) {
    const std::size_t at = name.rfind(half);
    if (at != std::string::npos) erase_part(at + half.size(), std::string::npos);
  }
  return name;
}

/// Sorts the tensors of an adapter file into pairs and saved parameters and collects what is wrong.
class Sorter {
 public:
  Sorter(const SafetensorsFile& file, const AdapterConfig& config, AdapterForm form)
      : file_(file), config_(config), form_(form) {}

  void run() {
    for (const StoredTensor& tensor : file_.tensors()) sort(tensor);
    for (auto& [module, halves] : halves_) make_pair(module, halves);
    if (!spellings_.empty() && spellings_.size() > 1) {
      wrong_.push_back("modules are spelled for more than one model class (" +
                       text::join({examples_.begin(), examples_.end()}, ", ") + ")");
    }
    if (!wrong_.empty()) {
      throw_error<ModelError>("{}: {}", file_.path().string(), text::list_some(wrong_));
    }
    if (pairs.empty() && saved.empty() && vision_pairs.empty() && vision_saved.empty()) {
      throw_error<ModelError>("{}: holds no tensor", file_.path().string());
    }
  }

  AdapterSpelling spelling() const {
    return spellings_.empty() ? AdapterSpelling::kText : *spellings_.begin();
  }

  std::vector<LoraPair> pairs, vision_pairs;
  std::vector<SavedParameter> saved, vision_saved;

 private:
  struct Halves {
    const StoredTensor* a = nullptr;
    const StoredTensor* b = nullptr;
    bool is_embedding = false;
  };

  void sort(const StoredTensor& tensor) {
    if (!tensor.name.starts_with(kAdapterPrefix)) {
      wrong_.push_back(fmt::format("'{}' does not begin with '{}'", tensor.name, kAdapterPrefix));
      return;
    }
    if (!is_plain_float(tensor.dtype)) {
      wrong_.push_back(fmt::format("'{}' is {}, expected F32, BF16, F16 or F64", tensor.name,
                                   name_of(tensor.dtype)));
      return;
    }
    const std::string name = without_adapter_name(tensor.name.substr(kAdapterPrefix.size()));
    if (const auto spelling = spelling_of(name)) {
      if (spellings_.insert(*spelling).second) examples_.push_back(tensor.name);
    }
    if (name.ends_with(kA) || name.ends_with(kEmbeddingA)) {
      add_half(&Halves::a, name, name.ends_with(kA) ? kA : kEmbeddingA, tensor);
    } else if (name.ends_with(kB) || name.ends_with(kEmbeddingB)) {
      add_half(&Halves::b, name, name.ends_with(kB) ? kB : kEmbeddingB, tensor);
    } else if (name.find("lora_") != std::string::npos) {
      wrong_.push_back(
          fmt::format("'{}' is of a kind of LoRA that is not supported (DoRA, bias or convolution)",
                      tensor.name));
    } else {
      save(tensor, name);
    }
  }

  void add_half(const StoredTensor* Halves::*half, const std::string& name, std::string_view ending,
                const StoredTensor& tensor) {
    Halves& halves = halves_[name.substr(0, name.size() - ending.size())];
    if (halves.*half != nullptr) {
      wrong_.push_back(fmt::format("'{}' and '{}' are of two adapters: give one of them",
                                   (halves.*half)->name, tensor.name));
    }
    halves.*half = &tensor;
    halves.is_embedding = ending == kEmbeddingA || ending == kEmbeddingB;
  }

  void save(const StoredTensor& tensor, std::string name) {
    // A state_dict, and old versions of PEFT, keep the name of the wrapper, which may stand above a
    // whole block: "linear_attn.modules_to_save.default.conv1d.weight".
    constexpr std::string_view kWrapper = ".modules_to_save.";
    if (const auto at = name.rfind(kWrapper); at != std::string::npos) {
      name.replace(at, kWrapper.size(), ".");
      constexpr std::string_view kDefault = "default.";
      if (name.compare(at + 1, kDefault.size(), kDefault) == 0) name.erase(at + 1, kDefault.size());
    }
    const std::string base = std::string(kBaseLayer) + ".";
    const auto at = name.rfind(base);
    const bool is_wrapped = at != std::string::npos;
    if (is_wrapped) name.replace(at, base.size(), ".");
    const std::string module = name.substr(0, name.rfind('.'));
    const bool is_listed = !is_wrapped && is_saved_whole(config_.modules_to_save, name);
    const bool is_vocabulary = module.ends_with("embed_tokens") || module.ends_with("lm_head");
    if (!is_listed && !is_vocabulary) {
      wrong_.push_back(fmt::format("'{}' is neither LoRA nor in modules_to_save", tensor.name));
      return;
    }
    SavedParameter parameter{to_text_spelling(name), tensor, !is_listed};
    (is_vision(parameter.name) ? vision_saved : saved).push_back(std::move(parameter));
  }

  void make_pair(const std::string& full, const Halves& halves) {
    if (!halves.a || !halves.b) {
      const StoredTensor& tensor = *(halves.a ? halves.a : halves.b);
      wrong_.push_back(fmt::format("'{}' has no {}", tensor.name, halves.a ? "lora_B" : "lora_A"));
      return;
    }
    std::string module = full;
    std::size_t depth = 0;
    while (std::string_view(module).ends_with(kBaseLayer)) {
      module.resize(module.size() - kBaseLayer.size());
      ++depth;
    }
    LoraPair pair;
    const auto parameters = targeted_parameters(config_, module);
    if (depth < parameters.size()) {
      pair.parameter = parameters[parameters.size() - 1 - depth];
    } else if (depth > 0 || !(config_.targets(module) || is_tied_with_target(module))) {
      wrong_.push_back(
          fmt::format("'{}' is on a module that target_modules does not name", halves.a->name));
      return;
    }
    const std::string key = pair.parameter.empty() ? module : module + "." + pair.parameter;
    // The weight of a linear layer, named as a parameter (a router): the layer's own adapter.
    if (pair.parameter == "weight") pair.parameter.clear();
    pair.module = to_text_spelling(module);
    pair.is_embedding = halves.is_embedding;
    pair.a = *halves.a;
    pair.b = *halves.b;
    pair.rank = config_.rank_of(key);
    pair.scaling = config_.scaling_of(key);
    check_shapes(pair);
    (is_vision(pair.module) ? vision_pairs : pairs).push_back(std::move(pair));
  }

  /// ensure_weight_tying writes the adapter of one table for the other too.
  bool is_tied_with_target(const std::string& module) const {
    const bool is_table = module.ends_with("embed_tokens") || module == "lm_head";
    return config_.ensure_weight_tying && is_table;
  }

  void check_shapes(const LoraPair& pair) {
    if (pair.a.shape.size() != 2 || pair.b.shape.size() != 2 ||
        !makes_pair(pair.a.shape[0], pair.b.shape[1], pair.rank, pair.parameter, form_)) {
      wrong_.push_back(
          fmt::format("'{}' is [{}] and its B is [{}], expected [rank, in] and [out, rank]",
                      pair.a.name, fmt::join(pair.a.shape, ", "), fmt::join(pair.b.shape, ", ")));
      return;
    }
    const std::int64_t rows = std::max(pair.a.shape[0], pair.b.shape[1]);
    const bool fits =
        pair.parameter.empty() ? rows == pair.rank : rows > 0 && rows % pair.rank == 0;
    if (!fits) {
      wrong_.push_back(fmt::format("'{}' has rank {}, {} says {}", pair.a.name, rows,
                                   kAdapterConfig, pair.rank));
    }
  }

  const SafetensorsFile& file_;
  const AdapterConfig& config_;
  AdapterForm form_;
  std::map<std::string, Halves> halves_;
  std::set<AdapterSpelling> spellings_;
  std::vector<std::string> examples_;
  std::vector<std::string> wrong_;
};

/// The file with the factors. Throws ModelError.
Path find_weights(const Path& path) {
  std::error_code ignored;
  const bool has_peft = std::filesystem::exists(path / kPeftWeights, ignored),
             has_compact = std::filesystem::exists(path / kCompactWeights, ignored);
  if (has_peft && has_compact) {
    throw_error<ModelError>("{}: holds {} and {}, which may be two adapters: remove one",
                            path.string(), kPeftWeights, kCompactWeights);
  }
  if (has_peft || has_compact) return path / (has_peft ? kPeftWeights : kCompactWeights);
  const bool has_pickle = std::filesystem::exists(path / "adapter_model.bin", ignored);
  throw_error<ModelError>(
      "{}: {} is missing{}", path.string(), kPeftWeights,
      has_pickle ? "; adapter_model.bin is a pickle, which can run code when it is read: load it "
                   "once with PEFT and save_pretrained() it"
                 : "");
}

/// A compact file says what the experts share. Throws ModelError.
void require_known_sharing(const SafetensorsFile& file) {
  const auto found = file.metadata().find(kExpertFactorsKey);
  const std::string shared = found == file.metadata().end() ? "" : found->second;
  if (shared == kSharedOuter) return;
  throw_error<ModelError>("{}: metadata '{}' is '{}', this program reads '{}'",
                          file.path().string(), kExpertFactorsKey, text::shown(shared),
                          kSharedOuter);
}

}  // namespace

bool makes_pair(std::int64_t rows, std::int64_t columns, std::int64_t rank,
                const std::string& parameter, AdapterForm form) {
  if (rows == columns) return true;
  return form == AdapterForm::kCompact && !parameter.empty() && std::min(rows, columns) == rank;
}

bool AdapterDirectory::is_one(const Path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path / kAdapterConfig, ignored);
}

AdapterDirectory AdapterDirectory::open(const Path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(path, ignored)) {
    throw_error<ModelError>("{}: there is no such adapter folder", path.string());
  }
  if (!is_one(path)) {
    const Path result = path / "final";
    std::string hint;
    if (is_one(result))
      hint = "; the adapter of this run is " + result.string();
    else if (is_training_checkpoint(path))
      hint = fmt::format("; make one of this checkpoint with `heddle export {} --output DIR`",
                         path.string());
    else if (std::filesystem::exists(path / "config.json", ignored))
      hint = "; it is the folder of a model";
    throw_error<ModelError>("{}: {} is missing: not a PEFT adapter folder{}", path.string(),
                            kAdapterConfig, hint);
  }
  AdapterDirectory adapter;
  adapter.path_ = path;
  adapter.config_ = AdapterConfig::from_json(read_json_object(path / kAdapterConfig),
                                             (path / kAdapterConfig).string());
  const SafetensorsFile file(find_weights(path), path);
  if (file.path().filename() == kCompactWeights) {
    adapter.form_ = AdapterForm::kCompact;
    require_known_sharing(file);
  }
  Sorter sorter(file, adapter.config_, adapter.form_);
  sorter.run();
  adapter.spelling_ = sorter.spelling();
  adapter.pairs_ = std::move(sorter.pairs);
  adapter.saved_ = std::move(sorter.saved);
  adapter.vision_pairs_ = std::move(sorter.vision_pairs);
  adapter.vision_saved_ = std::move(sorter.vision_saved);
  return adapter;
}

}  // namespace heddle::ckpt
