#include "assembly/recipe.h"

#include <algorithm>

#include "base/errors.h"
#include "ckpt/config_bounds.h"
#include "ckpt/hf_adapter.h"
#include "ckpt/hf_model.h"
#include "ckpt/hf_vocabulary.h"
#include "ckpt/label_names.h"
#include "parallel/layout.h"

namespace heddle::assembly {

ModelConfig read_config(const ckpt::ModelDirectory& source) {
  ModelConfig config = ckpt::read_model_config(source);
  ckpt::require_size_of_files(config, source);
  return config;
}

namespace {

/// Number and names of the classes: the adapter's, else those of config.json.
void set_labels(ModelRecipe& recipe, const std::filesystem::path& directory) {
  recipe.num_labels = std::max<std::int64_t>(1, recipe.config.num_labels);
  if (const auto* adapter = std::get_if<AdapterFiles>(&recipe.adapters)) {
    if (const std::int64_t rows = ckpt::label_rows(**adapter); rows > 0) recipe.num_labels = rows;
    recipe.label_names = ckpt::label_names_of_adapter((*adapter)->path());
    if (!recipe.label_names.empty() && std::ssize(recipe.label_names) != recipe.num_labels) {
      throw_error<ModelError>("{}: names {} classes, the head has {}: expected one for each",
                              ((*adapter)->path() / ckpt::kLabelNamesFile).string(),
                              recipe.label_names.size(), recipe.num_labels);
    }
  }
  if (!recipe.label_names.empty()) return;
  recipe.label_names =
      ckpt::label_names(recipe.source->config(), (directory / "config.json").string());
  if (std::ssize(recipe.label_names) != recipe.num_labels) recipe.label_names.clear();
}

}  // namespace

ModelRecipe recipe_of_directory(const std::filesystem::path& directory,
                                const std::filesystem::path& adapter, Head head, Purpose purpose) {
  ModelRecipe recipe;
  recipe.source =
      std::make_shared<const ckpt::ModelDirectory>(ckpt::ModelDirectory::open(directory));
  recipe.weights = Weights::kDirectory;
  recipe.config = read_config(*recipe.source);
  recipe.prefix = ckpt::text_prefix(*recipe.source, recipe.config);
  recipe.head = head;
  recipe.purpose = purpose;
  if (!adapter.empty()) {
    const auto put_on =
        std::make_shared<const ckpt::AdapterDirectory>(ckpt::AdapterDirectory::open(adapter));
    recipe.config.vocab_size = std::max(recipe.config.vocab_size, ckpt::vocabulary_rows(*put_on));
    if (head == Head::kLanguageModel && ckpt::unties_head(*put_on))
      recipe.config.tie_word_embeddings = false;
    recipe.adapters = put_on;
  }
  if (head == Head::kClassify) set_labels(recipe, directory);
  return recipe;
}

void check_layout(const ModelRecipe& recipe, const comm::Mesh& mesh) {
  parallel::check_layout(mesh, recipe.config, recipe.context_method, recipe.pipeline_chunks);
}

}  // namespace heddle::assembly
