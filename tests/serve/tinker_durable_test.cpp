#include <filesystem>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/files.h"
#include "serve/tinker/checkpoints.h"
#include "served.h"
#include "testing/temporary_directory.h"

// Runs that go on after a restart: serve.durable_steps.
namespace heddle::serve {
namespace {

using nlohmann::json;
using testing::ApiClient;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Served;
using testing::weights_after;

using Directory = heddle::testing::TemporaryDirectory;

tinker::ServiceOptions durable() {
  tinker::ServiceOptions options = Served::quick();
  options.durable_steps = 2;
  return options;
}

std::vector<json> steps_of(const std::string& run, int first, int count) {
  std::vector<json> requests;
  for (int seq = first; seq < first + 2 * count; seq += 2) {
    requests.push_back(ApiClient::work(run, seq, {seq, seq + 1}));
    requests.push_back(ApiClient::step(run, seq + 1));
  }
  return requests;
}

/// Names of the states in a run's folder.
std::vector<std::string> states(const Directory& data, const std::string& run) {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(data.path() / "tenants" / "local" / "runs" / run)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("state-")) names.push_back(name);
  }
  return names;
}

TEST(Durable, RunsRequestsAgainAfterARestart) {
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
      Served served(folder.path(), durable());
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
    Served served(folder.path(), durable());
    ApiClient caller(served.port());
    for (const json& promise : promises) {
      const json outcome = caller.wait(promise);
      EXPECT_FALSE(outcome.is_object() && outcome.contains("error")) << outcome;
    }
    EXPECT_EQ(made, caller.create_model(run.substr(0, run.find(':'))));
    EXPECT_EQ(weights_after(caller, requests), whole) << "stopped after " << before;
  }
}

/// Outcomes of requests, and the run's weights after them and one more step; with a restart after
/// the first `before` of them, or without.
std::pair<std::vector<std::string>, double> after_failures(const std::vector<json>& bodies,
                                                           std::optional<std::size_t> before) {
  tinker::ServiceOptions options = durable();
  options.durable_steps = 20;
  const Directory folder;
  std::optional<Served> served(std::in_place, folder.path(), options);
  std::optional<ApiClient> caller(std::in_place, served->port());
  const std::string run = caller->create_model(caller->session()).at("model_id");
  std::vector<std::string> outcomes;
  for (std::size_t i = 0; i < bodies.size(); ++i) {
    json body = bodies[i];
    body["model_id"] = run;
    const bool is_step = body.contains("adam_params");
    const json outcome =
        caller->wait(caller->post(is_step ? "optim_step" : "forward_backward", body));
    outcomes.push_back(outcome.is_object() ? outcome.value("error", "") : "");
    if (before != i + 1) continue;
    caller.reset();
    served.reset();
    served.emplace(folder.path(), options);
    caller.emplace(served->port());
  }
  const auto next = static_cast<int>(bodies.size()) + 1;
  return {outcomes, weights_after(*caller, steps_of(run, next, 1))};
}

TEST(Durable, GradientsThatWereDroppedStayDropped) {
  json not_finite = ApiClient::step("", 2);
  not_finite["adam_params"]["learning_rate"] = 13;
  const std::vector<std::vector<json>> all = {
      {ApiClient::work("", 1, {3, 4}), not_finite, ApiClient::work("", 3, {5, 6})},
      {ApiClient::work("", 1, {3, 4}), ApiClient::work("", 2, {99, 4}),
       ApiClient::work("", 3, {5, 6}), ApiClient::step("", 4), ApiClient::work("", 5, {7, 8})}};
  for (const std::vector<json>& bodies : all) {
    const auto whole = after_failures(bodies, std::nullopt);
    for (std::size_t before = 1; before <= bodies.size(); ++before)
      EXPECT_EQ(after_failures(bodies, before), whole) << "restart after " << before;
  }
  EXPECT_THAT(after_failures(all[0], std::nullopt).first,
              ElementsAre("", HasSubstr("not finite"), ""));
  EXPECT_THAT(
      after_failures(all[1], std::nullopt).first,
      ElementsAre("", "the device has no memory left", "", "the gradients were dropped", ""));
}

