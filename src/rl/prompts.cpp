#include "rl/prompts.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>

#include "base/errors.h"
#include "base/hash.h"
#include "base/rng.h"
#include "base/text.h"
#include "data/readers/field_at.h"
#include "data/readers/jsonl_reader.h"
#include "data/readers/record_reader.h"
#include "data/rendering/renderer.h"
#include "reward/verifiers.h"
#include "rl/reward_options.h"

namespace heddle::rl {
namespace {

/// The part of a row that is rendered.
data::Row row_of(const Json& value, const data::RowOptions& options, bool has_template) {
  data::RowOptions prompts = options;
  prompts.task = data::Task::kEmbedding;  // nothing of the row itself is learned
  prompts.format = data::RowFormat::kMessages;
  const auto conversation = [&](const std::string& field, const Json& messages) {
    prompts.fields.messages = field;
    Json object = {{field, messages}};
    if (value.contains(options.fields.tools))
      object[options.fields.tools] = value[options.fields.tools];
    return data::parse_row(object, prompts);
  };
  if (const Json messages = value.value(options.fields.messages, Json()); !messages.is_null())
    return conversation(options.fields.messages, messages);
  const auto prompt = value.find(options.fields.prompt);
  if (prompt == value.end()) {
    throw_error<DataError>("the row has neither '{}' nor '{}'", options.fields.prompt,
                           options.fields.messages);
  }
  if (prompt->is_array()) return conversation(options.fields.prompt, *prompt);
  if (!prompt->is_string()) {
    throw_error<DataError>("field '{}': expected a text or a list of messages, found {}",
                           options.fields.prompt, prompt->dump());
  }
  if (has_template) {
    return conversation(options.fields.prompt,
                        Json::array({{{"role", "user"}, {"content", *prompt}}}));
  }
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
  Json truth = data::field_at(row, field);
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
  Json meta = data::field_at(row, fields.meta);
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

/// Verifiers that every row is shown to before the run begins; null where a program, a server or an
/// environment judges.
std::unique_ptr<reward::Reward> judge_of_rows(const config::RlReward& section) {
  if (section.verifiers.empty()) return nullptr;
  reward::RewardOptions options = reward_options(section);
  // A product of parts may be no number because of the completion.
  options.combine = reward::Combine::kSum;
  return reward::make_reward(options);
}

void require_judgeable(reward::Reward& judge, const Prompt& prompt) {
  const reward::Sample sample{
      .id = prompt.place, .prompt = prompt.text, .truth = prompt.truth, .meta = prompt.meta};
  const reward::Score score = judge.score({&sample, 1}).front();
  if (score.error) throw_error<DataError>("no completion could be judged: {}", *score.error);
}

std::string content_of(const std::vector<Prompt>& rows) {
  hash::Hasher hasher;
  for (const Prompt& row : rows) {
    hasher.add({reinterpret_cast<const char*>(row.tokens.data()),
                row.tokens.size() * sizeof(row.tokens.front())});
    // Rows of Latin-1 and the like have texts that are no UTF-8.
    for (const Json* part : {&row.truth, &row.meta, &row.tools})
      hasher.add(part->dump(-1, ' ', false, Json::error_handler_t::replace));
  }
  return hasher.hex();
}

}  // namespace

Prompts::Prompts(const config::RunConfig& config, train::DataPart part,
                 const data::Tokenizer& tokenizer)
    : tokenizer_(tokenizer),
      max_length_(config.data.max_length),
      max_new_tokens_(config.rollout.max_new_tokens),
      renders_history_(config.rl.history == config::History::kRender),
      truncation_(config.data.truncation),
      seed_(config.train.seed),
      shuffles_(config.data.shuffle) {
  const data::DatasetOptions options = train::dataset_options(config, part);
  if (options.files.empty() && part == train::DataPart::kEval) return;
  data::require_files(options);
  reader_ = options.reader;
  renderer_ = std::make_unique<data::Renderer>(tokenizer, options.rendering);
  has_template_ = !options.rendering.chat_template.empty() || tokenizer.chat_template().has_value();
  const std::unique_ptr<reward::Reward> judge = judge_of_rows(config.rl.reward);
  hash::Hasher hasher;
  for (const data::DataFile& file : options.files) {
    const std::int64_t first = size();
    read(file.path, config, options, judge.get(), hasher);
    files_.push_back({first, size() - first, options.takes_held_out ? 1 : file.weight});
    if (file.weight != 1) hasher.add(fmt::format("{} {}", size() - first, file.weight));
  }
  if (rows_.empty()) {
    if (options.takes_held_out) {
      throw_error<DataError>("data.eval: the share {} of data.train has no row{}", options.held_out,
                             report_.left_out());
    }
    throw_error<DataError>("{}: there is no row{}", options.files_key, report_.left_out());
  }
  per_epoch_ = std::ssize(data::rows_of_epoch(files_, seed_, 0));
  if (per_epoch_ == 0)
    throw_error<DataError>("{}: the weights of the files leave no row in an epoch",
                           options.files_key);
  content_ = content_of(rows_);
  key_ = hasher.add(std::to_string(seed_)).add(shuffles_ ? "shuffled" : "in order").hex();
}

void Prompts::read(const std::string& path, const config::RunConfig& config,
                   const data::DatasetOptions& options, reward::Reward* judge,
                   hash::Hasher& hasher) {
  const auto records = data::RecordReader::open(path, options.reader.max_line_bytes);
  std::string line;
  const auto bad = [&](const std::string& message) {
    if (options.bad_rows == data::BadRowPolicy::kError) throw DataError(message);
    data::DatasetReport one;
    one.bad_rows = 1;
    one.bad_examples = {message};
    report_.add(one);
  };
  while (true) {
    try {
      if (!records->next(line)) break;
    } catch (const data::UnusableRow& error) {
      ++report_.lines;
      bad(error.what());
      continue;
    }
    const bool is_of_other_part =
        options.held_out > 0 && data::is_held_out(line, options.held_out) != options.takes_held_out;
    if (is_of_other_part) continue;
    ++report_.lines;
    const data::Place place{records->name(), records->line()};
    const std::string named = fmt::format("{}:{}", place.file, place.line);
    Json row;
    try {
      row = data::parse_json_line(line, place, options.reader);
    } catch (const DataError& error) {
      bad(error.what());
      continue;
    }
    try {
      Prompt prompt = prompt_of(row, config);
      prompt.place = named;
      if (!fit(prompt.tokens)) {
        ++report_.dropped_long;
        continue;
      }
      prompt.text = tokenizer_.decode(prompt.tokens, /*skip_special_tokens=*/true);
      if (judge != nullptr) {
        require_judgeable(*judge, prompt);
        const bool is_unread =
            row.contains("verifier") && !config.rl.reward.verifiers.contains("row");
        if (is_unread && unread_verifier_.empty()) unread_verifier_ = named;
      }
      const config::DataFields& fields = config.data.fields;
      const auto has = [&](const std::string& field) {
        return row.contains(field) && !row[field].is_null();
      };
      if (prompt_and_messages_.empty() && has(fields.messages) && has(fields.prompt))
        prompt_and_messages_ = named;
      rows_.push_back(std::move(prompt));
      ++report_.rows;
      hasher.add(line);
    } catch (const DataError& error) {
      bad(fmt::format("{}: {}", named, error.what()));
    }
  }
  report_.blank_lines += records->blank_lines();
}

Prompt Prompts::prompt_of(const Json& row, const config::RunConfig& config) const {
  Prompt prompt;
  prompt.tokens = tokenize(row);
  prompt.truth = truth_of(row, config);
  prompt.meta = meta_of(row, config.data.fields);
  prompt.tools = data::field_at(row, config.data.fields.tools);
  prompt.messages = conversation_of(row);
  return prompt;
}

bool Prompts::fit(std::vector<std::int32_t>& tokens) {
  const std::int64_t longest = max_length_ - max_new_tokens_;
  if (std::ssize(tokens) <= longest) return true;
  if (truncation_ == data::Truncation::kDrop) return false;
  if (truncation_ == data::Truncation::kAuto) require_fit(std::ssize(tokens));
  ++report_.truncated;
  report_.cut_tokens += std::ssize(tokens) - longest;
  if (truncation_ == data::Truncation::kKeepEnd)
    tokens.erase(tokens.begin(), tokens.end() - longest);
  tokens.resize(static_cast<std::size_t>(longest));
  return true;
}

void Prompts::require_fit(std::int64_t tokens) const {
  const std::int64_t longest = max_length_ - max_new_tokens_;
  if (tokens <= longest) return;
  throw_error<DataError>(
      "the prompt has {} tokens: expected at most {}, data.max_length {} less "
      "rollout.max_new_tokens {}",
      tokens, longest, max_length_, max_new_tokens_);
}

std::vector<std::int32_t> Prompts::tokenize(const Json& row) const {
  std::vector<std::int32_t> tokens =
      renderer_->tokenize_prompt(row_of(row, reader_, has_template_));
  if (tokens.empty()) throw DataError("the prompt has no token");
  return tokens;
}

Opening Prompts::opening(std::int64_t row, const Json& prompt) const {
  Json object = {{reader_.fields.prompt, prompt}};
  const Json& tools = this->row(row).tools;
  if (!tools.is_null()) object[reader_.fields.tools] = tools;
  Opening opening{.tokens = tokenize(object)};
  require_fit(std::ssize(opening.tokens));
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
  const std::int64_t epoch = cursor / per_epoch_;
  if (epoch != epoch_) {
    epoch_ = epoch;
    order_ = data::rows_of_epoch(files_, seed_, epoch);
    if (shuffles_) {
      const CounterRng rng(seed_, fmt::format("prompts/epoch/{}", epoch));
      std::vector<std::int64_t> places(order_.size());
      std::iota(places.begin(), places.end(), 0);
      std::ranges::sort(places, {}, [&](std::int64_t place) {
        return rng.bits(static_cast<std::uint64_t>(place));
      });
      for (std::int64_t& place : places) place = order_[static_cast<std::size_t>(place)];
      order_ = std::move(places);
    }
  }
  return order_[static_cast<std::size_t>(cursor % per_epoch_)];
}

std::string Prompts::identity() const { return hash::Hasher().add(key_).add(content_).hex(); }

std::int64_t Prompts::tokens() const {
  double sum = 0;
  for (const data::FileRows& file : files_) {
    std::int64_t of_file = 0;
    for (std::int64_t row = file.first; row < file.first + file.rows; ++row)
      of_file += std::ssize(this->row(row).tokens);
    sum += file.weight * static_cast<double>(of_file);
  }
  return std::llround(sum);
}

}  // namespace heddle::rl
