#include "data/readers/group_row.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "data/json/json_text.h"
#include "data/readers/conversation_row.h"
#include "data/readers/message.h"
#include "data/readers/row_fields.h"
#include "data/readers/token_row.h"

namespace heddle::data {
namespace {

using namespace row_fields;

/// A text of a group: a string, a list of messages, or a list of token ids.
Row parse_group_text(const ordered_json& value, const std::string& field,
                     const FieldNames& fields) {
  Row row;
  row.task = Task::kEmbedding;
  if (value.is_string()) {
    row.text = value.get<std::string>();
    if (row.text.empty()) fail(field, "is empty");
    return row;
  }
  if (!value.is_array()) {
    fail(field, "is a JSON {}, expected a text, a list of messages or a list of token ids",
         json_text::type_name(value));
  }
  if (!value.empty() && value[0].is_number()) {
    row.form = Row::Form::kTokens;
    row.format = RowFormat::kTokens;
    row.input_ids = parse_ids(value, field, false);
    return row;
  }
  row.form = Row::Form::kConversation;
  row.format = RowFormat::kMessages;
  append_messages(value, field, fields, row);
  return row;
}

/// True for a list of texts; a single text may be a list, too, of messages or token ids.
bool is_list_of_texts(const ordered_json& value) {
  return value.is_array() && !value.empty() && (value[0].is_string() || value[0].is_array());
}

/// Texts without a prompt.
void parse_texts(const ordered_json& value, const FieldNames& fields, const GroupShape& shape,
                 Row& row) {
  for (const std::string& field : shape.texts) {
    const ordered_json& text = require(value, field);
    if (!is_list_of_texts(text)) {
      row.texts.push_back(parse_group_text(text, field, fields));
      continue;
    }
    // Some data sets keep a list where a row has one.
    if (text.size() != 1)
      fail(field, "holds {} texts, expected one; make a row of each", text.size());
    row.texts.push_back(parse_group_text(text[0], field + "[0]", fields));
  }
  const ordered_json* more = shape.more.empty() ? nullptr : find(value, shape.more);
  if (more == nullptr || (more->is_array() && more->empty())) return;
  if (!is_list_of_texts(*more)) {
    row.texts.push_back(parse_group_text(*more, shape.more, fields));
    return;
  }
  // A text of one letter takes 400 bytes as a row.
  constexpr std::size_t kMostTexts = std::size_t{1} << 16;
  if (more->size() > kMostTexts)
    fail(shape.more, "holds {} texts, at most {} of a row are read", more->size(), kMostTexts);
  for (std::size_t i = 0; i < more->size(); ++i)
    row.texts.push_back(parse_group_text((*more)[i], fmt::format("{}[{}]", shape.more, i), fields));
}

/// A prompt of token ids and a text of others; the prompt carries no label.
Row answer_in_tokens(const std::vector<std::int32_t>& prompt, const ordered_json& value,
                     const std::string& field) {
  Row row;
  row.form = Row::Form::kTokens;
  row.format = RowFormat::kTokens;
  const std::vector<std::int32_t> answer = parse_ids(value, field, false);
  if (answer.empty()) fail(field, "is an empty list");
  row.input_ids = prompt;
  row.input_ids.insert(row.input_ids.end(), answer.begin(), answer.end());
  row.labels.assign(prompt.size(), -100);
  row.labels.insert(row.labels.end(), answer.begin(), answer.end());
  return row;
}

/// The first bytes that both texts have, up to a space before the first difference, and not within
/// a character (as extract_prompt of TRL).
std::size_t shared_bytes(const std::string& a, const std::string& b) {
  const std::size_t most = std::min(a.size(), b.size());
  std::size_t shared = 0;
  while (shared < most && a[shared] == b[shared]) ++shared;
  const auto is_inside_character = [](const std::string& text, std::size_t at) {
    return at < text.size() && (text[at] & 0xC0) == 0x80;
  };
  while (shared > 0 && (is_inside_character(a, shared) || is_inside_character(b, shared))) --shared;
  if (shared > 0 && a[shared - 1] == ' ') --shared;
  return shared;
}

std::size_t shared_messages(const ordered_json& a, const ordered_json& b) {
  const std::size_t most = std::min(a.size(), b.size());
  std::size_t shared = 0;
  while (shared < most && a[shared] == b[shared]) ++shared;
  return shared;
}

/// Two whole texts or conversations: what they share at the beginning is the prompt.
void share_prompt(const GroupShape& shape, Row& row) {
  Row &a = row.texts[0], &b = row.texts[1];
  if (a.form != b.form)
    fail(shape.texts[1],
         "is of another kind than '{}': both must be texts, or both lists of "
         "messages",
         shape.texts[0]);
  const auto require_rest = [&](std::size_t shared, std::size_t first, std::size_t second) {
    if (shared < first && shared < second) return;
    fail(shape.texts[shared < first ? 1 : 0],
         "is also the beginning of '{}': nothing of it is left after the prompt that they share",
         shape.texts[shared < first ? 0 : 1]);
  };
  if (a.form == Row::Form::kConversation) {
    const std::size_t shared = shared_messages(a.messages, b.messages);
    require_rest(shared, a.messages.size(), b.messages.size());
    a.prompt_messages = b.prompt_messages = shared;
    return;
  }
  if (a.form == Row::Form::kTokens)
    fail(shape.texts[0],
         "is a list of token ids; '{0}_ids' with '{1}_ids' says what of it is "
         "the prompt",
         shape.texts[0], shape.prompt);
  const std::size_t shared = shared_bytes(a.text, b.text);
  require_rest(shared, a.text.size(), b.text.size());
  for (Row* text : {&a, &b}) {
    text->prompt = text->text.substr(0, shared);
    text->text.erase(0, shared);
  }
}

/// The text after a prompt that stands in a field of its own.
Row after_prompt(Row text, const std::string& field, const ordered_json& prompt,
                 const FieldNames& fields, const GroupShape& shape) {
  const auto wanted = prompt.is_string() ? Row::Form::kText : Row::Form::kConversation;
  if (text.form != wanted) {
    fail(field,
         "does not fit '{}', which is a JSON {}: both must be texts or both lists of messages",
         shape.prompt, json_text::type_name(prompt));
  }
  if (prompt.is_string()) {
    text.prompt = prompt.get<std::string>();
    return text;
  }
  Row whole = text;
  whole.messages = nullptr;
  whole.message_weights.clear();
  append_messages(prompt, shape.prompt, fields, whole);
  whole.prompt_messages = whole.messages.size();
  for (std::size_t i = 0; i < text.messages.size(); ++i) {
    whole.messages.push_back(text.messages[i]);
    whole.message_weights.push_back(text.message_weights[i]);
  }
  return whole;
}

/// Two texts that answer one prompt.
void parse_answers(const ordered_json& value, const FieldNames& fields, const GroupShape& shape,
                   Row& row) {
  const std::string prompt_ids = shape.prompt + "_ids";
  if (find(value, prompt_ids) != nullptr) {
    const std::vector<std::int32_t> prompt = parse_ids(value[prompt_ids], prompt_ids, false);
    for (const std::string& name : shape.texts)
      row.texts.push_back(answer_in_tokens(prompt, require(value, name + "_ids"), name + "_ids"));
    return;
  }
  for (const std::string& name : shape.texts)
    row.texts.push_back(parse_group_text(require(value, name), name, fields));
  const ordered_json* prompt = find(value, shape.prompt);
  // Some data sets repeat the prompt as a string beside whole conversations.
  const bool is_repeated =
      prompt != nullptr && prompt->is_string() && row.texts[0].form == Row::Form::kConversation;
  if (prompt == nullptr || is_repeated) {
    share_prompt(shape, row);
  } else {
    for (std::size_t i = 0; i < row.texts.size(); ++i)
      row.texts[i] = after_prompt(std::move(row.texts[i]), shape.texts[i], *prompt, fields, shape);
  }
  for (Row& text : row.texts) {
    if (text.form == Row::Form::kConversation) parse_tools(value, fields, text);
  }
}

}  // namespace

void parse_group(const ordered_json& value, const FieldNames& fields, const GroupShape& shape,
                 Row& row) {
  row.form = Row::Form::kGroup;
  if (shape.prompt.empty()) return parse_texts(value, fields, shape, row);
  parse_answers(value, fields, shape, row);
  for (Row& text : row.texts) text.task = shape.learns ? Task::kGroup : Task::kEmbedding;
}

}  // namespace heddle::data