TEST(Durable, AStepWhoseStateCannotBeSavedIsAStep) {
  const Directory folder;
  std::string run, session;
  {
    Served served(folder.path(), durable());
    ApiClient caller(served.port());
    session = caller.session();
    run = caller.create_model(session).at("model_id");
    weights_after(caller, steps_of(run, 1, 2));
    served.backend().disk_is_full = true;
    weights_after(caller, steps_of(run, 5, 2));
    EXPECT_EQ(states(folder, run).size(), 1U);
    // One that its client asked for is not told of as saved; the run's order is as it was.
    const json save{{"model_id", run}, {"path", "w"}, {"seq_id", 9}};
    const json failed = caller.wait(caller.post("save_weights", save));
    EXPECT_EQ(failed.at("category"), "server");
    EXPECT_THAT(failed.at("error").get<std::string>(), HasSubstr("its disk is full"));
  }
  Served served(folder.path(), durable());
  ApiClient caller(served.port());
  const double after = weights_after(caller, steps_of(run, 10, 1));
  const std::string whole = caller.create_model(session, 1).at("model_id");
  weights_after(caller, steps_of(whole, 1, 4));
  std::vector<json> last{ApiClient::work(whole, 9, {10, 11}), ApiClient::step(whole, 10)};
  EXPECT_EQ(weights_after(caller, last), after);
}

TEST(Durable, ARunWithoutASeedKeepsTheOneItWasGiven) {
  const Directory folder;
  std::string run, session;
  double before = 0;
  {
    Served served(folder.path(), durable());
    ApiClient caller(served.port());
    session = caller.session();
    const json made = caller.post("create_model", {{"session_id", session},
                                                   {"model_seq_id", 0},
                                                   {"base_model", "base"},
                                                   {"lora_config", {{"rank", 8}}}});
    run = made.at("model_id");
    before = weights_after(caller, steps_of(run, 1, 1));
  }
  Served served(folder.path(), durable());
  ApiClient caller(served.port());
  // The run is made and its step done anew; its repeated request is told what it was told before.
  EXPECT_EQ(weights_after(caller, steps_of(run, 1, 1)), before);
  const double after = weights_after(caller, steps_of(run, 3, 1));
  const json saved =
      caller.wait(caller.post("save_weights", {{"model_id", run}, {"path", "w"}, {"seq_id", 5}}));
  ASSERT_TRUE(saved.contains("path")) << saved;
  // The seed is all that a run of this model begins with.
  const std::uint64_t seed = served.seed_of(run);
  const json again = caller.post("create_model", {{"session_id", session},
                                                  {"model_seq_id", 1},
                                                  {"base_model", "base"},
                                                  {"lora_config", {{"rank", 8}, {"seed", seed}}}});
  EXPECT_EQ(weights_after(caller, steps_of(again.at("model_id"), 1, 1)), before);
  EXPECT_EQ(weights_after(caller, steps_of(again.at("model_id"), 3, 1)), after);
}

TEST(Durable, ARunKeepsTheExpertFactorsThatItWasMadeWith) {
  const Directory folder;
  tinker::ServiceOptions options = durable();
  std::string session;
  {
    Served served(folder.path(), options);
    ApiClient caller(served.port());
    session = caller.session();
    const std::string run = caller.create_model(session).at("model_id");
    weights_after(caller, {ApiClient::work(run, 1, {1, 2})});
    ASSERT_EQ(served.backend().created.size(), 1U);
    EXPECT_TRUE(served.backend().created[0].shared_expert_factors);
  }
  options.shared_expert_factors = false;
  Served served(folder.path(), options);
  ApiClient caller(served.port());
  const std::string run = caller.create_model(session, 1).at("model_id");
  weights_after(caller, {ApiClient::work(run, 1, {1, 2})});
  ASSERT_EQ(served.backend().created.size(), 2U);
  EXPECT_TRUE(served.backend().created[0].shared_expert_factors);
  EXPECT_FALSE(served.backend().created[1].shared_expert_factors);
  // Made before there was a choice.
  nlohmann::json before = tinker::as_json({});
  before.erase("shared_expert_factors");
  EXPECT_FALSE(tinker::set_options_of(before).shared_expert_factors);
}

