// The inference API over HTTP, with a model whose answers are written down.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "client.h"
#include "scripted_backend.h"
#include "serve/http/server.h"
#include "serve/openai/api.h"
#include "serve/openai/logprobs.h"
#include "testing/paths.h"

namespace heddle::serve::openai {
namespace {

using testing::body_of;
using testing::Client;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::ScriptedBackend;
using testing::status_of;

const Json kTools = Json::parse(R"([{"type": "function", "function": {"name": "find",
  "description": "d", "parameters": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}}}}}])");
constexpr const char* kCalls =
    "Looking.\n\n<tool_call>\n<function=find>\n<parameter=city>\nUlm\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
    "<function=find>\n</function>\n</tool_call>";

class OpenAi : public ::testing::Test {
 protected:
  OpenAi()
      : tokenizer_(data::Tokenizer::load(heddle::testing::source_path("examples/tokenizer-4k"))),
        model_(std::make_unique<ScriptedBackend>(
            tokenizer_,
            [this](const std::string& prompt, std::int64_t sample) {
              prompts_.push_back(prompt);
              return sample == 0 ? script_ : script_ + std::to_string(sample);
            })),
        service_{model_, tokenizer_, data::Renderer(*tokenizer_, {}), Models("base", 2048),
                 GenerationMetrics(registry_, "base")} {
    for (Route& route : routes(service_, {"1.2.3", {}})) server_.route(std::move(route));
    server_.authenticate_by([this](const Request&) {
      return Caller{"ann", "", is_admin_ ? Scopes{"sample", "admin"} : Scopes{"sample"}};
    });
    port_ = server_.listen("127.0.0.1", 0);
    thread_ = std::thread([this] { server_.run(stop_); });
  }
  ~OpenAi() override {
    stop_ = true;
    thread_.join();
  }

  std::string post(const std::string& path, const Json& body) {
    return Client(port_).ask("POST", path, dump(body));
  }
  Json chat(Json more = Json::object()) {
    Json body = {{"model", "base"},
                 {"messages", {{{"role", "user"}, {"content", "Hello"}}}},
                 {"chat_template_kwargs", {{"enable_thinking", false}}}};
    body.update(more);
    return Json::parse(body_of(post("/v1/chat/completions", body)));
  }
  /// The data of server-sent events.
  std::vector<std::string> events(const std::string& path, Json body) {
    body["stream"] = true;
    Client client(port_);
    const std::string text = dump(body);
    client.send("POST " + path + " HTTP/1.1\r\nHost: test\r\nContent-Length: " +
                std::to_string(text.size()) + "\r\n\r\n" + text);
    std::string answer = client.read_until("data: [DONE]\n\n");
    EXPECT_THAT(answer, HasSubstr("text/event-stream"));
    std::vector<std::string> found;
    for (std::size_t at = answer.find("data: "); at != std::string::npos;
         at = answer.find("data: ", at + 1)) {
      found.push_back(answer.substr(at + 6, answer.find("\n\n", at) - at - 6));
    }
    return found;
  }
  /// An error's status, field and message.
  std::string refusal(const std::string& path, const Json& body) {
    const std::string answer = post(path, body);
    const Json error = Json::parse(body_of(answer))["error"];
    EXPECT_EQ(error["type"], "invalid_request_error");
    return std::to_string(status_of(answer)) + " " + dump(error["param"]) + " " +
           error["message"].get<std::string>();
  }
  std::string chat_refusal(Json more) {
    Json body = {{"messages", {{{"role", "user"}, {"content", "Hello"}}}}};
    body.update(more);
    return refusal("/v1/chat/completions", body);
  }

