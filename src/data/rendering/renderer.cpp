#include "data/rendering/renderer.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "base/errors.h"
#include "base/hash.h"
#include "base/text.h"
#include "data/batch.h"
#include "data/json/json_text.h"
#include "data/rendering/assistant_spans.h"
#include "data/rendering/chat.h"
#include "data/tokenizer/tokenizer.h"

namespace heddle::data {
namespace {

using nlohmann::ordered_json;

/// Raised when rendering or masking changes its results, so that older caches are not used.
constexpr int kRenderingVersion = 2;

/// Sources of the templates by name; the user's own serves every conversation.
std::string template_source(const Tokenizer& tokenizer, const RenderOptions& options,
                            const std::string& name) {
  if (options.chat_template.empty()) return tokenizer.chat_template(name).value_or("");
  return name == "default" ? options.chat_template : "";
}

/// Variables of a template besides the messages, as `transformers` gives them: the special tokens,
/// then the user's variables.
ordered_json template_variables(const Tokenizer& tokenizer, const ordered_json& given) {
  ordered_json variables = ordered_json::object();
  for (const auto& [name, token] : tokenizer.special_tokens()) variables[name] = token;
  return json_text::merged(std::move(variables), given);
}

/// Ends of the tokens in the bytes they stand for.
std::vector<std::int64_t> token_ends(const Tokenizer& tokenizer,
                                     const std::vector<std::int32_t>& ids) {
  std::vector<std::int64_t> ends;
  ends.reserve(ids.size());
  std::int64_t end = 0;
  for (const std::int32_t id : ids) {
    end += static_cast<std::int64_t>(tokenizer.bytes_of(id).size());
    ends.push_back(end);
  }
  return ends;
}

bool spells(const Tokenizer& tokenizer, const std::vector<std::int32_t>& ids,
            std::string_view text) {
  for (const std::int32_t id : ids) {
    const std::string_view bytes = tokenizer.bytes_of(id);
    if (!text.starts_with(bytes)) return false;
    text.remove_prefix(bytes.size());
  }
  return text.empty();
}

/// Maps byte positions of a text to positions in the bytes of its tokens, which differ where the
/// tokenizer normalises (Unicode NFC): by encoding the text up to the position.
class PositionMap {
 public:
  PositionMap(const Tokenizer& tokenizer, std::string_view text,
              const std::vector<std::int32_t>& ids)
      : tokenizer_(tokenizer), text_(text), is_identity_(spells(tokenizer, ids, text)) {
    if (is_identity_) return;
    for (const std::int32_t id : ids) spelled_ += tokenizer.bytes_of(id);
  }
  std::int64_t operator()(std::int64_t position) const {
    if (is_identity_) return position;
    std::string before;
    for (const std::int32_t id : tokenizer_.encode(text_.substr(0, position))) {
      before += tokenizer_.bytes_of(id);
    }
    if (!std::string_view(spelled_).starts_with(before)) {
      throw_error<DataError>(
          "cannot tell which tokens stand for the text from byte {} on: the tokenizer changes the "
          "text there",
          position);
    }
    return static_cast<std::int64_t>(before.size());
  }

