#include "train/setup.h"

#include <utility>

#include "assembly/from_config.h"
#include "base/text.h"
#include "comm/agreement.h"
#include "config/objective.h"
#include "train/sources.h"
#include "train/vocabulary.h"

namespace heddle::train {
namespace {

/// The rows as tokens: content, tokenizer, template and options.
comm::Fact fact_of(const std::string& key, const data::Dataset& data) {
  std::vector<std::string> files;
  for (const data::Dataset::File& file : data.files())
    files.push_back(fmt::format("{} with {} rows", file.path, file.rows));
  return comm::content_fact(key, data.key(), text::list_some(files));
}

void require_same_data(const Setup& setup, comm::World* world) {
  if (world == nullptr) return;
  std::vector<comm::Fact> facts = {fact_of("data.train", *setup.train)};
  if (setup.eval) facts.push_back(fact_of("data.eval", *setup.eval));
  comm::require_agreement(*world, "data", facts);
}

void open_data(const config::RunConfig& config, Observer& observer, Setup& setup) {
  const auto progress = [&](const data::TokenizeProgress& p) {
    observer.on_tokenize(p.file, p.fraction, p.rows);
  };
  const data::DatasetOptions train = dataset_options(config, DataPart::kTrain);
  const data::DatasetOptions eval = dataset_options(config, DataPart::kEval);
  const bool has_eval = !eval.files.empty();
  if (has_eval) data::require_files(eval);  // said before the training data are tokenised
  setup.train = data::Dataset::open(train, *setup.tokenizer, progress);
  if (has_eval) setup.eval = data::Dataset::open(eval, *setup.tokenizer, progress);
}

}  // namespace

Setup make_setup(const config::RunConfig& config, Observer& observer,
                 std::shared_ptr<comm::World> world) {
  Setup setup;
  const runtime::Context context = assembly::make_context(config, std::move(world));
  const auto source =
      std::make_shared<const ckpt::ModelDirectory>(ckpt::ModelDirectory::open(config.model.path));
  assembly::ModelRecipe recipe =
      assembly::recipe_of_run(config, assembly::read_config(*source), source);
  assembly::check_layout(recipe, context.mesh);  // said before data are tokenised

  check_added_tokens_trained(config, recipe.config);
  const bool generates = config::objective_of(config) == config::Objective::kPolicy;
  RunTokenizer tokenizer = load_tokenizer(config, generates ? 0 : recipe.config.vocab_size);
  setup.tokenizer = tokenizer.tokenizer;
  setup.tokenizer_source = std::move(tokenizer.source);
  const auto* adapters = std::get_if<assembly::NewAdapters>(&recipe.adapters);
  setup.sources = contents_of(*source, setup.tokenizer_source,
                              adapters != nullptr ? adapters->start.get() : nullptr);
  recipe.config.vocab_size = vocabulary_rows(config, *setup.tokenizer, recipe.config.vocab_size);
  if (!generates) {
    open_data(config, observer, setup);
    require_same_data(setup, context.mesh.world().get());
  }
  setup.placed = assembly::place(recipe, context);
  return setup;
}

}  // namespace heddle::train