  using Scopes = std::set<std::string>;
  std::atomic<bool> is_admin_ = true;
  std::string script_ = "Grüße, 世界! <b>";
  std::vector<std::string> prompts_;  ///< Written by the model's thread; read after an answer.
  std::shared_ptr<const data::Tokenizer> tokenizer_;
  Registry registry_;
  Server server_;
  ModelThread model_;
  Service service_;
  int port_ = 0;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

TEST_F(OpenAi, ChatAnswersWithUsage) {
  const Json answer = chat();
  EXPECT_EQ(answer["object"], "chat.completion");
  const Json& choice = answer["choices"][0];
  EXPECT_EQ(choice["message"], (Json{{"role", "assistant"}, {"content", script_}}));
  EXPECT_EQ(choice["finish_reason"], "stop");
  const auto written = std::ssize(tokenizer_->encode(script_)) + 1;
  EXPECT_EQ(answer["usage"]["completion_tokens"], written);
  EXPECT_EQ(answer["usage"]["total_tokens"], written + std::ssize(tokenizer_->encode(prompts_[0])));
  EXPECT_EQ(prompts_[0],
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
}

TEST_F(OpenAi, AnAnswerWithoutALimitEndsWithTheContext) {
  script_ = "many words that are not said";
  const Json answer =
      Json::parse(body_of(post("/v1/completions", {{"prompt", std::vector<int>(2047, 5)}})));
  EXPECT_TRUE(answer.contains("choices")) << answer;
}

TEST_F(OpenAi, StreamAddsUpToTheWholeAnswer) {
  const auto found = events(
      "/v1/chat/completions",
      {{"messages", {{{"role", "user"}, {"content", {{{"type", "text"}, {"text", "Hello"}}}}}}},
       {"chat_template_kwargs", {{"enable_thinking", true}}},
       {"stream_options", {{"include_usage", true}}}});
  // The prompt has opened thinking, and this answer never ends it.
  std::string reasoning, finish;
  ASSERT_GT(found.size(), 4);
  EXPECT_EQ(Json::parse(found[0])["choices"][0]["delta"],
            (Json{{"role", "assistant"}, {"content", ""}}));
  for (std::size_t i = 1; i + 2 < found.size(); ++i) {
    const Json chunk = Json::parse(found[i]);
    EXPECT_TRUE(chunk["usage"].is_null());
    const Json& choice = chunk["choices"][0];
    reasoning += choice["delta"].value("reasoning_content", "");
    if (!choice["finish_reason"].is_null()) finish += choice["finish_reason"];
  }
  EXPECT_EQ(reasoning, script_);
  EXPECT_EQ(finish, "stop");
  const Json last = Json::parse(found[found.size() - 2]);
  EXPECT_EQ(last["choices"], Json::array());
  EXPECT_GT(last["usage"]["completion_tokens"], 3);
  EXPECT_EQ(found.back(), "[DONE]");
}

TEST_F(OpenAi, CallsOfToolsAreTyped) {
  script_ = kCalls;
  const Json choice = chat({{"tools", kTools}})["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "tool_calls");
  EXPECT_EQ(choice["message"]["content"], "Looking.");
  const Json& calls = choice["message"]["tool_calls"];
  ASSERT_EQ(calls.size(), 2);
  EXPECT_EQ(calls[0]["function"],
            (Json{{"name", "find"}, {"arguments", R"({"city":"Ulm","days":3})"}}));
  EXPECT_THAT(calls[0]["id"].get<std::string>(), ::testing::MatchesRegex("call_[0-9A-Za-z]{24}"));
  EXPECT_NE(calls[0]["id"], calls[1]["id"]);
  EXPECT_EQ(chat({{"tools", kTools},
                  {"parallel_tool_calls", false}})["choices"][0]["message"]["tool_calls"]
                .size(),
            1);
}

TEST_F(OpenAi, CallsOfToolsAreStreamedNameFirst) {
  script_ = kCalls;
  std::vector<Json> deltas;
  std::string content, finish;
  for (const std::string& event :
       events("/v1/chat/completions", {{"messages", {{{"role", "user"}, {"content", "Hello"}}}},
                                       {"chat_template_kwargs", {{"enable_thinking", false}}},
                                       {"tools", kTools}})) {
    if (event == "[DONE]") continue;
    const Json choice = Json::parse(event)["choices"][0];
    content += choice["delta"].value("content", "");
    if (choice["delta"].contains("tool_calls")) deltas.push_back(choice["delta"]["tool_calls"][0]);
    if (!choice["finish_reason"].is_null()) finish = choice["finish_reason"];
  }
  EXPECT_EQ(content, "Looking.");
  EXPECT_EQ(finish, "tool_calls");
  ASSERT_EQ(deltas.size(), 4);
  EXPECT_EQ(deltas[0]["index"], 0);
  EXPECT_EQ(deltas[0]["function"], (Json{{"name", "find"}, {"arguments", ""}}));
  EXPECT_EQ(deltas[1],
            (Json{{"index", 0}, {"function", {{"arguments", R"({"city":"Ulm","days":3})"}}}}));
  EXPECT_EQ(deltas[2]["index"], 1);
}

TEST_F(OpenAi, DemandedCallIsBegunInThePrompt) {
  script_ = "<parameter=city>\nUlm\n</parameter>\n</function>\n</tool_call>";
  const Json named = {{"type", "function"}, {"function", {{"name", "find"}}}};
  const Json choice = chat({{"tools", kTools}, {"tool_choice", named}})["choices"][0];
  EXPECT_TRUE(prompts_[0].ends_with("<tool_call>\n<function=find>\n"));
  EXPECT_EQ(choice["message"]["tool_calls"][0]["function"]["arguments"], R"({"city":"Ulm"})");
  EXPECT_TRUE(choice["message"]["content"].is_null());
}

TEST_F(OpenAi, CallsStayTextWhereTheyAreNotWanted) {
  script_ = kCalls;
  EXPECT_EQ(chat()["choices"][0]["message"]["content"], kCalls);
  EXPECT_EQ(chat({{"tools", kTools}, {"tool_choice", "none"}})["choices"][0]["message"]["content"],
            kCalls);
}

TEST_F(OpenAi, CallThatIsCutIsContent) {
  script_ = kCalls;
  const Json choice = chat({{"tools", kTools}, {"max_tokens", 12}})["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "length");
  EXPECT_THAT(choice["message"]["content"].get<std::string>(), HasSubstr("<tool_call>"));
  EXPECT_FALSE(choice["message"].contains("tool_calls"));
}

TEST_F(OpenAi, LogprobsOfChat) {
  const Json choice = chat({{"logprobs", true}, {"top_logprobs", 2}})["choices"][0];
  const Json& content = choice["logprobs"]["content"];
  ASSERT_EQ(content.size(), tokenizer_->encode(script_).size() + 1);
  EXPECT_EQ(content[1]["logprob"], -0.25);
  EXPECT_EQ(content[1]["top_logprobs"].size(), 2);
  std::string bytes;
  for (const Json& entry : content) {
    if (entry["token"] == "<|im_end|>") break;
    for (const Json& byte : entry["bytes"]) bytes += static_cast<char>(byte.get<int>());
  }
  EXPECT_EQ(bytes, script_);
}

TEST_F(OpenAi, SeveralChoicesAndPrompts) {
  const Json answer = Json::parse(
      body_of(post("/v1/completions",
                   {{"prompt", {"one", "two"}}, {"n", 2}, {"logprobs", 1}, {"max_tokens", 50}})));
  ASSERT_EQ(answer["choices"].size(), 4);
  EXPECT_EQ(answer["choices"][3]["index"], 3);
  EXPECT_EQ(answer["choices"][2]["text"], script_);
  EXPECT_EQ(answer["choices"][3]["text"], script_ + "1");
  const Json& table = answer["choices"][0]["logprobs"];
  EXPECT_EQ(table["text_offset"][0], 0);
  EXPECT_EQ(table["text_offset"].back(), 14) << "characters before the end, not bytes";
  EXPECT_EQ(table["tokens"].size(), table["token_logprobs"].size());
  EXPECT_EQ(table["top_logprobs"][0].size(), 2);  // The drawn token comes on top.
}

TEST_F(OpenAi, PartsOfACharacterKeepApartInTables) {
  // Each byte of the sign is a token: as texts they would be the same.
  std::vector<std::int32_t> ids;
  for (std::int32_t id = 0; id < tokenizer_->vocab_size() && ids.size() < 2; ++id) {
    const std::string_view bytes = tokenizer_->is_special(id) ? "" : tokenizer_->bytes_of(id);
    if (bytes == "\x82" || bytes == "\xAC") ids.push_back(id);
  }
  ASSERT_EQ(ids.size(), 2U);
  Json table = openai::Logprobs::empty_table();
  std::size_t offset = 0;
  openai::Logprobs(*tokenizer_, /*as_ids=*/false)
      .append(table, ids[0], -1, {{ids[1], -2.0}}, offset);
  std::set<std::string> names;
  for (const auto& [name, value] : table["top_logprobs"][0].items()) names.insert(name);
  EXPECT_EQ(names, (std::set<std::string>{"bytes:\\x82", "bytes:\\xac"}));
  EXPECT_TRUE(names.contains(table["tokens"][0]));
}

TEST_F(OpenAi, CompletionsTakeIdsAndEchoThem) {
  const auto ids = tokenizer_->encode("the river");
  const Json answer = Json::parse(body_of(
      post("/v1/completions",
           {{"prompt", ids}, {"echo", true}, {"return_token_ids", true}, {"max_tokens", 50}})));
  EXPECT_EQ(answer["choices"][0]["text"], "the river" + script_);
  EXPECT_EQ(answer["prompt_token_ids"], ids);
}

TEST_F(OpenAi, GenerateTakesIdsAndGivesIdsWithTheirWeights) {
  const auto prompt = tokenizer_->encode("the river");
  std::vector<std::int32_t> written = tokenizer_->encode(script_);
  written.push_back(*tokenizer_->id_of("<|im_end|>"));
  const Json body = {{"token_ids", prompt},
                     {"request_id", "mine"},
                     {"sampling_params", {{"max_tokens", 60}, {"logprobs", 2}, {"seed", 4}}}};
  const Json answer = Json::parse(body_of(post("/inference/v1/generate", body)));
  EXPECT_EQ(answer["request_id"], "mine");
  const Json& choice = answer["choices"][0];
  EXPECT_EQ(choice["token_ids"], written);
  EXPECT_EQ(choice["weight_versions"], std::vector<int>(written.size(), 0));
  EXPECT_EQ(choice["finish_reason"], "stop");
  const Json& first = choice["logprobs"]["content"][0];
  EXPECT_EQ(first["token"], "token_id:" + std::to_string(written[0]));
  EXPECT_EQ(first["logprob"], -0.125);
  EXPECT_EQ(first["top_logprobs"].size(), 2);
  std::vector<std::int32_t> streamed;
  const auto found = events("/inference/v1/generate", body);
  for (std::size_t i = 0; i + 1 < found.size(); ++i) {
    const auto ids =
        Json::parse(found[i])["choices"][0]["token_ids"].get<std::vector<std::int32_t>>();
    streamed.insert(streamed.end(), ids.begin(), ids.end());
  }
  EXPECT_EQ(streamed, written);
}

TEST_F(OpenAi, GenerateNamesWhatItDoesNotTake) {
  const std::string path = "/inference/v1/generate";
  EXPECT_THAT(refusal(path, {{"token_ids", {1}}}), HasSubstr("400 \"sampling_params\""));
  EXPECT_THAT(refusal(path, {{"token_ids", {1}}, {"sampling_params", {{"best_guess", 1}}}}),
              HasSubstr("400 \"best_guess\""));
  EXPECT_THAT(refusal(path, {{"token_ids", {99999}}, {"sampling_params", Json::object()}}),
              HasSubstr("400 \"token_ids[0]\""));
  EXPECT_THAT(refusal(path, {{"token_ids", {1}}, {"sampling_params", {{"model", "base"}}}}),
              HasSubstr("400 \"model\""));
  EXPECT_THAT(refusal(path, {{"sampling_params", Json::object()}}), HasSubstr("400 \"token_ids\""));
}

TEST_F(OpenAi, OnlyAnAdminGoesBeforeOthers) {
  EXPECT_EQ(chat({{"priority", -1}})["object"], "chat.completion");
  is_admin_ = false;
  EXPECT_EQ(chat({{"priority", 3}})["object"], "chat.completion");
  EXPECT_THAT(chat_refusal({{"priority", -1}}), HasSubstr("400 \"priority\""));
}

TEST(PassMetrics, TellsTheAdaptersThatRunAndWait) {
  Registry registry;
  PassMetrics metrics(registry, 16);
  ModelQueue queue;
  queue.running_adapters = {"b", "a"};
  queue.waiting_adapters = {"c\"d"};
  metrics.queued(queue);
  EXPECT_THAT(registry.text(),
              HasSubstr("vllm:lora_requests_info{max_lora=\"16\",running_lora_adapters=\"a,b\","
                        "waiting_lora_adapters=\"c\\\"d\"} 1"));
  for (int i = 100; i < 200; ++i) queue.running_adapters.insert(std::to_string(i));
  queue.interruptions = 3;
  metrics.queued(queue);
  const std::string text = registry.text();
  EXPECT_THAT(text, HasSubstr("162,163,+38\""));
  EXPECT_THAT(text, Not(HasSubstr("\"a,b\"")));
  EXPECT_THAT(text, HasSubstr("vllm:num_preemptions_total 3\n"));
}

TEST_F(OpenAi, FaultsNameTheField) {
  EXPECT_EQ(chat_refusal({{"frobnicate", 1}}),
            "400 \"frobnicate\" 'frobnicate' is not known; leave it out");
  EXPECT_THAT(chat_refusal({{"temperature", "hot"}}), HasSubstr("400 \"temperature\""));
  EXPECT_THAT(chat_refusal({{"top_logprobs", 3}}), HasSubstr("needs 'logprobs' true"));
  EXPECT_THAT(chat_refusal({{"response_format", {{"type", "json_object"}}}}),
              HasSubstr("400 \"response_format.type\""));
  EXPECT_THAT(chat_refusal({{"messages", {{{"role", "robot"}, {"content", "x"}}}}}),
              HasSubstr("400 \"messages[0].role\""));
  const Json image = {{{"type", "image_url"}, {"image_url", {{"url", "x"}}}}};
  EXPECT_THAT(chat_refusal({{"messages", {{{"role", "user"}, {"content", image}}}}}),
              HasSubstr("400 \"messages[0].content[0].type\""));
  EXPECT_THAT(chat_refusal({{"max_tokens", 5000}}), HasSubstr("maximum context length is 2048"));
  EXPECT_THAT(refusal("/v1/completions", {{"prompt", std::vector<int>(2048, 5)}}),
              HasSubstr("the prompt has 2048, and 1 more"));
  EXPECT_THAT(
      refusal("/v1/completions", {{"prompt", std::vector<std::vector<int>>(40, {5})}, {"n", 128}}),
      HasSubstr("5120 samples are asked for"));
  EXPECT_THAT(chat_refusal({{"n", 0}}), HasSubstr("400 \"n\""));
  EXPECT_THAT(chat_refusal({{"stop", {"a", ""}}}), HasSubstr("400 \"stop\""));
  EXPECT_THAT(chat_refusal({{"logit_bias", {{"999999", 1}}}}),
              HasSubstr("400 \"logit_bias.999999\""));
  EXPECT_THAT(chat_refusal({{"model", "gpt-9"}}),
              HasSubstr("404 \"model\" The model 'gpt-9' does not exist"));
  EXPECT_THAT(refusal("/v1/completions", {{"prompt", {1, 99999}}}), HasSubstr("\"prompt[1]\""));
  EXPECT_THAT(refusal("/v1/completions", {{"prompt", "a"}, {"best_of", 3}}),
              HasSubstr("400 \"best_of\""));
}

TEST_F(OpenAi, ModelsElsewhereAreWaitedFor) {
  const auto weights = std::make_shared<SamplerWeights>();
  weights->version = 7;
  std::vector<std::jthread> found;
  service_.models.look_also("far://",
                            [&](const std::string& name, const Caller& caller, WantsWeights wants) {
                              EXPECT_EQ(caller.tenant, "ann");
                              found.emplace_back([name, weights, wants] {
                                if (name == "far://a") return wants.ready(weights);
                                name == "far://b" ? wants.failed(404, "far://b is not known")
                                                  : wants.failed(500, "far://c cannot be loaded");
                              });
                            });
  EXPECT_EQ(chat({{"model", "far://a"}})["choices"][0]["message"]["content"], script_);
  const Json request = {
      {"model", "far://a"}, {"token_ids", {1}}, {"sampling_params", {{"max_tokens", 1}}}};
  const Json answer = Json::parse(body_of(post("/inference/v1/generate", request)));
  EXPECT_EQ(answer["choices"][0]["weight_versions"], Json({7}));
  EXPECT_EQ(events("/v1/completions", {{"model", "far://a"}, {"prompt", "x"}}).back(), "[DONE]");
  EXPECT_EQ(chat_refusal({{"model", "far://b"}}), "404 \"model\" far://b is not known");
  EXPECT_EQ(status_of(post("/v1/completions", {{"model", "far://c"}, {"prompt", "x"}})), 500);
  EXPECT_THAT(chat_refusal({{"model", "near"}}), HasSubstr("does not exist"));
}

TEST_F(OpenAi, UnknownAdapterFolderIsRefusedWithoutItsPath) {
  const std::string answer =
      post("/v1/load_lora_adapter", {{"lora_name", "a"}, {"lora_path", "/etc"}});
  EXPECT_EQ(status_of(answer), 400);
  EXPECT_THAT(answer, Not(HasSubstr("/etc")));
}

TEST_F(OpenAi, ModelsTokensHealthAndVersion) {
  Client client(port_);
  const Json models = Json::parse(body_of(client.ask("GET", "/v1/models")));
  EXPECT_EQ(models["data"][0]["id"], "base");
  EXPECT_EQ(models["data"][0]["max_model_len"], 2048);
  EXPECT_EQ(status_of(client.ask("GET", "/v1/models/base")), 200);
  EXPECT_EQ(status_of(client.ask("GET", "/v1/models/other/name")), 404);
  EXPECT_EQ(status_of(client.ask("GET", "/health")), 200);
  EXPECT_EQ(body_of(client.ask("GET", "/version")), R"({"version":"1.2.3"})");
  const Json tokens = Json::parse(body_of(post("/tokenize", {{"prompt", "the river"}})));
  EXPECT_EQ(tokens["tokens"], tokenizer_->encode("the river"));
  EXPECT_EQ(body_of(post("/detokenize", {{"tokens", tokens["tokens"]}})),
            R"({"prompt":"the river"})");
}

TEST_F(OpenAi, DisconnectEndsTheGeneration) {
  script_ = std::string(100000, 'a');
  for (int i = 0; i < 3000; ++i) script_ += " word";
  Client client(port_);
  const std::string text =
      dump({{"prompt", "x"}, {"stream", true}, {"max_tokens", 2000}, {"stop", "never"}});
  client.send("POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: " +
              std::to_string(text.size()) + "\r\n\r\n" + text);
  client.read_until("\"text\"");
  client.close();
  for (int i = 0; i < 6000 && model_.generations() > 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(model_.generations(), 0);
}

TEST_F(OpenAi, EachOfSeveralPromptsHasItsLogProbabilities) {
  const Json answer = Json::parse(
      body_of(post("/v1/completions",
                   {{"prompt", {"one", "the river"}}, {"prompt_logprobs", 0}, {"max_tokens", 2}})));
  ASSERT_EQ(answer["choices"].size(), 2);
  for (const Json& choice : answer["choices"]) EXPECT_TRUE(choice.contains("prompt_logprobs"));
}

TEST_F(OpenAi, NothingThatIsAskedForIsDropped) {
  for (const char* name : {"messages", "tools", "add_generation_prompt"}) {
    EXPECT_THAT(chat_refusal({{"chat_template_kwargs", {{name, Json::array()}}}}),
                HasSubstr("put it beside 'chat_template_kwargs'"));
  }
  EXPECT_THAT(chat_refusal({{"max_tokens", 0}}), HasSubstr("400 \"max_tokens\""));
  EXPECT_THAT(chat_refusal({{"max_completion_tokens", 1'000'000}}),
              HasSubstr("maximum context length"));
  EXPECT_THAT(chat_refusal({{"reasoning_effort", "low"}}), HasSubstr("enable_thinking"));
  EXPECT_THAT(chat_refusal({{"functions", {{{"name", "f"}}}}}), HasSubstr("'tools'"));
  Json tools = kTools;
  tools[0]["function"]["parameters"] = "object";
  EXPECT_THAT(chat_refusal({{"tools", tools}}), HasSubstr("tools[0].function.parameters"));
  const Json turns = {{{"role", "user"}, {"content", "a"}}, {{"role", "system"}, {"content", "b"}}};
  EXPECT_THAT(chat_refusal({{"messages", turns}}), HasSubstr("400 \"messages\""));
  EXPECT_THAT(refusal("/tokenize", {{"prompt", "a"}, {"messages", turns}}),
              HasSubstr("give 'prompt' or 'messages'"));
  EXPECT_THAT(refusal("/detokenize", Json::object()), HasSubstr("400 \"tokens\""));
  EXPECT_THAT(refusal("/inference/v1/generate", {{"sampling_params", Json::object()}}),
              HasSubstr("400 \"token_ids\""));
}

TEST_F(OpenAi, TakesWhatChangesNothing) {
  const Json turn = {{"role", "assistant"},
                     {"content", "Hi"},
                     {"annotations", Json::array()},
                     {"refusal", nullptr}};
  const Json user = {{"role", "user"}, {"content", "Hello"}};
  const Json answer = chat({{"messages", {user, turn, user}},
                            {"modalities", {"text"}},
                            {"functions", Json::array()},
                            {"service_tier", "default"}});
  EXPECT_EQ(answer["choices"][0]["message"]["content"], script_) << answer;
}

TEST_F(OpenAi, MetricsCountTokensAndEnds) {
  chat();
  chat({{"max_tokens", 2}});
  const std::string text = registry_.text();
  EXPECT_THAT(text, HasSubstr("vllm:request_success_total{finished_reason=\"length\","
                              "model_name=\"base\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("vllm:time_to_first_token_seconds_count{model_name=\"base\"} 2\n"));
}

}  // namespace
}  // namespace heddle::serve::openai