 private:
  const Tokenizer& tokenizer_;
  std::string_view text_;
  bool is_identity_;
  std::string spelled_;
};

bool carries_labels(Task task) { return task == Task::kLanguageModel || task == Task::kGroup; }

/// The weight of each token as a target: that of the last span that shares a byte with it.
std::vector<float> token_weights(const Tokenizer& tokenizer, const RenderedText& rendered,
                                 const std::vector<std::int32_t>& ids) {
  std::vector<float> weights(ids.size(), 0);
  const std::vector<std::int64_t> ends = token_ends(tokenizer, ids);
  const PositionMap map(tokenizer, rendered.text, ids);
  for (const LossSpan& span : rendered.spans) {
    const std::int64_t begin = map(span.begin), end = map(span.end);
    if (begin >= end) continue;
    auto t =
        static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (; t < ids.size() && (t == 0 ? 0 : ends[t - 1]) < end; ++t) {
      weights[t] = static_cast<float>(span.weight);
    }
  }
  return weights;
}

/// Decides on a `row` that is too long. Throws DataError where it cannot be split.
Truncation truncation_of(const Row& row, const RenderOptions& options) {
  const bool is_plain_text = row.form == Row::Form::kText && row.prompt.empty();
  const bool can_split =
      row.task == Task::kLanguageModel && (is_plain_text || row.form == Row::Form::kTokens);
  switch (options.truncation) {
    case Truncation::kAuto:
      return can_split && is_plain_text ? Truncation::kSplit : Truncation::kKeepStart;
    case Truncation::kSplit:
      if (!can_split) {
        throw_error<DataError>(
            "field '{}': the row is longer than {} tokens, and data.truncation=split is for plain "
            "text and tokens of a language model; choose auto, keep_start, keep_end or drop",
            to_string(row.format), options.max_length);
      }
      return Truncation::kSplit;
    default:
      return options.truncation;
  }
}

void truncate(const Row& from, TokenizedRow& row, std::vector<float>& weights,
              std::vector<std::int32_t>& targets, const RenderOptions& options) {
  const auto limit = static_cast<std::size_t>(options.max_length);
  if (options.max_length <= 0 || row.tokens.size() <= limit) return;
  const Truncation truncation = truncation_of(from, options);
  if (truncation == Truncation::kDrop) {
    row.fate = TokenizedRow::Fate::kDroppedLong;
    return;
  }
  if (truncation == Truncation::kSplit) {
    row.fate = TokenizedRow::Fate::kSplit;
    return;
  }
  row.fate = TokenizedRow::Fate::kTruncated;
  const std::size_t cut = row.tokens.size() - limit;
  const auto shorten = [&](auto& list) {
    if (truncation == Truncation::kKeepEnd) {
      list.erase(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(cut));
    } else {
      list.resize(limit);
    }
  };
  shorten(row.tokens);
  shorten(weights);
  shorten(targets);
}

/// Sums of what a language model learns of the row, from its labels and weights.
void count_losses(TokenizedRow& row) {
  row.loss_rows = 0;
  row.loss_weight_sum = 0;
  for (const float weight : row.weights) {
    row.loss_rows += weight != 0;
    row.loss_weight_sum += weight;
  }
}

/// Throws `error` again, with the first role that templates seldom know.
[[noreturn]] void throw_with_role(const DataError& error, const ordered_json& messages) {
  static constexpr std::string_view kKnown[] = {"system", "developer", "user", "assistant", "tool"};
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const std::string role = messages[i].value("role", "");
    if (std::find(std::begin(kKnown), std::end(kKnown), role) != std::end(kKnown)) continue;
    throw_error<DataError>(
        "{}; 'messages[{}].role' is '{}': expected system, user, assistant or tool", error.what(),
        i, role);
  }
  throw DataError(error);
}

}  // namespace

std::vector<TokenizedRow> split(const TokenizedRow& row, std::int64_t length) {
  std::vector<TokenizedRow> pieces;
  const std::int64_t whole = std::ssize(row.tokens);
  for (std::int64_t begin = 0; begin < whole; begin += length) {
    const auto piece_of = [&](const auto& list) {
      return std::decay_t<decltype(list)>(list.begin() + begin,
                                          list.begin() + std::min(begin + length, whole));
    };
    TokenizedRow piece;
    piece.tokens = piece_of(row.tokens);
    piece.labels = piece_of(row.labels);
    piece.weights = piece_of(row.weights);
    piece.full_length = std::ssize(piece.tokens);
    count_losses(piece);
    if (piece.loss_rows > 0) pieces.push_back(std::move(piece));
  }
  return pieces;
}

Renderer::Renderer(const Tokenizer& tokenizer, RenderOptions options)
    : tokenizer_(tokenizer), options_(std::move(options)) {
  if (!options_.template_variables.is_null() && !options_.template_variables.is_object()) {
    throw_error<ConfigError>("data.template_args is a JSON {}, expected an object",
                             options_.template_variables.type_name());
  }
  const ordered_json variables = template_variables(tokenizer_, options_.template_variables);
  const std::string own = options_.chat_template_name;
  const auto chat = [&](const std::string& source, const std::string& name) {
    try {
      return std::make_unique<Chat>(source, name, variables);
    } catch (const DataError& error) {
      if (!own.empty()) throw;
      throw_error<DataError>(
          "{}; the template stands in chat_template.jinja or tokenizer_config.json beside "
          "tokenizer.json; data.chat_template=FILE takes another",
          error.what());
    }
  };
  if (const std::string source = template_source(tokenizer_, options_, "default");
      !source.empty()) {
    chat_ = chat(source, own.empty() ? "the chat template" : own);
  }
  if (const std::string source = template_source(tokenizer_, options_, "tool_use");
      !source.empty()) {
    tool_chat_ = chat(source, "the chat template 'tool_use'");
  }
  for (std::int32_t id = 0; id < tokenizer_.vocab_size(); ++id) {
    if (tokenizer_.is_special(id)) special_tokens_.emplace_back(tokenizer_.bytes_of(id));
  }
}

Renderer::~Renderer() = default;

