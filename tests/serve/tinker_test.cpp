#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "served.h"
#include "testing/temporary_directory.h"

namespace heddle::serve {
namespace {

using nlohmann::json;
using testing::ApiClient;
using testing::body_of;
using ::testing::HasSubstr;
using testing::Served;
using testing::status_of;
using testing::weights_after;

using Directory = heddle::testing::TemporaryDirectory;

TEST(Tinker, RunsRequestsInTheOrderOfTheirNumbers) {
  const Directory folder;
  Served served(folder.path());
  ApiClient caller(served.port());
  const std::string session = caller.session();
  std::vector<double> norms;
  int number = 0;
  for (const std::vector<int>& order : std::vector<std::vector<int>>{{0, 1, 2}, {2, 1, 0}}) {
    const std::string run = caller.create_model(session, number++).at("model_id");
    const std::vector<json> requests = {ApiClient::work(run, 1, {1, 2}),
                                        ApiClient::work(run, 2, {3}), ApiClient::step(run, 3)};
    std::vector<json> sent;
    for (const int place : order) sent.push_back(requests[place]);
    norms.push_back(weights_after(caller, sent));
  }
  EXPECT_NE(norms[0], 0);
  EXPECT_EQ(norms[0], norms[1]);
}

TEST(Tinker, AnswersRepeatsWithTheSamePromise) {
  const Directory folder;
  Served served(folder.path());
  ApiClient caller(served.port());
  const std::string session = caller.session();
  const json first = caller.create_model(session);
  EXPECT_EQ(first, caller.create_model(session));
  EXPECT_EQ(first.at("model_id"), session + ":train:0");
  const std::string run = first.at("model_id");
  const json work = caller.post("forward_backward", ApiClient::work(run, 1, {5}));
  EXPECT_THAT(caller.wait(work).get<std::string>(), HasSubstr("loss:sum"));
  EXPECT_EQ(work, caller.post("forward_backward", ApiClient::work(run, 1, {5})));
  caller.post("forward_backward", ApiClient::work(run, 1, {6}));
  EXPECT_EQ(caller.status, 409);
}

TEST(Tinker, SavesAndLoadsWeightsUnderTheirNames) {
  const Directory folder;
  Served served(folder.path());
  ApiClient caller(served.port());
  const std::string session = caller.session();
  const std::string run = caller.create_model(session).at("model_id");
  const double before =
      weights_after(caller, {ApiClient::work(run, 1, {1, 2}), ApiClient::step(run, 2)});
  const json saved =
      caller.wait(caller.post("save_weights", {{"model_id", run}, {"path", "a"}, {"seq_id", 3}}));
  EXPECT_EQ(saved.at("path"), "tinker://" + run + "/weights/a");
  const json again =
      caller.wait(caller.post("save_weights", {{"model_id", run}, {"path", "a"}, {"seq_id", 4}}));
  EXPECT_THAT(again.at("error").get<std::string>(), HasSubstr("stands already"));
  const json loaded = caller.wait(caller.post("load_weights", {{"session_id", session},
                                                               {"model_seq_id", 1},
                                                               {"path", saved.at("path")},
                                                               {"optimizer", true}}));
  EXPECT_EQ(loaded.at("model_id"), session + ":train:1");
  const std::string second = loaded.at("model_id");
  EXPECT_EQ(weights_after(caller, {ApiClient::work(run, 5, {3}), ApiClient::step(run, 6)}),
            weights_after(caller, {ApiClient::work(second, 1, {3}), ApiClient::step(second, 2)}));
  EXPECT_NE(before, 0);
  const json runs = caller.get("training_runs");
  EXPECT_EQ(runs.at("cursor").at("total_count"), 2);
  EXPECT_EQ(caller.get("training_runs/" + run + "/checkpoints").at("checkpoints").size(), 1U);
  EXPECT_EQ(caller.post("weights_info", {{"tinker_path", saved.at("path")}}).at("lora_rank"), 8);
  EXPECT_EQ(status_of(caller.raw("DELETE", "training_runs/" + run + "/checkpoints/weights/a", "")),
            204);
  caller.post("weights_info", {{"tinker_path", saved.at("path")}});
  EXPECT_EQ(caller.status, 404);
}

TEST(Tinker, SamplesAndReportsCompletionsOfASession) {
  const Directory folder;
  Served served(folder.path());
  ApiClient caller(served.port());
  const std::string session = caller.session();
  const std::string sampler =
      caller
          .post("create_sampling_session",
                {{"session_id", session}, {"sampling_session_seq_id", 0}, {"base_model", "base"}})
          .at("sampling_session_id");
  const auto ask = [&](int seq, std::vector<int> prompt) {
    return caller.post("asample",
                       {{"sampling_session_id", sampler},
                        {"seq_id", seq},
                        {"num_samples", 2},
                        {"prompt", {{"chunks", {{{"type", "encoded_text"}, {"tokens", prompt}}}}}},
                        {"sampling_params", {{"max_tokens", 3}}}});
  };
  const json first = ask(0, {1, 2});
  EXPECT_EQ(first.at("sample_sequence_ids").size(), 2U);
  EXPECT_EQ(first, ask(0, {1, 2}));
  const json endless = ask(1, {99});
  const json many = {{"target", {{"type", "sampling_session"}, {"sampling_session_id", sampler}}},
                     {"prev_cursor", 0}};
  json completions;
  do {
    completions = caller.post("retrieve_futures", many);
  } while (completions.at("completions").empty());
  EXPECT_EQ(completions.at("completions")[0].at("request_id"), first.at("request_id"));
  EXPECT_EQ(completions.at("completions")[0].at("state"), "finished");
  EXPECT_EQ(status_of(caller.raw("POST", "cancel_future",
                                 json{{"request_id", endless.at("request_id")}}.dump())),
            204);
  EXPECT_THAT(caller.wait(endless).at("error").get<std::string>(), HasSubstr("cancelled"));
  json acknowledged = many;
  acknowledged["prev_cursor"] = completions.at("cursor");
  acknowledged["timeout"] = 0;
  acknowledged["retrieved_request_ids"] = {first.at("request_id")};
  const json rest = caller.post("retrieve_futures", acknowledged);
  EXPECT_EQ(rest.at("completions")[0].at("state"), "failed");
  caller.post("retrieve_future", {{"request_id", first.at("request_id")}});
  EXPECT_EQ(caller.status, 410);
  EXPECT_EQ(
      caller.post("join_sampling_session", {{"sampling_session_id", sampler}}).at("client_counter"),
      1);
  EXPECT_EQ(caller.get("samplers/" + sampler).at("base_model"), "base");
}

TEST(Tinker, ASamplingSessionKeepsItsWeights) {
  const Directory folder;
  Served served(folder.path());
  ApiClient caller(served.port());
  const std::string session = caller.session();
  const std::string run = caller.create_model(session).at("model_id");
  caller.post("create_sampling_session",
              {{"session_id", session}, {"sampling_session_seq_id", 0}, {"base_model", "base"}});
  const json taken =
      caller.wait(caller.post("save_weights_for_sampler",
                              {{"model_id", run}, {"seq_id", 1}, {"sampling_session_seq_id", 0}}));
  EXPECT_THAT(taken.at("error").get<std::string>(), HasSubstr("was used with other weights"));
  const json saved =
      caller.wait(caller.post("save_weights_for_sampler",
                              {{"model_id", run}, {"seq_id", 2}, {"sampling_session_seq_id", 1}}));
  EXPECT_EQ(saved.at("sampling_session_id"), session + ":sample:1");
}

TEST(Tinker, SaysWhatIsWrongWithARequest) {
  const Directory folder;
  Served served(folder.path());
  ApiClient caller(served.port());
  const std::string session = caller.session();
  const auto detail = [&](const std::string& path, const json& body) {
    return caller.post(path, body).value("detail", "");
  };
  const std::string run = caller.create_model(session).at("model_id");
  json bad = ApiClient::work(run, 0, {1, 2});
  bad["forward_backward_input"]["loss_fn"] = "stable_reinforce";
  EXPECT_THAT(detail("forward_backward", bad), HasSubstr("loss_fn=importance_sampling"));
  EXPECT_THAT(detail("forward_backward", ApiClient::work(run, 0, {1, 100})),
              HasSubstr("datum 0 has token 100: the vocabulary has ids 0 to 99"));
  EXPECT_THAT(detail("forward_backward", ApiClient::work(run, 0, std::vector<int>(65, 1))),
              HasSubstr("datum 0 has 65 tokens: this server takes 64"));
  EXPECT_THAT(detail("forward_backward", ApiClient::work("other", 0, {1})), HasSubstr("not known"));
  bad = ApiClient::work(run, 0, {1, 2});
  bad["forward_backward_input"]["data"][0]["loss_fn_inputs"]["weights"] = {{"data", {1.0}},
                                                                           {"dtype", "float32"}};
  EXPECT_THAT(detail("forward_backward", bad), HasSubstr("input weights has 1 numbers"));
  // No number of a token, and none that an integer can hold.
  for (const json& number :
       {json(1.5), json(1e300), json(-1e300), json(1e19), json("1"), json(nullptr)}) {
    for (const char* dtype : {"int64", "float32"}) {
      bad = ApiClient::work(run, 0, {1, 2});
      bad["forward_backward_input"]["data"][0]["loss_fn_inputs"]["target_tokens"] = {
          {"data", {1, number}}, {"dtype", dtype}};
      detail("forward_backward", bad);
      EXPECT_GE(caller.status, 400) << number << " " << dtype;
      EXPECT_LT(caller.status, 500) << number << " " << dtype;
    }
  }
  EXPECT_THAT(detail("optim_step", {{"model_id", run}, {"seq_id", 1}}),
              HasSubstr("field adam_params: expected an object"));
  EXPECT_EQ(caller.status, 422);
  EXPECT_EQ(status_of(caller.raw("POST", "forward_backward", "\x0a\xff", "application/x-protobuf")),
            422);
  EXPECT_EQ(status_of(caller.raw("POST", "forward_backward", "x", "text/plain")), 415);
  EXPECT_EQ(status_of(caller.raw("POST", "create_session", std::string(5000, '['))), 422);
  EXPECT_THAT(detail("create_model", {{"session_id", session},
                                      {"model_seq_id", 1},
                                      {"base_model", "other"},
                                      {"lora_config", {{"rank", 8}}}}),
              HasSubstr("expected base"));
  const json refused = caller.wait(caller.create_model(session, 1, 13));
  EXPECT_THAT(refused.at("error").get<std::string>(), HasSubstr("rank 13"));
  EXPECT_EQ(refused.at("category"), "user");
  caller.create_model(session, 2);
  for (const char* name : {"../x", ".x", "a/b", ""}) {
    const json outcome =
        caller.wait(caller.post("save_weights", {{"model_id", run}, {"path", name}}));
    EXPECT_THAT(outcome.at("error").get<std::string>(), HasSubstr("checkpoint name")) << name;
  }
}

TEST(Tinker, AnswersQuotasWith429UntilThereIsRoom) {
  const Directory folder;
  Served served(folder.path(), Served::quick(), {.max_runs = 1, .max_disk_bytes = 1});
  const std::string own = served.keys().add("a", "train,sample", {{"max_runs", 2}});
  ApiClient caller(served.port(), own);
  const std::string session = caller.session();
  const std::string run = caller.create_model(session, 0).at("model_id");
  caller.create_model(session, 1);
  EXPECT_EQ(caller.status, 200) << "the key's limit is 2";
  const std::string other = caller.session();
  const json third = caller.create_model(other, 0);
  const auto poll = [&] {
    return caller.post("retrieve_future", {{"request_id", third.at("request_id")}});
  };
  json waiting = poll();
  EXPECT_EQ(waiting.at("queue_state"), "paused_capacity");
  EXPECT_THAT(waiting.at("queue_state_reason").get<std::string>(), HasSubstr("2 training runs"));
  caller.create_model(other, 1);
  EXPECT_EQ(caller.status, 200);
  const json refused = caller.create_model(other, 2);
  EXPECT_EQ(caller.status, 429) << "as many wait as may run";
  EXPECT_THAT(refused.value("detail", ""), HasSubstr("as many wait"));

  const auto save = [&](int seq, const char* name) {
    return caller.post("save_weights", {{"model_id", run}, {"path", name}, {"seq_id", seq}});
  };
  const json saved = caller.wait(save(1, "a"));
  const std::string again = caller.raw(
      "POST", "save_weights", json{{"model_id", run}, {"path", "b"}, {"seq_id", 2}}.dump());
  EXPECT_EQ(status_of(again), 429);
  EXPECT_THAT(again, HasSubstr("Retry-After: 5"));
  EXPECT_THAT(again, HasSubstr("delete checkpoints"));
  EXPECT_EQ(caller.wait(save(1, "a")), saved) << "a repeat has its promise";
  caller.raw("DELETE", "training_runs/" + run + "/checkpoints/weights/a", "");
  EXPECT_EQ(caller.wait(save(2, "b")).at("path"), "tinker://" + run + "/weights/b");

  caller.post("sessions/" + session + "/finish", {{"reason", {{"type", "success"}}}});
  EXPECT_EQ(caller.status, 204);
  EXPECT_EQ(caller.wait(third).at("model_id"), third.at("model_id"));
}

TEST(Tinker, WorkOverTheTokensOfAMinuteIsPausedAndSaysSo) {
  const Directory folder;
  Served served(folder.path());
  const std::string key = served.keys().add("a", "train,sample", {{"tokens_per_minute", 2}});
  ApiClient caller(served.port(), key);
  const std::string session = caller.session(), run = caller.create_model(session).at("model_id");
  // Tokens are left, so the first one is let through whole.
  EXPECT_FALSE(
      caller.wait(caller.post("forward_backward", ApiClient::work(run, 1, {1, 2, 3}))).is_object());
  const json second = caller.post("forward_backward", ApiClient::work(run, 2, {4}));
  EXPECT_EQ(caller.status, 200);
  const json step = caller.post("optim_step", ApiClient::step(run, 3));
  const json waiting = caller.post("retrieve_future", {{"request_id", second.at("request_id")}});
  EXPECT_EQ(waiting.at("queue_state"), "paused_rate_limit");
  EXPECT_THAT(waiting.at("queue_state_reason").get<std::string>(),
              HasSubstr("2 tokens a minute are used up"));
  caller.post("sessions/" + session + "/finish", {{"reason", {{"type", "success"}}}});
  EXPECT_THAT(caller.wait(second).at("error").get<std::string>(), HasSubstr("finished"));
  EXPECT_THAT(caller.wait(step).at("error").get<std::string>(), HasSubstr("finished"));
}

TEST(Tinker, PausedWorkGoesOnWhenTokensAreThereAgain) {
  const Directory folder;
  Served served(folder.path());
  // A hundred a second: a pause of some hundredths of a second.
  const std::string key = served.keys().add("a", "train,sample", {{"tokens_per_minute", 6000}});
  ApiClient caller(served.port(), key);
  const std::string run = caller.create_model(caller.session()).at("model_id");
  json large = ApiClient::work(run, 1, std::vector<int>(60, 5));
  json& data = large["forward_backward_input"]["data"];
  while (data.size() < 101) data.push_back(data[0]);
  const json first = caller.post("forward_backward", large);
  const json second = caller.post("forward_backward", ApiClient::work(run, 2, {4}));
  EXPECT_FALSE(caller.wait(first).is_object());
  EXPECT_FALSE(caller.wait(second).is_object());
}

TEST(Tinker, SoftTargetsHaveAnAnswerForEachOfTheirCells) {
  const Directory folder;
  Served served(folder.path());
  ApiClient caller(served.port(), "", "application/json");
  const std::string run = caller.create_model(caller.session()).at("model_id");
  json request = ApiClient::work(run, 1, {1, 2, 3});
  json& data = request["forward_backward_input"]["data"];
  json soft = data[0];
  soft["loss_fn_inputs"]["target_tokens"] = {
      {"data", {5, 6, 7, 8, 9, 10}}, {"dtype", "int64"}, {"shape", {3, 2}}};
  json sparse = data[0];
  sparse["loss_fn_inputs"]["target_tokens"] = {{"data", {50, 60, 70}},
                                               {"dtype", "int64"},
                                               {"shape", {3, 2}},
                                               {"sparse_crow_indices", {0, 1, 1, 3}},
                                               {"sparse_col_indices", {1, 0, 1}}};
  sparse["loss_fn_inputs"]["weights"] = {{"data", {1, 2}},
                                         {"dtype", "float32"},
                                         {"shape", {3, 2}},
                                         {"sparse_crow_indices", {0, 1, 1, 2}},
                                         {"sparse_col_indices", {1, 1}}};
  data.push_back(soft);
  data.push_back(sparse);
  const json outcome = caller.wait(caller.post("forward_backward", request));
  ASSERT_TRUE(outcome.contains("loss_fn_outputs")) << outcome;
  const json& outputs = outcome["loss_fn_outputs"];
  ASSERT_EQ(outputs.size(), 3U);
  EXPECT_EQ(outputs[0]["logprobs"]["shape"], json({3}));
  EXPECT_EQ(outputs[1]["logprobs"]["shape"], json({3, 2}));
  // This model says of a token minus its number, and what the weights add: the same for all.
  const double zero = outputs[1]["logprobs"]["data"][0].get<double>() + 5;
  const auto expected = [&](std::vector<int> targets) {
    std::vector<double> values;
    for (const int target : targets) values.push_back(target < 0 ? 0 : zero - target);
    return values;
  };
  EXPECT_EQ(outputs[1]["logprobs"]["data"], json(expected({5, 6, 7, 8, 9, 10})));
  EXPECT_EQ(outputs[2]["logprobs"]["data"], json(expected({-1, 50, -1, -1, 60, 70})));

  const auto refusal = [&](const json& tensor, const char* name = "target_tokens") {
    json wrong = ApiClient::work(run, 0, {1, 2, 3});
    json& inputs = wrong["forward_backward_input"]["data"][0]["loss_fn_inputs"];
    if (std::string(name) != "target_tokens")
      inputs["target_tokens"] = {{"data", {1, 2, 3}}, {"dtype", "int64"}, {"shape", {3, 1}}};
    inputs[name] = tensor;
    const json answer = caller.post("forward_backward", wrong);
    EXPECT_EQ(caller.status, 400) << answer;
    return answer.value("detail", "");
  };
  EXPECT_THAT(refusal({{"data", {1, 2, 3, 4}}, {"dtype", "int64"}, {"shape", {2, 2}}}),
              HasSubstr("datum 0: input target_tokens is a matrix: expected the shape [3, 1 to"));
  EXPECT_THAT(refusal({{"data", {1, 2}}, {"dtype", "int64"}, {"shape", {3, 2}}}),
              HasSubstr("which its shape does not have"));
  EXPECT_THAT(refusal({{"data", {1, 2}},
                       {"dtype", "int64"},
                       {"shape", {3, 2}},
                       {"sparse_crow_indices", {0, 2, 1, 2}},
                       {"sparse_col_indices", {0, 1}}}),
              HasSubstr("is no CSR matrix of 3 rows and 2 values"));
  EXPECT_THAT(refusal({{"data", {1, 2}},
                       {"dtype", "int64"},
                       {"shape", {3, 2}},
                       {"sparse_crow_indices", {0, 2, 2, 2}},
                       {"sparse_col_indices", {1, 0}}}),
              HasSubstr("row 0 has column 0"));
  EXPECT_THAT(refusal({{"data", {1, 1, 1}}, {"dtype", "float32"}}, "weights"),
              HasSubstr("weights has another shape than target_tokens"));
}

TEST(Tinker, TellsOldClientsResultsAsJson) {
  const Directory folder;
  Served served(folder.path());
  ApiClient caller(served.port(), "", "application/json");
  const std::string run = caller.create_model(caller.session()).at("model_id");
  json request = ApiClient::work(run, 1, {1, 2});
  json& data = request["forward_backward_input"]["data"];
  data.push_back(ApiClient::work(run, 1, {5})["forward_backward_input"]["data"][0]);
  const json result = caller.wait(caller.post("forward_backward", request));
  EXPECT_EQ(result.at("metrics").at("loss:sum"), 11) << "of 1, 2 and 5, one more each";
  EXPECT_EQ(result.at("loss_fn_output_type"), "ArrayRecord");
  ASSERT_EQ(result.at("loss_fn_outputs").size(), 2);
  EXPECT_EQ(result["loss_fn_outputs"][0]["logprobs"],
            (json{{"data", {-2.0, -3.0}}, {"dtype", "float32"}, {"shape", {2}}}));
  EXPECT_EQ(result["loss_fn_outputs"][1]["logprobs"]["data"], json::array({-6.0}));

  const json answer = caller.wait(caller.post(
      "asample", {{"base_model", "base"},
                  {"num_samples", 2},
                  {"prompt", {{"chunks", {{{"type", "encoded_text"}, {"tokens", {4, 9}}}}}}},
                  {"sampling_params", {{"max_tokens", 3}}}}));
  ASSERT_EQ(answer.at("sequences").size(), 2);
  EXPECT_EQ(
      answer["sequences"][1],
      (json{{"stop_reason", "length"}, {"tokens", {9, 9, 9}}, {"logprobs", {-.5, -.5, -.5}}}));
}

TEST(Tinker, CountsTokensAndRequestsOfTraining) {
  const Directory folder;
  Served served(folder.path(), Served::quick(), {.requests_per_minute = 3, .tokens_per_minute = 4});
  ApiClient caller(served.port());
  const std::string session = caller.session();
  const std::string run = caller.create_model(session).at("model_id");
  caller.wait(caller.post("forward_backward", ApiClient::work(run, 1, {1, 2, 3, 4, 5})));
  const json sample{{"base_model", "base"},
                    {"num_samples", 1},
                    {"prompt", {{"chunks", {{{"type", "encoded_text"}, {"tokens", {4}}}}}}},
                    {"sampling_params", {{"max_tokens", 1}}}};
  const std::string refused = caller.raw("POST", "asample", sample.dump());
  EXPECT_EQ(status_of(refused), 429);
  EXPECT_THAT(refused, HasSubstr("4 tokens a minute"));
  EXPECT_THAT(refused, HasSubstr("x-ratelimit-remaining-requests: 1"));
  EXPECT_TRUE(caller.wait(caller.post("optim_step", ApiClient::step(run, 2))).contains("metrics"))
      << "a step takes no token";
  EXPECT_THAT(caller.raw("POST", "optim_step", ApiClient::step(run, 3).dump()),
              HasSubstr("3 requests a minute"));
  caller.post("session_heartbeat", {{"session_id", session}});
  EXPECT_EQ(caller.status, 200) << "beats and polls cost nothing";
}

TEST(Tinker, KeepsTenantsApart) {
  const Directory folder;
  Served served(folder.path());
  const std::string key_a = served.keys().add("a", "train,sample"),
                    key_b = served.keys().add("b", "train,sample"),
                    reader = served.keys().add("a", "read");
  ApiClient a(served.port(), key_a), b(served.port(), key_b), nobody(served.port(), "tml-guess"),
      read(served.port(), reader);
  const std::string session = a.session();
  const json made = a.create_model(session);
  const std::string run = made.at("model_id");
  const json saved =
      a.wait(a.post("save_weights", {{"model_id", run}, {"path", "w"}, {"seq_id", 1}}));
  const std::string path = saved.at("path");
  const auto status = [](ApiClient& caller, const std::string& where, const json& body) {
    caller.post(where, body);
    return caller.status;
  };
  EXPECT_EQ(status(nobody, "get_info", {{"model_id", run}}), 401);
  EXPECT_EQ(status(b, "get_info", {{"model_id", run}}), 404);
  EXPECT_EQ(status(b, "optim_step", ApiClient::step(run, 2)), 404);
  EXPECT_EQ(status(b, "weights_info", {{"tinker_path", path}}), 404);
  EXPECT_EQ(status(b, "retrieve_future", {{"request_id", made.at("request_id")}}), 410);
  EXPECT_EQ(status(b, "session_heartbeat", {{"session_id", session}}), 404);
  EXPECT_EQ(
      status(
          b, "load_weights",
          {{"session_id", b.session()}, {"model_seq_id", 0}, {"path", path}, {"optimizer", false}}),
      404);
  EXPECT_EQ(status_of(b.raw("DELETE", "training_runs/" + run + "/checkpoints/weights/w", "")), 404);
  EXPECT_EQ(status(read, "create_model", {}), 403);
  EXPECT_EQ(b.get("training_runs").at("training_runs").size(), 0U);
  const std::string publish = "training_runs/" + run + "/checkpoints/weights/w/publish";
  EXPECT_EQ(status_of(b.raw("POST", publish, "")), 404);
  EXPECT_EQ(status_of(a.raw("POST", publish, "")), 204);
  EXPECT_EQ(status(b, "weights_info", {{"tinker_path", path}}), 200);
  EXPECT_EQ(status_of(b.raw("DELETE", publish, "")), 404);
  ApiClient late(served.port(), served.keys().add("b", "train", {}, now_s() - 1)),
      early(served.port(), served.keys().add("b", "train", {}, now_s() + 3600));
  EXPECT_EQ(status(late, "session_heartbeat", {{"session_id", session}}), 401) << "expired";
  EXPECT_EQ(status(early, "session_heartbeat", {{"session_id", session}}), 404);
  const std::string whole = served.keys().add("b", "train");
  EXPECT_EQ(served.keys().revoke(whole).tenant, "b");
  try {
    served.keys().revoke(whole);
    FAIL() << "a key is revoked once";
  } catch (const ConfigError& error) {
    EXPECT_EQ(std::string(error.what()).find(whole), std::string::npos) << "the key is a secret";
  }
  served.keys().revoke("2");
  EXPECT_EQ(status(b, "session_heartbeat", {{"session_id", session}}), 401);
}

TEST(Tinker, TellsAfterARestartWhatWasLost) {
  const Directory folder;
  std::string run, path;
  json done;
  {
    Served served(folder.path());
    ApiClient caller(served.port());
    const std::string session = caller.session();
    run = caller.create_model(session).at("model_id");
    weights_after(caller, {ApiClient::work(run, 1, {1}), ApiClient::step(run, 2)});
    const json promise =
        caller.post("save_weights", {{"model_id", run}, {"path", "w"}, {"seq_id", 3}});
    done = promise;
    path = caller.wait(promise).at("path");
  }
  Served served(folder.path());
  ApiClient caller(served.port());
  EXPECT_EQ(caller.wait(done).at("path"), path) << "an outcome that was told stays";
  EXPECT_THAT(caller.wait(caller.post("optim_step", ApiClient::step(run, 4))).value("error", ""),
              HasSubstr("load its last checkpoint"));
  const json loaded = caller.wait(caller.post("load_weights", {{"session_id", caller.session()},
                                                               {"model_seq_id", 0},
                                                               {"path", path},
                                                               {"optimizer", true}}));
  EXPECT_TRUE(loaded.contains("model_id")) << loaded;
}

TEST(Tinker, SecondServerIsKeptOut) {
  const Directory folder;
  Served served(folder.path());
  DataDirectory other(folder.path());
  EXPECT_THROW(other.lock(), ConfigError);
}

}  // namespace
}  // namespace heddle::serve
