#include "train/vocabulary.h"

#include <algorithm>

#include "base/errors.h"
#include "base/log.h"
#include "base/text.h"
#include "config/config.h"
#include "data/tokenizer/extend.h"

namespace heddle::train {

RunTokenizer load_tokenizer(const config::RunConfig& config, std::int64_t ids) {
  RunTokenizer result;
  result.source = ckpt::TokenizerSource(config.model.tokenizer.empty() ? config.model.path
                                                                       : config.model.tokenizer);
  if (config.model.added_tokens.empty()) {
    // A folder that the user names for it must have one.
    const bool is_named =
        config.is_set("model.tokenizer") && config.model.tokenizer != config.model.path;
    result.tokenizer = data::Tokenizer::load_if_there(result.source.directory, is_named ? 0 : ids);
    if (!result.tokenizer->has_texts() && !config.log.sample_prompts.empty()) {
      throw_error<ConfigError>("{}: {} has no tokenizer.json, so that no text can be answered",
                               config::where(config, "log.sample_prompts"),
                               result.source.directory.string());
    }
    return result;
  }
  data::ExtendedTokenizer extended;
  try {
    extended = data::extend_tokenizer(result.source.directory, config.model.added_tokens);
  } catch (const DataError& error) {
    throw_error<ConfigError>("{}: {}", config::where(config, "model.added_tokens"), error.what());
  }
  result.tokenizer = extended.tokenizer;
  result.source.changed = std::move(extended.changed);
  std::vector<std::string> added;
  for (const auto& [token, id] : extended.added)
    added.push_back(fmt::format("'{}' = {}", token, id));
  log::info("model.added_tokens: {}",
            added.empty() ? "the tokenizer has them already" : "new ids " + text::list_some(added));
  return result;
}

std::int64_t vocabulary_rows(const config::RunConfig& config, const data::Tokenizer& tokenizer,
                             std::int64_t checkpoint_rows) {
  const std::int64_t asked = config.model.resize_vocab, ids = tokenizer.vocab_size();
  if (asked > 0) {
    if (asked < checkpoint_rows) {
      throw_error<ConfigError>("{} is {}: the model already has {} rows, shrinking is not built",
                               config::where(config, "model.resize_vocab"), asked, checkpoint_rows);
    }
    if (asked < ids) {
      throw_error<ConfigError>("{} is {}: the tokenizer has ids up to {}, which need {} rows",
                               config::where(config, "model.resize_vocab"), asked, ids - 1, ids);
    }
    return asked;
  }
  if (ids <= checkpoint_rows) return checkpoint_rows;
  if (!config.model.added_tokens.empty()) return ids;
  throw_error<ModelError>(
      "the tokenizer has ids up to {}, the model has {} embedding rows; set model.resize_vocab to "
      "at least {}",
      ids - 1, checkpoint_rows, ids);
}

void check_added_tokens_trained(const config::RunConfig& config, const models::Config& model) {
  if (config.model.added_tokens.empty() || config.train.method != config::Method::kLora) return;
  std::vector<std::string> needed = {"embed_tokens"};
  const bool has_head = config.model.head == models::Head::kLanguageModel;
  if (has_head && !model.tie_word_embeddings) needed.push_back("lm_head");
  const auto& saved = config.adapter.modules_to_save;
  const bool all = std::all_of(needed.begin(), needed.end(), [&](const std::string& module) {
    return std::find(saved.begin(), saved.end(), module) != saved.end();
  });
  if (all) return;
  throw_error<ConfigError>(
      "{}: with train.method lora the rows of new tokens stay as they are, because adapters sit on "
      "linear layers; train them with adapter.modules_to_save: [{}]",
      config::where(config, "model.added_tokens"), text::join(needed, ", "));
}

}  // namespace heddle::train