const Chat& Renderer::chat_of(const Row& row) const {
  tokenizer_.require_texts();
  if (!row.tools.is_null() && tool_chat_) return *tool_chat_;
  if (chat_) return *chat_;
  const std::vector<std::string> names = tokenizer_.chat_template_names();
  throw_error<DataError>(
      "field '{}': the row is a conversation but the tokenizer has no chat template{}; put "
      "chat_template.jinja beside tokenizer.json or set data.chat_template",
      to_string(row.format),
      names.empty() ? "" : " of the name 'default', only '" + text::list_some(names) + "'");
}

ordered_json Renderer::variables_of(const Row& row, const Chat& chat) const {
  return json_text::merged(chat.variables(), row.template_variables);
}

RenderedText Renderer::render_conversation(const Row& row) const {
  const Chat& chat = chat_of(row);
  ChatTemplate::Options options;
  options.tools = row.tools;
  options.variables = variables_of(row, chat);
  const ordered_json messages = chat.adapted(row.messages);
  ChatTemplate::Rendered full;
  try {
    full = chat.chat_template().render(messages, options);
  } catch (const DataError& error) {
    throw_with_role(error, messages);
  }
  RenderedText rendered;
  rendered.text = full.text;
  if (!carries_labels(row.task)) return rendered;

  std::vector<std::size_t> turns;
  bool has_weights = false;
  for (std::size_t i = 0; i < row.messages.size(); ++i) {
    const bool is_given = !std::isnan(row.message_weights[i]);
    if (row.messages[i]["role"] == "assistant") {
      turns.push_back(i);
      has_weights |= is_given;
    } else if (is_given && options_.loss_on == LossOn::kAll) {
      throw_error<DataError>(
          "field 'messages[{}].weight': only assistant messages can have a weight", i);
    }
  }
  const bool all = options_.loss_on == LossOn::kAll;
  if (all) rendered.spans.push_back({0, static_cast<std::int64_t>(rendered.text.size()), 1});
  if (turns.empty() || (all && !has_weights)) return rendered;

  const auto weight_of = [&](std::size_t message) {
    const double given = row.message_weights[message];
    if (!std::isnan(given)) return given;
    return all || message >= row.prompt_messages ? 1.0 : 0.0;
  };
  const bool is_uniform = std::all_of(turns.begin(), turns.end(), [&](std::size_t turn) {
    return weight_of(turn) == weight_of(turns[0]);
  });
  if (chat.chat_template().has_generation_blocks() && is_uniform) {
    // A turn may be written in several blocks; with one weight for all it does not matter whose a
    // block is.
    for (const auto& [begin, end] : full.generation_spans) {
      rendered.spans.push_back(
          {static_cast<std::int64_t>(begin), static_cast<std::int64_t>(end), weight_of(turns[0])});
    }
    return rendered;
  }
  const AssistantSpans finder(chat, special_tokens_);
  const std::vector<TextSpan> spans = finder.find(messages, options, full);
  for (std::size_t i = 0; i < spans.size(); ++i) {
    rendered.spans.push_back({spans[i].begin, spans[i].end, weight_of(turns[i])});
  }
  return rendered;
}

RenderedText Renderer::render(const Row& row) const {
  switch (row.form) {
    case Row::Form::kConversation:
      return render_conversation(row);
    case Row::Form::kText: {
      RenderedText rendered;
      rendered.text = row.prompt + row.text;
      const auto begin =
          static_cast<std::int64_t>(options_.loss_on == LossOn::kAll ? 0 : row.prompt.size());
      rendered.spans.push_back({begin, static_cast<std::int64_t>(rendered.text.size()), 1});
      return rendered;
    }
    case Row::Form::kTokens:
      break;
    case Row::Form::kGroup:
      throw_error<InternalError>("a group of texts has no single rendering");
  }
  RenderedText rendered;
  rendered.text = tokenizer_.decode(row.input_ids);
  return rendered;
}

