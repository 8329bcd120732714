#include "serve/openai/chat.h"

#include <limits>
#include <utility>

#include "data/answer/answer_parser.h"
#include "serve/openai/messages.h"
#include "serve/openai/reply.h"

namespace heddle::serve::openai {
namespace {

constexpr std::int64_t kMostTokens = std::numeric_limits<std::int64_t>::max();

/// How the text of an answer is to be read.
struct Reading {
  data::AnswerFormat format;
  bool in_reasoning = false;
  std::string begun;  ///< A call that the prompt has begun for the model.
  Json tools;
  bool has_parallel_calls = true;
  bool has_logprobs = false;
};

class ChatReply : public Reply {
 public:
  ChatReply(Service& service, Sampling sampling, const Request& request, Responder responder,
            Reading reading)
      : Reply(service, std::move(sampling), request, std::move(responder), "chatcmpl-"),
        reading_(std::move(reading)) {
    for (std::int64_t i = 0; i < sampling_.generation.samples; ++i) choices_.emplace_back(reading_);
  }

 protected:
  const char* object_name() const override { return "chat.completion"; }
  const char* chunk_name() const override { return "chat.completion.chunk"; }

  std::vector<Json> first_pieces(std::size_t choice) override {
    std::vector<Json> pieces = {
        piece(choice, {{"role", "assistant"}, {"content", ""}}, nullptr, nullptr)};
    return pieces;
  }

  std::vector<Json> pieces(std::size_t choice, const GeneratedToken& token) override {
    Json entries;
    if (reading_.has_logprobs)
      entries = {{"content", {logprobs_.chat_entry(token.id, token.logprob, token.top)}}};
    std::vector<Json> pieces =
        pieces_of(choice, choices_[choice].parser.push(token.text), std::move(entries));
    if (sampling_.returns_token_ids) {
      if (pieces.empty()) pieces.push_back(piece(choice, Json::object(), nullptr, nullptr));
      pieces[0]["token_ids"] = {token.id};
    }
    return pieces;
  }

  std::vector<Json> last_pieces(std::size_t choice, const GeneratedSequence& answer) override {
    Choice& state = choices_[choice];
    data::AnswerDelta rest = state.parser.push(ending_of(choice, answer));
    rest += state.parser.finish();
    std::vector<Json> pieces = pieces_of(choice, rest, nullptr);
    Json last = piece(choice, Json::object(), nullptr, finish_reason(answer, state.calls > 0));
    last["stop_reason"] = stop_reason_of(choice, answer);
    pieces.push_back(std::move(last));
    return pieces;
  }

  Json whole(std::size_t choice, const GeneratedSequence& answer,
             const GenerationResult&) override {
    Choice state(reading_);
    data::AnswerDelta sum = state.parser.push(answer.text + ending_of(choice, answer));
    sum += state.parser.finish();
    if (!reading_.has_parallel_calls && sum.calls.size() > 1) sum.calls.resize(1);
    const bool has_calls = !sum.calls.empty();
    Json message = {{"role", "assistant"},
                    {"content", sum.content.empty() && has_calls ? Json() : Json(sum.content)}};
    if (!sum.reasoning.empty()) {
      message["reasoning_content"] = sum.reasoning;
      message["reasoning"] = sum.reasoning;
    }
    for (const data::ToolCall& call : sum.calls) message["tool_calls"].push_back(call_object(call));
    Json entries;
    if (reading_.has_logprobs) {
      entries = {{"content", Json::array()}};
      for (std::size_t t = 0; t < answer.ids.size(); ++t) {
        entries["content"].push_back(logprobs_.chat_entry(
            answer.ids[t], answer.logprobs[t],
            t < answer.top.size() ? answer.top[t] : std::vector<TokenLogprob>()));
      }
    }
    Json object = {{"index", choice},
                   {"message", std::move(message)},
                   {"logprobs", std::move(entries)},
                   {"finish_reason", finish_reason(answer, has_calls)},
                   {"stop_reason", stop_reason_of(choice, answer)}};
    if (sampling_.returns_token_ids) object["token_ids"] = answer.ids;
    return object;
  }

 private:
  struct Choice {
    explicit Choice(const Reading& reading)
        : parser(reading.format, reading.in_reasoning, reading.tools) {
      // No delta can come of it: a call appears with its end.
      parser.push(reading.begun);
    }
    data::AnswerParser parser;
    std::size_t calls = 0;
  };

  static Json call_object(const data::ToolCall& call) {
    return {{"id", "call_" + random_name(24)},
            {"type", "function"},
            {"function", {{"name", call.name}, {"arguments", call.arguments}}}};
  }

  static const char* finish_reason(const GeneratedSequence& answer, bool has_calls) {
    if (answer.end == GenerationEnd::kLength) return "length";
    return has_calls ? "tool_calls" : "stop";
  }

  static Json piece(std::size_t choice, Json delta, Json logprobs, Json finish_reason) {
    return {{"index", choice},
            {"delta", std::move(delta)},
            {"logprobs", std::move(logprobs)},
            {"finish_reason", std::move(finish_reason)}};
  }