TEST(Durable, ALoadWithAnotherTenantsKeyIsRunAgainWithoutIt) {
  const Directory folder;
  std::string ann, bob, grant, run;
  {
    Served served(folder.path(), durable());
    ann = served.keys().add("ann", "train");
    bob = served.keys().add("bob", "train");
    grant = served.keys().add("ann", "read");
    ApiClient owner(served.port(), ann), other(served.port(), bob);
    const std::string owned = owner.create_model(owner.session()).at("model_id");
    const json saved =
        owner.wait(owner.post("save_weights", {{"model_id", owned}, {"path", "w"}, {"seq_id", 1}}));
    const std::string session = other.session();
    run = session + ":train:0";
    const json loaded = other.wait(other.post("load_weights", {{"session_id", session},
                                                               {"model_seq_id", 0},
                                                               {"path", saved.at("path")},
                                                               {"optimizer", true},
                                                               {"weights_access_token", grant}}));
    ASSERT_EQ(loaded.at("model_id"), run);
    other.wait(other.post("optim_step", ApiClient::step(run, 1)));
    served.keys().revoke(grant.substr(0, 12));
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    if (!entry.is_regular_file()) continue;
    EXPECT_EQ(files::read(entry.path(), files::kTextLimit).find(grant), std::string::npos)
        << entry.path();
  }
  Served served(folder.path(), durable());
  ApiClient other(served.port(), bob);
  EXPECT_FALSE(other.wait(other.post("optim_step", ApiClient::step(run, 2))).contains("error"));
}

TEST(Durable, ARunThatEndsLeavesNothingBehind) {
  const Directory folder;
  std::string unloaded, finished, living;
  {
    Served served(folder.path(), durable());
    ApiClient caller(served.port());
    const std::string session = caller.session(), other = caller.session();
    unloaded = caller.create_model(session, 0).at("model_id");
    living = caller.create_model(session, 1).at("model_id");
    finished = caller.create_model(other, 0).at("model_id");
    for (const std::string& run : {unloaded, finished, living}) {
      weights_after(caller, steps_of(run, 1, 5));
      EXPECT_EQ(states(folder, run).size(), 1U);
    }
    caller.wait(caller.post("unload_model", {{"model_id", unloaded}}));
    caller.post("sessions/" + other + "/finish", {{"reason", {{"type", "success"}}}});
    EXPECT_EQ(states(folder, unloaded).size(), 0U);
    EXPECT_EQ(states(folder, finished).size(), 0U);
    EXPECT_EQ(states(folder, living).size(), 1U);
  }
  // A server that is killed between a state and its entry in the database leaves one.
  std::filesystem::create_directory(folder.path() / "tenants" / "local" / "runs" / living /
                                    "state-of-nobody");
  Served served(folder.path(), durable());
  ApiClient caller(served.port());
  caller.wait(caller.post("optim_step", ApiClient::step(living, 11)));
  EXPECT_EQ(states(folder, living).size(), 1U);
  EXPECT_NE(states(folder, living).at(0), "state-of-nobody");
  for (const std::string& run : {unloaded, finished})
    EXPECT_THAT(caller.wait(caller.post("optim_step", ApiClient::step(run, 11))).value("error", ""),
                HasSubstr("not in memory"));
}

TEST(Durable, ARequestWithoutANumberIsToldThatItIsLost) {
  const Directory folder;
  json promise;
  {
    Served served(folder.path(), durable());
    ApiClient caller(served.port());
    const std::string run = caller.create_model(caller.session()).at("model_id");
    // Both wait for seven others.
    caller.post("optim_step", ApiClient::step(run, 8));
    promise =
        caller.post("optim_step", {{"model_id", run}, {"adam_params", {{"learning_rate", 1}}}});
    ASSERT_EQ(caller.status, 200);
  }
  Served served(folder.path(), durable());
  ApiClient caller(served.port());
  EXPECT_THAT(caller.wait(promise).at("error").get<std::string>(), HasSubstr("restarted"));
}

