#include <atomic>
#include <filesystem>
#include <memory>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "client.h"
#include "recording_backend.h"
#include "serve/store/keys.h"
#include "serve/tinker/service.h"
#include "testing/temporary_directory.h"

namespace heddle::serve {
namespace {

using nlohmann::json;
using testing::body_of;
using testing::Client;
using ::testing::HasSubstr;
using testing::RecordingBackend;
using testing::status_of;

/// A server over a recording model; may be started again over the same data.
class Served {
 public:
  explicit Served(const std::filesystem::path& path, tinker::ServiceOptions options = quick())
      : data_(path), keys_(data_.database()) {
    data_.lock();
    server_.authenticate_by([this](const Request& request) {
      if (keys_.is_empty()) return Caller{"local", "", {"train", "sample"}};
      const auto owner = keys_.owner(std::string(request.header("x-api-key")));
      if (!owner) throw HttpError(401, "no such key");
      return *owner;
    });
    auto backend = std::make_unique<RecordingBackend>();
    backend_ = backend.get();
    model_ = std::make_unique<ModelThread>(std::move(backend));
    service_ = std::make_unique<tinker::Service>(server_, *model_, data_, options);
    service_->serve();
    port_ = server_.listen("127.0.0.1", 0);
    thread_ = std::thread([this] { server_.run(stop_, [this] { service_->drain(); }); });
  }
  ~Served() {
    stop_ = true;
    thread_.join();
    model_.reset();
  }

  static tinker::ServiceOptions quick() {
    tinker::ServiceOptions options;
    options.promises.poll_s = 0.2;
    options.runs_per_tenant = 3;
    return options;
  }

  int port() const { return port_; }
  Keys& keys() { return keys_; }
  const RecordingBackend& backend() const { return *backend_; }

 private:
  DataDirectory data_;
  Keys keys_;
  Server server_;
  RecordingBackend* backend_;
  std::unique_ptr<ModelThread> model_;
  std::unique_ptr<tinker::Service> service_;
  std::atomic<bool> stop_ = false;
  int port_ = 0;
  std::thread thread_;
};

/// One client of it.
class ApiClient {
 public:
  explicit ApiClient(int port, std::string key = "") : client_(port), key_(std::move(key)) {}

  std::string raw(const std::string& method, const std::string& path, const std::string& body,
                  const std::string& type = "application/json") {
    const std::string key = key_.empty() ? "" : "X-API-Key: " + key_ + "\r\n";
    return client_.ask(method, "/api/v1/" + path, body,
                       key + "Content-Type: " + type + "\r\nAccept: application/x-protobuf\r\n");
  }
  json post(const std::string& path, const json& body) {
    const std::string answer = raw("POST", path, body.dump());
    status = status_of(answer);
    const std::string text = body_of(answer);
    return json::accept(text) ? json::parse(text) : json(text);
  }
  json get(const std::string& path) {
    const std::string answer = raw("GET", path, "");
    status = status_of(answer);
    return json::parse(body_of(answer));
  }
  /// The outcome of a promise.
  json wait(const json& promise) {
    while (true) {
      const json answer = post("retrieve_future", {{"request_id", promise.at("request_id")}});
      if (!answer.is_object() || answer.value("type", "") != "try_again") return answer;
    }
  }
  std::string session() {
    return post("create_session", {{"tags", json::array()}, {"sdk_version", "0.38.0"}})
        .at("session_id");
  }
  json create_model(const std::string& session, int number = 0, int rank = 8) {
    return post("create_model", {{"session_id", session},
                                 {"model_seq_id", number},
                                 {"base_model", "base"},
                                 {"lora_config", {{"rank", rank}, {"seed", 1}}}});
  }
  static json work(const std::string& run, int seq, std::vector<int> tokens) {
    return {
        {"model_id", run},
        {"seq_id", seq},
        {"forward_backward_input",
         {{"loss_fn", "cross_entropy"},
          {"data",
           {{{"model_input", {{"chunks", {{{"type", "encoded_text"}, {"tokens", tokens}}}}}},
             {"loss_fn_inputs", {{"target_tokens", {{"data", tokens}, {"dtype", "int64"}}}}}}}}}}};
  }
  static json step(const std::string& run, int seq) {
    return {{"model_id", run}, {"seq_id", seq}, {"adam_params", {{"learning_rate", 0.5}}}};
  }

  int status = 0;