TokenizedRow Renderer::tokenize_group(const Row& row) const {
  TokenizedRow out;
  for (const Row& part : row.texts) {
    const TokenizedRow text = tokenize(part);
    out.full_length += text.full_length;
    if (text.fate != TokenizedRow::Fate::kKept) out.fate = text.fate;
    if (!text.kept()) return out;
    const auto append = [](auto& to, const auto& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    append(out.tokens, text.tokens);
    append(out.labels, text.labels);
    append(out.weights, text.weights);
    out.text_lengths.push_back(std::ssize(text.tokens));
  }
  count_losses(out);
  if (out.loss_rows > 0) return out;
  // The texts are compared as wholes: the row is what carries loss.
  out.loss_rows = 1;
  out.loss_weight_sum = 1;
  return out;
}

TokenizedRow Renderer::tokenize(const Row& row) const {
  if (row.form == Row::Form::kGroup) return tokenize_group(row);
  TokenizedRow out;
  std::vector<float> weights;         // of token t as a target
  std::vector<std::int32_t> targets;  // what is to be predicted at token t's place, mostly token t
  if (row.form == Row::Form::kTokens) {
    out.tokens = row.input_ids;
    targets = row.labels.empty() ? row.input_ids : row.labels;
    for (const std::int32_t id : out.tokens) {
      if (id < tokenizer_.vocab_size()) continue;
      throw_error<DataError>("field 'input_ids': {} is beyond the {} {} tokens", id,
                             tokenizer_.has_texts() ? "tokenizer's" : "model's",
                             tokenizer_.vocab_size());
    }
    for (const std::int32_t id : targets) {
      if (id >= tokenizer_.vocab_size()) {
        throw_error<DataError>("field 'labels': {} is beyond the {} {} tokens", id,
                               tokenizer_.has_texts() ? "tokenizer's" : "model's",
                               tokenizer_.vocab_size());
      }
      weights.push_back(id == kIgnoredLabel ? 0 : 1);
    }
    for (std::size_t t = 0; t < row.loss_mask.size() && options_.loss_on != LossOn::kAll; ++t) {
      if (!row.loss_mask[t]) weights[t] = 0;
    }
  } else {
    const RenderedText rendered = render(row);
    out.tokens = tokenizer_.encode(rendered.text);
    weights = token_weights(tokenizer_, rendered, out.tokens);
    if (row.form == Row::Form::kText && options_.append_eos && carries_labels(row.task)) {
      const auto eos = tokenizer_.eos_id();
      if (!eos) {
        throw_error<DataError>(
            "the tokenizer names no eos token to put after a text; name one in "
            "tokenizer_config.json");
      }
      if (out.tokens.empty() || out.tokens.back() != *eos) {
        out.tokens.push_back(*eos);
        weights.push_back(1);
      }
    }
    targets = out.tokens;
  }
  if (out.tokens.empty()) throw_error<DataError>("the row gives no token");
  out.full_length = static_cast<std::int64_t>(out.tokens.size());
  out.target = row.target.value_or(0);
  truncate(row, out, weights, targets, options_);
  if (!out.kept()) return out;

  const std::size_t length = out.tokens.size();
  out.labels.assign(length, kIgnoredLabel);
  out.weights.assign(length, 0);
  if (carries_labels(row.task)) {
    for (std::size_t t = 0; t + 1 < length; ++t) {
      if (weights[t + 1] == 0) continue;
      out.labels[t] = targets[t + 1];
      out.weights[t] = weights[t + 1];
    }
    count_losses(out);
    if (out.loss_rows == 0) out.fate = TokenizedRow::Fate::kDroppedNoLoss;
  } else if (row.target) {
    out.loss_rows = 1;
    out.loss_weight_sum = 1;
  }
  return out;
}

std::vector<std::int32_t> Renderer::tokenize_prompt(const Row& row,
                                                    bool continue_final_message) const {
  if (row.form == Row::Form::kTokens) return row.input_ids;
  if (row.form == Row::Form::kText) {
    return tokenizer_.encode(row.prompt.empty() ? row.text : row.prompt);
  }
  if (continue_final_message) return tokenizer_.encode(render_open_turn(row));
  const Chat& chat = chat_of(row);
  ordered_json messages = row.messages;
  while (!messages.empty() && messages.back()["role"] == "assistant") {
    messages.erase(messages.size() - 1);
  }
  ChatTemplate::Options options;
  options.tools = row.tools;
  options.add_generation_prompt = true;
  options.variables = variables_of(row, chat);
  return tokenizer_.encode(chat.chat_template().render(chat.adapted(messages), options).text);
}

std::string Renderer::fingerprint() const {
  const nlohmann::json value = {
      {"version", kRenderingVersion},
      {"tokenizer", tokenizer_.content_hash()},
      {"chat_template", template_source(tokenizer_, options_, "default")},
      {"tool_template", template_source(tokenizer_, options_, "tool_use")},
      {"variables", template_variables(tokenizer_, options_.template_variables).dump()},
      {"max_length", options_.max_length},
      {"truncation", static_cast<int>(options_.truncation)},
      {"loss_on", static_cast<int>(options_.loss_on)},
      {"append_eos", options_.append_eos}};
  hash::Hasher hasher;
  hasher.add(value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  return hasher.hex();
}

}  // namespace heddle::data
