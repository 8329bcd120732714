// Requests that are refused, and those that come after them.
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "served.h"
#include "testing/temporary_directory.h"

namespace heddle::serve {
namespace {

using nlohmann::json;
using testing::ApiClient;
using ::testing::HasSubstr;
using testing::Served;
using testing::weights_after;

using Directory = heddle::testing::TemporaryDirectory;

constexpr int kNoToken = 1'000'000;

/// A run that waits for a missing request fails at the next tick, so no test hangs.
tinker::ServiceOptions impatient() {
  tinker::ServiceOptions options = Served::quick();
  options.runs.gap_s = 0;
  return options;
}

json saved(const std::string& run, int seq, const json& more) {
  json body = {{"model_id", run}, {"path", "a"}, {"seq_id", seq}};
  body.update(more);
  return body;
}

TEST(TinkerRefusals, ARunGoesOnAfterARequestThatWasRefused) {
  const Directory folder;
  Served served(folder.path(), impatient());
  ApiClient caller(served.port());
  const std::string session = caller.session();
  const std::string plain = caller.create_model(session, 0).at("model_id");
  const double norm =
      weights_after(caller, {ApiClient::work(plain, 1, {1, 2}), ApiClient::step(plain, 2)});
  const std::string run = caller.create_model(session, 1).at("model_id");
  const auto refused = [&](const char* path, const json& body, int status) {
    caller.post(path, body);
    EXPECT_EQ(caller.status, status) << path;
  };
  refused("forward_backward", ApiClient::work(run, 1, {1, kNoToken}), 400);
  json step = ApiClient::step(run, 2);
  step["adam_params"]["learning_rate"] = -1;
  refused("optim_step", step, 422);
  refused("save_weights", saved(run, 3, {{"ttl_seconds", 5}}), 422);
  EXPECT_EQ(weights_after(caller, {ApiClient::work(run, 4, {1, 2}), ApiClient::step(run, 5)}),
            norm);
  // One that is refused while those after it have come, and wait.
  const json late = caller.post("forward_backward", ApiClient::work(run, 7, {1}));
  refused("save_weights_for_sampler", saved(run, 6, {{"kind", "inflight"}}), 400);
  EXPECT_THAT(caller.wait(late).get<std::string>(), HasSubstr("loss:sum"));
}

TEST(TinkerRefusals, ANumberIsTakenAgainUntilALaterOneHasCome) {
  const Directory folder;
  Served served(folder.path(), impatient());
  ApiClient caller(served.port());
  const std::string run = caller.create_model(caller.session()).at("model_id");
  caller.post("forward_backward", ApiClient::work(run, 1, {kNoToken}));
  EXPECT_EQ(caller.status, 400);
  caller.wait(caller.post("forward_backward", ApiClient::work(run, 1, {1, 2})));
  EXPECT_EQ(caller.status, 200);
  caller.post("forward_backward", ApiClient::work(run, 2, {kNoToken}));
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
    EXPECT_EQ(caller.status, 400);
    weights_after(caller, requests(2));
  }
  Served served(folder.path(), options);
  ApiClient caller(served.port());
  EXPECT_NE(weights_after(caller, requests(4)), 0);
}

TEST(TinkerRefusals, ANumberThatIsNoNumberIsNotTheDefault) {
  const Directory folder;
  Served served(folder.path());
  ApiClient caller(served.port());
  const std::string run = caller.create_model(caller.session()).at("model_id");
  json step = ApiClient::step(run, 1);
  step["adam_params"]["learning_rate"] = nullptr;  // a client's NaN
  const json answer = caller.post("optim_step", step);
  EXPECT_EQ(caller.status, 422);
  EXPECT_THAT(answer.dump(),
              HasSubstr("adam_params.learning_rate: expected a finite number, found null"));
}

}  // namespace
}  // namespace heddle::serve