TEST(Durable, RequestsOfOneTurnArePromisedTogetherOrNotAtAll) {
  const Directory folder;
  Served served(folder.path(), durable());
  ApiClient caller(served.port());
  const std::string session = caller.session();
  std::vector<json> bodies;
  std::vector<std::unique_ptr<ApiClient>> callers;
  for (int number = 0; number < 3; ++number) {
    const json made = caller.create_model(session, number);
    caller.wait(made);
    bodies.push_back(ApiClient::step(made.at("model_id"), 1));
    callers.push_back(std::make_unique<ApiClient>(served.port()));
    callers.back()->get("get_server_capabilities");  // the server knows the connection
  }
  bodies[1]["type"] = std::string(3600, 'x');  // a page of its own, one read of a socket
  const auto post_all = [&] {
    std::vector<json> answers;
    served.in_one_turn([&] {
      for (std::size_t i = 0; i < callers.size(); ++i)
        callers[i]->begin_post("optim_step", bodies[i]);
    });
    for (const auto& each : callers) {
      answers.push_back(each->end_post());
      answers.back()["status"] = each->status;
    }
    return answers;
  };
  served.leave_room(0);
  for (const json& answer : post_all()) EXPECT_EQ(answer.at("status"), 500) << answer;
  served.leave_room(100000);
  for (const json& answer : post_all()) {
    ASSERT_EQ(answer.at("status"), 200) << answer;
    EXPECT_TRUE(caller.wait(answer).contains("metrics"));
  }
}

TEST(Durable, ARunThatTheDiskDoesNotTakeIsNotPromised) {
  const Directory folder;
  Served served(folder.path());
  ApiClient caller(served.port());
  const json body{{"session_id", caller.session()},
                  {"model_seq_id", 0},
                  {"base_model", "base"},
                  {"lora_config", {{"rank", 8}}},
                  {"user_metadata", {{"note", std::string(9000, 'x')}}}};
  served.leave_room(0);
  caller.post("create_model", body);
  EXPECT_EQ(caller.status, 500);
  served.leave_room(100000);
  const json promise = caller.post("create_model", body);
  ASSERT_EQ(caller.status, 200);
  json answer;
  for (int i = 0; i < 20 && !answer.contains("model_id"); ++i)
    answer = caller.post("retrieve_future", {{"request_id", promise.at("request_id")}});
  EXPECT_TRUE(answer.contains("model_id")) << answer;
}

TEST(Durable, AnOutcomeWaitsUntilTheDiskTakesIt) {
  const Directory folder;
  Served served(folder.path(), durable());
  ApiClient caller(served.port());
  const std::string session = caller.session();
  const json made = caller.create_model(session);
  caller.wait(made);
  const std::string run = made.at("model_id");
  const json first = caller.post("forward_backward", ApiClient::work(run, 1, {98, 1}));
  served.backend().long_work_began.acquire();
  json body = ApiClient::work(run, 2, std::vector<int>(60, 5));
  json& data = body["forward_backward_input"]["data"];
  while (data.size() < 30) data.push_back(data[0]);
  const json second = caller.post("forward_backward", body);
  served.leave_room(2);  // a table's first page
  served.fill();
  served.backend().long_work_may_end.release();
  EXPECT_EQ(caller.post("retrieve_future", {{"request_id", second.at("request_id")}}).at("type"),
            "try_again");
  served.leave_room(100000);
  EXPECT_FALSE(caller.wait(first).is_object());
  EXPECT_FALSE(caller.wait(second).is_object());
}

TEST(Durable, RequestsAreFoundByTheirPlace) {
  const Directory folder;
  Served served(folder.path(), durable());
  ApiClient caller(served.port());
  const std::string run = caller.create_model(caller.session()).at("model_id");
  weights_after(caller, steps_of(run, 1, 5));
  const std::int64_t before = served.rows_scanned();
  weights_after(caller, steps_of(run, 11, 5));
  weights_after(caller, steps_of(run, 11, 1));
  EXPECT_EQ(served.rows_scanned(), before) << "the cost of a request grows with their number";
}

}  // namespace
}  // namespace heddle::serve