 private:
  Client client_;
  std::string key_;
};

using Directory = heddle::testing::TemporaryDirectory;

/// The number that the run's weights are after its steps.
double weights_after(ApiClient& caller, const std::vector<json>& requests) {
  std::vector<json> promises;
  double norm = 0;
  for (const json& request : requests) {
    const bool is_step = request.contains("adam_params");
    promises.push_back(caller.post(is_step ? "optim_step" : "forward_backward", request));
    EXPECT_EQ(caller.status, 200) << promises.back();
  }
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const json outcome = caller.wait(promises[i]);
    if (outcome.is_object() && outcome.contains("metrics"))
      norm = outcome["metrics"]["grad_norm:mean"];
  }
  return norm;
}

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

TEST(Tinker, SaysWhatIsWrongWithARequest) {
  const Directory folder;
  Served served(folder.path());
  ApiClient caller(served.port());
  const std::string session = caller.session();
  const auto detail = [&](const std::string& path, const json& body) {
    return caller.post(path, body).value("detail", "");
  };
  const std::string run = caller.create_model(session).at("model_id");
  json bad = ApiClient::work(run, 1, {1, 2});
  bad["forward_backward_input"]["loss_fn"] = "stable_reinforce";
  EXPECT_THAT(detail("forward_backward", bad), HasSubstr("loss_fn=importance_sampling"));
  EXPECT_THAT(detail("forward_backward", ApiClient::work(run, 1, {1, 100})),
              HasSubstr("datum 0 has token 100: the vocabulary has ids 0 to 99"));
  EXPECT_THAT(detail("forward_backward", ApiClient::work(run, 1, std::vector<int>(65, 1))),
              HasSubstr("datum 0 has 65 tokens: this server takes 64"));
  EXPECT_THAT(detail("forward_backward", ApiClient::work("other", 1, {1})), HasSubstr("not known"));
  bad = ApiClient::work(run, 1, {1, 2});
  bad["forward_backward_input"]["data"][0]["loss_fn_inputs"]["weights"] = {{"data", {1.0}},
                                                                           {"dtype", "float32"}};
  EXPECT_THAT(detail("forward_backward", bad), HasSubstr("input weights has 1 numbers"));
  // No number of a token, and none that an integer can hold.
  for (const json& number :
       {json(1.5), json(1e300), json(-1e300), json(1e19), json("1"), json(nullptr)}) {
    for (const char* dtype : {"int64", "float32"}) {
      bad = ApiClient::work(run, 1, {1, 2});
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
  EXPECT_THAT(caller.create_model(session, 3).value("detail", ""), HasSubstr("limit"));
  for (const char* name : {"../x", ".x", "a/b", ""}) {
    const json outcome =
        caller.wait(caller.post("save_weights", {{"model_id", run}, {"path", name}}));
    EXPECT_THAT(outcome.at("error").get<std::string>(), HasSubstr("checkpoint name")) << name;
  }
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
  EXPECT_THAT(caller.post("optim_step", ApiClient::step(run, 4)).at("detail").get<std::string>(),
              HasSubstr("load its last checkpoint"));
  const json loaded = caller.wait(caller.post("load_weights", {{"session_id", caller.session()},
                                                               {"model_seq_id", 0},
                                                               {"path", path},
                                                               {"optimizer", true}}));
  EXPECT_TRUE(loaded.contains("model_id")) << loaded;
}

TEST(Tinker, RunsRequestsAgainAfterARestartWithDurableSteps) {
  tinker::ServiceOptions durable = Served::quick();
  durable.durable_steps = 2;
  for (const int before : {1, 2, 3, 5, 6, 7}) {
    const Directory folder;
    std::vector<json> requests;
    const auto some = [&](const std::string& run) {
      requests.clear();
      for (int i = 0; i < 4; ++i) {
        requests.push_back(ApiClient::work(run, 2 * i + 1, {i + 1, i + 2}));
        requests.push_back(ApiClient::step(run, 2 * i + 2));
      }
      return requests;
    };
    double whole = 0;
    json made;
    std::string run;
    std::vector<json> promises;
    {
      Served served(folder.path(), durable);
      ApiClient caller(served.port());
      const std::string session = caller.session();
      whole = weights_after(caller, some(caller.create_model(session, 1).at("model_id")));
      made = caller.create_model(session);
      run = made.at("model_id");
      some(run);
      // The first of them have their outcomes; one has not.
      for (int i = 0; i < before; ++i)
        promises.push_back(
            caller.post(i % 2 == 0 ? "forward_backward" : "optim_step", requests[i]));
      for (int i = 0; i + 1 < before; ++i) caller.wait(promises[i]);
    }
    Served served(folder.path(), durable);
    ApiClient caller(served.port());
    for (const json& promise : promises) {
      const json outcome = caller.wait(promise);
      EXPECT_FALSE(outcome.is_object() && outcome.contains("error")) << outcome;
    }
    EXPECT_EQ(made, caller.create_model(run.substr(0, run.find(':'))));
    EXPECT_EQ(weights_after(caller, requests), whole) << "stopped after " << before;
  }
}

TEST(Tinker, SecondServerIsKeptOut) {
  const Directory folder;
  Served served(folder.path());
  DataDirectory other(folder.path());
  EXPECT_THROW(other.lock(), ConfigError);
}

}  // namespace
}  // namespace heddle::serve