  /// A chunk for text, and two for each call: its name, then its arguments.
  std::vector<Json> pieces_of(std::size_t choice, const data::AnswerDelta& delta, Json logprobs) {
    std::vector<Json> pieces;
    Json text = Json::object();
    if (!delta.reasoning.empty()) {
      text["reasoning_content"] = delta.reasoning;
      text["reasoning"] = delta.reasoning;
    }
    if (!delta.content.empty()) text["content"] = delta.content;
    if (!text.empty() || !logprobs.is_null())
      pieces.push_back(piece(choice, std::move(text), std::move(logprobs), nullptr));
    for (const data::ToolCall& call : delta.calls) {
      std::size_t& index = choices_[choice].calls;
      if (index > 0 && !reading_.has_parallel_calls) break;
      Json begun = call_object(call);
      begun["function"]["arguments"] = "";
      begun["index"] = index;
      pieces.push_back(
          piece(choice, {{"tool_calls", Json::array({std::move(begun)})}}, nullptr, nullptr));
      const Json arguments = {{"index", index}, {"function", {{"arguments", call.arguments}}}};
      pieces.push_back(piece(choice, {{"tool_calls", Json::array({arguments})}}, nullptr, nullptr));
      ++index;
    }
    return pieces;
  }

  Reading reading_;
  std::vector<Choice> choices_;
};

/// The text that begins the call which the client demands. The model has to write the rest.
std::string begun_call(const ToolChoice& choice, data::CallSyntax syntax) {
  const bool is_named = choice.kind == ToolChoice::Kind::kNamed;
  if (!is_named && choice.kind != ToolChoice::Kind::kRequired) return "";
  if (syntax == data::CallSyntax::kXml)
    return "<tool_call>\n<function=" + (is_named ? choice.name + ">\n" : "");
  return "<tool_call>\n{\"name\": \"" +
         (is_named ? choice.name + "\", \"arguments\": " : std::string());
}

void take_logprobs(Fields& fields, Sampling& sampling, Reading& reading) {
  reading.has_logprobs = fields.boolean("logprobs").value_or(false);
  const auto top = fields.integer("top_logprobs", 0, 20);
  if (top && !reading.has_logprobs) throw_field("top_logprobs", "needs 'logprobs' true");
  sampling.generation.top_logprobs = top.value_or(0);
}

void take_format(Fields& fields) {
  const Json given = fields.take("response_format");
  if (given.is_null()) return;
  Fields format(given, "response_format.");
  const std::string type = format.text("type").value_or("");
  if (type != "text")
    throw_field("response_format.type", "is '{}', which is not served: expected 'text'", type);
  format.finish();
}

/// Demands a call by beginning it; thinking that the prompt has opened is closed first.
void begin_call(const ToolChoice& choice, Reading& reading, std::string& prompt) {
  reading.begun = begun_call(choice, reading.format.calls);
  if (reading.begun.empty()) return;
  if (reading.format.calls == data::CallSyntax::kNone)
    throw_field("tool_choice", "needs a chat template with calls of tools");
  if (reading.in_reasoning) prompt += "\n</think>\n\n";
  reading.in_reasoning = false;
  prompt += reading.begun;
}

}  // namespace

ConversationPrompt take_prompt(Service& service, Fields& fields) {
  ConversationPrompt prompt{take_conversation(fields), ""};
  const bool adds_prompt = fields.boolean("add_generation_prompt").value_or(true);
  const bool continues = fields.boolean("continue_final_message").value_or(false);
  if (continues && adds_prompt)
    throw_field("continue_final_message", "needs 'add_generation_prompt' false");
  fields.only("add_special_tokens", false, "the chat template writes them");
  if (!continues && !adds_prompt)
    throw_field("add_generation_prompt", "false needs 'continue_final_message' true");
  if (!continues && prompt.row.messages.back()["role"] == "assistant") {
    throw_field("messages",
                "ends with a turn of the assistant: to go on with it set 'continue_final_message' "
                "true and 'add_generation_prompt' false");
  }
  try {
    prompt.text =
        service.tokenizer->decode(service.renderer.tokenize_prompt(prompt.row, continues));
  } catch (const UserError& error) {
    throw ApiError(400, error.what(), "messages");  // the template refuses them
  }
  return prompt;
}

void answer_chat(Service& service, const Request& request, const Responder& responder) {
  Fields fields = Fields::parse(request.body);
  Sampling sampling = take_sampling(fields, service.facts(), request.caller);
  service.models.require(sampling.model);
  if (const auto most = fields.integer("max_completion_tokens", 1, kMostTokens))
    sampling.max_tokens = most;
  if (sampling.max_tokens == 0) throw_field("max_tokens", "is 0: expected 1 or more");
  fields.only("modalities", Json::array({"text"}), "this model writes text");
  fields.only("functions", Json::array(), "they are called 'tools' now");
  fields.only(
      "reasoning_effort", nullptr,
      "'chat_template_kwargs' has what the template reads, as {\"enable_thinking\": false}");
  Reading reading;
  take_logprobs(fields, sampling, reading);
  take_format(fields);
  ConversationPrompt prompt = take_prompt(service, fields);
  const ToolChoice choice = take_tool_choice(fields, prompt.row.tools);
  fields.finish();
  const bool may_call = !prompt.row.tools.is_null() && choice.kind != ToolChoice::Kind::kNone;
  reading.format = service.answer_format(may_call);
  reading.in_reasoning = data::opens_reasoning(prompt.text);
  reading.tools = prompt.row.tools;
  reading.has_parallel_calls = choice.has_parallel;
  begin_call(choice, reading, prompt.text);
  std::vector<Generation> generations = {
      generation_of(sampling, service.tokenizer->encode(prompt.text), service.facts(), 0)};
  std::make_shared<ChatReply>(service, std::move(sampling), request, responder, std::move(reading))
      ->start(std::move(generations));
}

}  // namespace heddle::serve::openai
