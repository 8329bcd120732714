// Requests that are refused, and those that come after them.
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "bytes.h"
#include "served.h"
#include "testing/temporary_directory.h"

namespace heddle::serve {
namespace {

using nlohmann::json;
using testing::ApiClient;
using testing::body_of;
using ::testing::HasSubstr;
using testing::Served;
using testing::sized;
using testing::status_of;
using testing::weights_after;
using testing::zstd_of;

using Directory = heddle::testing::TemporaryDirectory;

constexpr int kNoToken = 1'000'000;

/// A run that waits for a missing request fails at the next tick, so no test hangs.
tinker::ServiceOptions impatient() {
  tinker::ServiceOptions options = Served::quick();
  options.runs.gap_s = 0;
  return options;
}

/// A run that fails at once where it would wait.
struct Refused : public testing::OneRun {
  Refused() : OneRun(impatient()) {}
};

json saved(const std::string& run, int seq, const json& more) {
  json body = {{"model_id", run}, {"path", "a"}, {"seq_id", seq}};
  body.update(more);
  return body;
}

TEST_F(Refused, ARunGoesOnAfterARequestThatWasRefused) {
  const double norm =
      weights_after(caller, {ApiClient::work(run, 1, {1, 2}), ApiClient::step(run, 2)});
  const std::string other = caller.create_model(session, 1).at("model_id");
  const auto refused = [&](const char* path, const json& body, int status) {
    caller.post(path, body);
    EXPECT_EQ(caller.status, status) << path;
  };
  caller.post("forward_backward", ApiClient::work(other, 1, {1, kNoToken}));
  json step = ApiClient::step(other, 2);
  step["adam_params"]["learning_rate"] = -1;
  refused("optim_step", step, 422);
  refused("save_weights", saved(other, 3, {{"ttl_seconds", 5}}), 422);
  EXPECT_EQ(weights_after(caller, {ApiClient::work(other, 4, {1, 2}), ApiClient::step(other, 5)}),
            norm);
  // One that is refused while those after it have come, and wait.
  const json late = caller.post("forward_backward", ApiClient::work(other, 7, {1}));
  refused("save_weights_for_sampler", saved(other, 6, {{"kind", "inflight"}}), 400);
  EXPECT_THAT(caller.wait(late).get<std::string>(), HasSubstr("loss:sum"));
}

// The SDK sends the first request of a call last, and only if the others were promised.
TEST_F(Refused, ARequestOfACallInSeveralIsPromisedAndFails) {
  const double norm =
      weights_after(caller, {ApiClient::work(run, 1, {1, 2}), ApiClient::step(run, 2)});
  const std::string other = caller.create_model(session, 1).at("model_id");
  const json body = ApiClient::work(other, 2, {1, kNoToken});
  const json refused = caller.post("forward_backward", body);
  ASSERT_EQ(caller.status, 200) << refused;
  const json outcome = caller.wait(refused);
  EXPECT_THAT(outcome.at("error").get<std::string>(), HasSubstr("has token 1000000"));
  EXPECT_EQ(outcome.at("category"), "user");
  const json step = caller.post("optim_step", ApiClient::step(other, 3));
  caller.wait(caller.post("forward_backward", ApiClient::work(other, 1, {1, 2})));
  EXPECT_EQ(caller.wait(step).at("metrics").at("grad_norm:mean"), norm);
  EXPECT_EQ(caller.post("forward_backward", body), refused);
  // Without a number it is a request of its own.
  json alone = body;
  alone.erase("seq_id");
  caller.post("forward_backward", alone);
  EXPECT_EQ(caller.status, 400);
}

TEST(TinkerRefusals, AnotherTenantGivesUpNoPlace) {
  const Directory folder;
  Served served(folder.path(), impatient());
  ApiClient owner(served.port(), served.keys().add("ann", "train")),
      other(served.port(), served.keys().add("bob", "train"));
  const std::string run = owner.create_model(owner.session()).at("model_id");
  const json late = owner.post("optim_step", ApiClient::step(run, 3));
  other.post("forward_backward", ApiClient::work(run, 1, {kNoToken}));
  EXPECT_EQ(other.status, 400);
  json step = ApiClient::step(run, 2);
  step["adam_params"]["learning_rate"] = -1;
  other.post("optim_step", step);
  EXPECT_EQ(other.status, 404);
  other.post("save_weights_for_sampler", saved(run, 2, {{"kind", "inflight"}}));
  EXPECT_EQ(other.status, 400);
  for (const json& promise : {owner.post("forward_backward", ApiClient::work(run, 1, {1, 2})),
                              owner.post("optim_step", ApiClient::step(run, 2)), late}) {
    EXPECT_EQ(owner.status, 200) << promise;
    const json outcome = owner.wait(promise);
    EXPECT_FALSE(outcome.is_object() && outcome.contains("error")) << outcome;
  }
}

TEST_F(Refused, ANumberIsTakenAgainUntilALaterOneHasCome) {
  const auto refused = [&](int seq) {
    caller.post("save_weights", saved(run, seq, {{"ttl_seconds", 5}}));
    EXPECT_EQ(caller.status, 422);
  };
  refused(1);
  caller.wait(caller.post("forward_backward", ApiClient::work(run, 1, {1, 2})));
  EXPECT_EQ(caller.status, 200);
  refused(2);
  caller.wait(caller.post("optim_step", ApiClient::step(run, 3)));
  EXPECT_EQ(caller.status, 200);
  caller.post("forward_backward", ApiClient::work(run, 2, {1, 2}));
  EXPECT_EQ(caller.status, 409);
}

TEST(TinkerRefusals, ARestartGoesPastThem) {
  const Directory folder;
  tinker::ServiceOptions options = impatient();
  options.durable_steps = 5;
  std::string run;
  const auto requests = [&](int first) {
    return std::vector<json>{ApiClient::work(run, first, {1, 2}), ApiClient::step(run, first + 1)};
  };
  {
    Served served(folder.path(), options);
    ApiClient caller(served.port());
    run = caller.create_model(caller.session()).at("model_id");
    caller.post("forward_backward", ApiClient::work(run, 1, {kNoToken}));
    weights_after(caller, requests(2));
    // Nothing comes after these before the end.
    caller.post("save_weights", saved(run, 4, {{"ttl_seconds", 5}}));
    EXPECT_EQ(caller.status, 422);
    caller.post("forward_backward", ApiClient::work(run, 5, {kNoToken}));
    caller.post("optim_step", saved(run, 6, json::object()));
    EXPECT_EQ(caller.status, 422);
  }
  {
    Served served(folder.path(), options);
    ApiClient caller(served.port());
    EXPECT_NE(weights_after(caller, requests(7)), 0);
  }
  // A run in memory alone ends with its server, refused requests or not.
  options.durable_steps = 0;
  Served served(folder.path(), options);
  ApiClient caller(served.port());
  const json step = caller.wait(caller.post("optim_step", ApiClient::step(run, 9)));
  EXPECT_THAT(step.value("error", ""), HasSubstr("is not in memory"));
}

TEST(TinkerRefusals, APromiseFailsWhoseRequestIsRefusedAfterARestart) {
  const Directory folder;
  tinker::ServiceOptions options = impatient();
  options.durable_steps = 5;
  json waiting;
  {
    Served served(folder.path(), options);
    ApiClient caller(served.port());
    const std::string run = caller.create_model(caller.session()).at("model_id");
    waiting = caller.post("optim_step", ApiClient::step(run, 2));
  }
  options.max_rank = 4;  // the run cannot be made again
  Served served(folder.path(), options);
  ApiClient caller(served.port());
  EXPECT_THAT(caller.wait(waiting).at("error").get<std::string>(), HasSubstr("is not in memory"));
}

TEST(TinkerRefusals, WhatFailedForAMissingRequestIsNotRunAfterARestart) {
  const Directory folder;
  tinker::ServiceOptions options = impatient();
  options.durable_steps = 9;
  options.tick_s = 0.01;
  std::string run, session;
  double norm = 0;
  {
    Served served(folder.path(), options);
    ApiClient caller(served.port());
    session = caller.session();
    run = caller.create_model(session).at("model_id");
    const json late = caller.post("forward_backward", ApiClient::work(run, 2, {1, 2}));
    EXPECT_THAT(caller.wait(late).at("error").get<std::string>(), HasSubstr("has not come"));
    norm = weights_after(caller, {ApiClient::work(run, 3, {3, 4}), ApiClient::step(run, 4)});
  }
  Served served(folder.path(), options);
  ApiClient caller(served.port());
  const json next = caller.wait(caller.post("optim_step", ApiClient::step(run, 5)));
  const std::string plain = caller.create_model(session, 1).at("model_id");
  EXPECT_EQ(weights_after(caller, {ApiClient::work(plain, 1, {3, 4}), ApiClient::step(plain, 2)}),
            norm);
  EXPECT_EQ(next.at("metrics").at("grad_norm:mean"),
            weights_after(caller, {ApiClient::step(plain, 3)}));
}

// Whatever can be read of them tells the place that is given up.
TEST(TinkerRefusals, ARequestThatIsTooLargeIsPromisedAndFails) {
  const Directory folder;
  Served served(folder.path(), impatient(), {}, {.most_body_bytes = 10'000});
  ApiClient caller(served.port());
  const std::string run = caller.create_model(caller.session()).at("model_id");
  const auto refused = [&](const std::string& body, const std::string& type,
                           const std::string& message) {
    const std::string answer = caller.raw("POST", "forward_backward", body, type);
    ASSERT_EQ(status_of(answer), 200) << answer;
    EXPECT_THAT(caller.wait(json::parse(body_of(answer))).value("error", ""), HasSubstr(message));
  };
  const std::string protobuf = "application/x-protobuf", of_run = "\x0A" + sized(run);
  refused(ApiClient::work(run, 1, std::vector(3000, 1)).dump(), "application/json",
          ": 10000 are allowed");
  refused(of_run + "\x10\x02" + std::string(10'000, '\x1A'), protobuf, ": 10000 are allowed");
  refused(zstd_of(of_run + "\x10\x03" + std::string(100'000, '\x1A')),
          protobuf + "\r\nContent-Encoding: zstd", "more than 10000 bytes once");
  refused(zstd_of(of_run + "\x10\x04") + "rest", protobuf + "\r\nContent-Encoding: zstd",
          "the zstd body is broken");
  refused(R"({"seq_id": 5, "model_id": ")" + run + R"(", "forward_backward_input": {)",
          "application/json", "the body is no JSON");
  json step = ApiClient::step(run, 6);
  step["adam_params"]["more"] = std::string(10'000, 'x');
  caller.post("optim_step", step);
  EXPECT_EQ(caller.status, 413);
  EXPECT_NE(weights_after(caller, {ApiClient::work(run, 7, {1, 2}), ApiClient::step(run, 8)}), 0);
}

TEST(TinkerRefusals, ClientsAreToldToSendNoMoreAtOnceThanIsTaken) {
  const Directory folder;
  Served small(folder.path() / "small", impatient(), {}, {.most_body_bytes = 100'000});
  Served large(folder.path() / "large");
  const auto told = [](const Served& served) {
    const json config = ApiClient(served.port()).post("client/config", json::object());
    return std::pair(config.at("fwdbwd_max_chunk_bytes_count"), config.at("fwdbwd_max_chunk_len"));
  };
  EXPECT_EQ(told(small), (std::pair<json, json>(50'000, 97)));
  EXPECT_EQ(told(large), (std::pair<json, json>(5'000'000, 1024)));
}

// A status would leave a client waiting that sends a call in several requests.
TEST_F(Refused, ARunThatIsNotInMemoryHasOneAnswer) {
  caller.raw("POST", "sessions/" + session + "/finish", R"({"reason": {"type": "success"}})");
  const json work = ApiClient::work(run, 2, {1, 2});
  const json refused = caller.post("forward_backward", work);
  for (const json& promise : {refused, caller.post("optim_step", ApiClient::step(run, 3)),
                              caller.post("save_weights", saved(run, 4, json::object())),
                              caller.post("forward_backward", ApiClient::work(run, 1, {1, 2}))}) {
    ASSERT_EQ(caller.status, 200) << promise;
    const json outcome = caller.wait(promise);
    EXPECT_THAT(outcome.value("error", ""), HasSubstr("is not in memory"));
    EXPECT_EQ(outcome.value("category", ""), "server");
  }
  EXPECT_EQ(caller.post("forward_backward", work), refused);
  caller.post("forward_backward", ApiClient::work(run, 0, {1, 2}));
  EXPECT_EQ(caller.status, 404) << "without a number it is a request of its own";
}

TEST_F(Refused, NumbersThatMakeNoLoss) {
  const struct {
    const char* loss;
    json config;
    const char* message;
  } cases[] = {
      {"ppo", {{"clip_low_threshold", 1.5}}, "clip_low_threshold 1.5 and clip_high_threshold 1.2"},
      {"ppo", {{"clip_low_threshold", "0.8"}}, "loss_fn_config.clip_low_threshold: expected a fin"},
      {"ppo", {{"clip_low_threshold", nullptr}}, "expected a finite number, found null"},
      {"cross_entropy", {{"beta", 1}}, "loss_fn cross_entropy has no 'beta'"},
      {"another", json::object(), "loss_fn 'another' is not one of cross_entropy, importance_sam"},
  };
  for (const auto& [loss, config, message] : cases) {
    json work = ApiClient::work(run, 0, {1, 2});
    json& input = work["forward_backward_input"];
    input["loss_fn"] = loss;
    input["loss_fn_config"] = config;
    if (std::string(loss) == "ppo")
      for (const char* name : {"logprobs", "advantages"})
        input["data"][0]["loss_fn_inputs"][name] = {{"data", {0, 0}}, {"dtype", "float32"}};
    const json answer = caller.post("forward_backward", work);
    EXPECT_EQ(caller.status, 422) << answer;
    EXPECT_THAT(answer.value("detail", ""), HasSubstr(message));
  }
}

TEST_F(Refused, ANumberThatIsNoNumberIsNotTheDefault) {
  json step = ApiClient::step(run, 1);
  step["adam_params"]["learning_rate"] = nullptr;  // a client's NaN
  const json answer = caller.post("optim_step", step);
  EXPECT_EQ(caller.status, 422);
  EXPECT_THAT(answer.dump(),
              HasSubstr("adam_params.learning_rate: expected a finite number, found null"));
}

}  // namespace
}  // namespace heddle::serve
