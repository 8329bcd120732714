#include "rl/prompts.h"

#include <algorithm>
#include <numeric>
#include <string_view>

#include "base/errors.h"
#include "base/hash.h"
#include "base/rng.h"
#include "base/text.h"
#include "data/readers/jsonl_reader.h"
#include "data/readers/record_reader.h"
#include "data/rendering/renderer.h"
#include "reward/verifiers.h"

namespace heddle::rl {
namespace {

/// The value at "a" or, in nested objects, "a.b"; null where there is none.
Json value_at(const Json& row, const std::string& field) {
  const Json* value = &row;
  for (const std::string& part : text::split(field, '.')) {
    const auto found = value->is_object() ? value->find(part) : value->end();
    if (!value->is_object() || found == value->end()) return nullptr;
    value = &*found;
  }
  return *value;
}

/// The part of a row that is rendered.
data::Row row_of(const Json& value, const data::RowOptions& options, bool has_template) {
  data::RowOptions prompts = options;
  prompts.task = data::Task::kEmbedding;  // nothing of the row itself is learned
  prompts.format = data::RowFormat::kMessages;
  const auto conversation = [&](const Json& messages) {
    Json object = {{options.fields.messages, messages}};
    if (value.contains(options.fields.tools))
      object[options.fields.tools] = value[options.fields.tools];
    return data::parse_row(object, prompts);
  };
  if (value.contains(options.fields.messages)) return conversation(value[options.fields.messages]);
  const auto prompt = value.find(options.fields.prompt);
  if (prompt == value.end()) {
    throw_error<DataError>("the row has neither '{}' nor '{}'", options.fields.prompt,
                           options.fields.messages);
  }
  if (prompt->is_array()) return conversation(*prompt);
  if (!prompt->is_string()) {
    throw_error<DataError>("field '{}': expected a text or a list of messages, found {}",
                           options.fields.prompt, prompt->dump());
  }
  if (has_template) return conversation(Json::array({{{"role", "user"}, {"content", *prompt}}}));
  data::Row row;
  row.text = prompt->get<std::string>();
  return row;
}

/// A conversation up to the answer that a prompt waits for.
Json without_answer(Json messages) {
  while (!messages.empty() && messages.back().value("role", "") == "assistant")
    messages.erase(messages.size() - 1);
  return messages;
}

/// The value that rewards compare with. Throws where the run needs it and the row has none.
Json truth_of(const Json& row, const config::RunConfig& config) {
  const std::string& field = config.data.fields.answer;
  Json truth = value_at(row, field);
  if (!truth.is_null()) return truth;
  std::string why;
  for (const auto& [name, weight] : config.rl.reward.verifiers) {
    if (reward::needs_truth(name)) why = "which the verifier " + name + " compares with";
  }
  if (why.empty() && field != config::DataFields().answer) why = "which data.fields.answer names";
  if (why.empty()) return truth;
  std::vector<std::string> fields;
  for (const auto& [name, value] : row.items()) fields.push_back(name);
  throw_error<DataError>("the row has no '{}', {}; it has {} (set data.fields.answer)", field, why,
                         text::join(fields, ", "));
}

/// Whatever else a reward may want to know: the field of data.fields.meta, and the verifier that
/// the row names; a row without that field gives all fields that nothing else reads.
Json meta_of(const Json& row, const config::DataFields& fields) {
  Json meta = value_at(row, fields.meta);
  if (meta.is_object()) {
    const auto verifier = row.find("verifier");
    if (verifier != row.end() && !meta.contains("verifier")) meta["verifier"] = *verifier;
  }
  if (!meta.is_null()) return meta;
  const std::string first_of_answer = fields.answer.substr(0, fields.answer.find('.'));
  for (const auto& [name, value] : row.items()) {
    const bool is_read = name == fields.prompt || name == fields.messages || name == fields.tools ||
                         name == first_of_answer;
    if (!is_read) meta[name] = value;
  }
  return meta;
}

}  // namespace

Prompts::Prompts(const config::RunConfig& config, train::DataPart part,
                 const data::Tokenizer& tokenizer)
    : tokenizer_(tokenizer),
      max_length_(config.data.max_length),
      max_new_tokens_(config.rollout.max_new_tokens),
      renders_history_(config.rl.history == config::History::kRender),
      seed_(config.train.seed),
      shuffles_(config.data.shuffle) {
  const data::DatasetOptions options = train::dataset_options(config, part);
  if (options.files.empty() && part == train::DataPart::kEval) return;
  data::require_files(options);
  reader_ = options.reader;
  renderer_ = std::make_unique<data::Renderer>(tokenizer, options.rendering);
  has_template_ = !options.rendering.chat_template.empty() || tokenizer.chat_template().has_value();
  hash::Hasher hasher;
  for (const data::DataFile& file : options.files) {
    const auto records = data::RecordReader::open(file.path);
    std::string line;
    while (records->next(line)) {
      const data::Place place{records->name(), records->line()};
      const Json value = data::parse_json_line(line, place, options.reader);
      Prompt prompt;
      try {
        prompt.tokens = tokenize(value);
        prompt.truth = truth_of(value, config);
        prompt.meta = meta_of(value, config.data.fields);
        prompt.tools = value_at(value, config.data.fields.tools);
        prompt.messages = conversation_of(value);
      } catch (const DataError& error) {
        throw_error<DataError>("{}:{}: {}", place.file, place.line, error.what());
      }
      prompt.text = tokenizer.decode(prompt.tokens, /*skip_special_tokens=*/true);
      hasher.add(line);
      rows_.push_back(std::move(prompt));
    }
  }
  if (rows_.empty()) throw_error<DataError>("{}: there is no row", options.files_key);
  key_ = hasher.add(std::to_string(seed_)).add(shuffles_ ? "shuffled" : "in order").hex();
}

std::vector<std::int32_t> Prompts::tokenize(const Json& row) const {
  std::vector<std::int32_t> tokens =
      renderer_->tokenize_prompt(row_of(row, reader_, has_template_));
  if (tokens.empty()) throw DataError("the prompt has no token");
  const std::int64_t longest = max_length_ - max_new_tokens_;
  if (std::ssize(tokens) > longest) {
    throw_error<DataError>(
        "the prompt has {} tokens: expected at most {}, data.max_length {} less "
        "rollout.max_new_tokens {}",
        tokens.size(), longest, max_length_, max_new_tokens_);
  }
  return tokens;
}

Opening Prompts::opening(std::int64_t row, const Json& prompt) const {
  Json object = {{reader_.fields.prompt, prompt}};
  const Json& tools = this->row(row).tools;
  if (!tools.is_null()) object[reader_.fields.tools] = tools;
  Opening opening{.tokens = tokenize(object)};
  opening.text = tokenizer_.decode(opening.tokens, /*skip_special_tokens=*/true);
  opening.messages = conversation_of(object);
  return opening;
}

Json Prompts::conversation_of(const Json& row) const {
  if (!renders_history_) return nullptr;
  const data::FieldNames& fields = reader_.fields;
  if (row.contains(fields.messages)) return without_answer(row[fields.messages]);
  const Json& prompt = row.at(fields.prompt);
  if (prompt.is_array()) return without_answer(prompt);
  if (!has_template_) {
    throw DataError(
        "rl.history render renders conversations, and the prompt is a text without a chat "
        "template: expected append, or data.chat_template");
  }
  return Json::array({{{"role", "user"}, {"content", prompt}}});
}

std::vector<std::int32_t> Prompts::history(const Group& group, const Json& messages) const {
  const Prompt& prompt = row(group.row);
  Json all = group.opening ? group.opening->messages : prompt.messages;
  for (const Json& message : messages) all.push_back(message);
  Json object = {{reader_.fields.messages, std::move(all)}};
  if (!prompt.tools.is_null()) object[reader_.fields.tools] = prompt.tools;
  return renderer_->tokenize_prompt(row_of(object, reader_, has_template_));
}

std::int64_t Prompts::index_of(std::int64_t cursor) const {
  const std::int64_t epoch = cursor / size();
  if (!shuffles_) return cursor % size();
  if (epoch != epoch_) {
    epoch_ = epoch;
    order_.resize(rows_.size());
    std::iota(order_.begin(), order_.end(), 0);
    const CounterRng rng(seed_, fmt::format("prompts/epoch/{}", epoch));
    std::ranges::sort(order_, {},
                      [&](std::int64_t row) { return rng.bits(static_cast<std::uint64_t>(row)); });
  }
  return order_[static_cast<std::size_t>(cursor % size())];
}

std::int64_t Prompts::tokens() const {
  std::int64_t sum = 0;
  for (const Prompt& row : rows_) sum += std::ssize(row.tokens);
  return sum;
}

}  // namespace heddle::rl
