// Fields of requests: each is honoured or named.
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "served.h"

namespace heddle::serve {
namespace {

using nlohmann::json;
using testing::ApiClient;
using ::testing::HasSubstr;
using testing::status_of;

/// With a checkpoint of the run.
struct Fields : public testing::OneRun {
  std::string path =
      caller.wait(caller.post("save_weights", {{"model_id", run}, {"path", "a"}, {"seq_id", 1}}))
          .at("path");

  std::string detail(const json& answer, int status) {
    EXPECT_EQ(caller.status, status) << answer;
    return answer.value("detail", "");
  }
};

TEST_F(Fields, OneThatNobodyKnowsIsRefusedByName) {
  const json sample{{"base_model", "base"},
                    {"prompt", {{"chunks", {{{"tokens", {1}}}}}}},
                    {"sampling_params", {{"max_tokens", 1}}}};
  const json made{{"session_id", session},
                  {"model_seq_id", 7},
                  {"base_model", "base"},
                  {"optimizer_config", {{"type", "adamw"}}},
                  {"lora_config", {{"rank", 8}}}};
  const json work = ApiClient::work(run, 0, {1}), step = ApiClient::step(run, 0);
  json forward{{"model_id", run}, {"forward_input", work.at("forward_backward_input")}};
  const struct {
    const char* path;
    json body;
    std::vector<std::string> objects;  ///< Where a field may be misspelt.
  } cases[] = {
      {"create_session", {{"tags", json::array()}, {"sdk_version", "0.38.0"}}, {""}},
      {"session_heartbeat", {{"session_id", session}}, {""}},
      {"sessions/search", {{"owner", {{"type", "own"}}}}, {"", "/owner"}},
      {"retrieve_future", {{"request_id", "r"}}, {""}},
      {"retrieve_futures", {{"target", {{"sampling_session_id", "s"}}}}, {"", "/target"}},
      {"cancel_future", {{"request_id", "r"}}, {""}},
      {"create_model", made, {"", "/lora_config", "/optimizer_config"}},
      {"get_info", {{"model_id", run}}, {""}},
      {"forward_backward",
       work,
       {"", "/forward_backward_input", "/forward_backward_input/data/0",
        "/forward_backward_input/data/0/model_input",
        "/forward_backward_input/data/0/model_input/chunks/0",
        "/forward_backward_input/data/0/loss_fn_inputs/target_tokens"}},
      {"forward", forward, {"", "/forward_input"}},
      {"optim_step", step, {"", "/adam_params"}},
      {"unload_model", {{"model_id", run}}, {""}},
      {"save_weights", {{"model_id", run}, {"path", "b"}}, {""}},
      {"save_weights_for_sampler", {{"model_id", run}, {"path", "b"}}, {""}},
      {"save_weights_external", {{"model_id", run}, {"path", "b"}}, {""}},
      {"load_weights", {{"session_id", session}, {"model_seq_id", 8}, {"path", path}}, {""}},
      {"weights_info", {{"tinker_path", path}}, {""}},
      {"copy_weights", {{"source_path", path}, {"destination_project_id", "default"}}, {""}},
      {"create_sampling_session",
       {{"session_id", session}, {"sampling_session_seq_id", 0}, {"base_model", "base"}},
       {""}},
      {"join_sampling_session", {{"sampling_session_id", "s"}}, {""}},
      {"asample", sample, {"", "/prompt", "/prompt/chunks/0", "/sampling_params"}},
      {"sessions/x/finish", {{"reason", {{"type", "success"}}}}, {"", "/reason"}},
  };
  for (const auto& [address, body, objects] : cases) {
    for (const std::string& object : objects) {
      json wrong = body;
      wrong[json::json_pointer(object + "/mispelt")] = 1;
      EXPECT_THAT(detail(caller.post(address, wrong), 422),
                  HasSubstr("mispelt is not known: expect"))
          << address << object;
      // A newer client leaves unset what it has besides.
      wrong[json::json_pointer(object + "/mispelt")] = nullptr;
      caller.post(address, wrong);
      EXPECT_NE(caller.status, 422) << address << object;
    }
  }
  EXPECT_EQ(detail(caller.post("get_info", {{"model_id", run}, {"modelid", run}}), 422),
            "field modelid is not known: expected one of model_id");
}

TEST_F(Fields, AnEndIsTakenAwayByItsNameAlone) {
  const std::string address = "training_runs/" + run + "/checkpoints/weights/a/ttl";
  const auto put = [&](const json& body) {
    return status_of(caller.raw("PUT", address, body.dump()));
  };
  const auto ends = [&] {
    return caller.get("training_runs/" + run + "/checkpoints")
        .at("checkpoints")
        .at(0)
        .contains("expires_at");
  };
  EXPECT_EQ(put({{"ttl_seconds", 3600}}), 204);
  for (const json& body : {json{{"ttl_second", nullptr}}, json{{"ttl", 3600}}, json::object()})
    EXPECT_EQ(put(body), 422) << body;
  EXPECT_TRUE(ends());
  EXPECT_EQ(put({{"ttl_seconds", nullptr}}), 204);
  EXPECT_FALSE(ends());
}

TEST_F(Fields, WhatIsNotKeptIsNamed) {
  EXPECT_THAT(
      caller.post("create_session", {{"tags", {"a"}}, {"project_id", "p"}})
          .at("warning_message")
          .get<std::string>(),
      ::testing::AllOf(HasSubstr("tags are not kept"), HasSubstr("project_id is not used")));
  EXPECT_FALSE(caller.post("create_session", {{"tags", json::array()}, {"project_id", "default"}})
                   .contains("warning_message"));
  const json unnamed{
      {"model_id", run}, {"seq_id", 2}, {"sampling_session_seq_id", 0}, {"ttl_seconds", 3600}};
  EXPECT_THAT(detail(caller.post("save_weights_for_sampler", unnamed), 422),
              HasSubstr("field ttl_seconds: expected nothing: weights without a name"));
  for (const char* name : {"base_model", "user_metadata"}) {
    const json load{{"model_id", run}, {"path", path}, {name, "base"}};
    EXPECT_THAT(detail(caller.post("load_weights", load), 422), HasSubstr(name));
  }
  const json both{{"session_id", session},
                  {"sampling_session_seq_id", 0},
                  {"base_model", "another"},
                  {"model_path", path}};
  EXPECT_THAT(detail(caller.post("create_sampling_session", both), 400),
              HasSubstr("base_model another is not served here"));
  const json owner{{"owner", {{"type", "user"}, {"owner_urns", {"u"}}}}};
  EXPECT_THAT(detail(caller.post("sessions/search", owner), 400), HasSubstr("owner user"));
}

TEST_F(Fields, HowASessionWasFinishedIsFound) {
  const auto finish = [&](const json& body) {
    return status_of(caller.raw("POST", "sessions/" + session + "/finish", body.dump()));
  };
  EXPECT_EQ(finish({{"reason", {{"type", "sucess"}}}}), 422);
  EXPECT_EQ(finish({{"reason", {{"type", "errored"}}}, {"detail", "no more data"}}), 204);
  const json found = caller.post("sessions/search", {{"session_id", session}}).at("sessions").at(0);
  EXPECT_EQ(found.at("status"), (json{{"type", "client_finished"},
                                      {"reason", {{"type", "errored"}}},
                                      {"detail", "no more data"}}));
}

TEST_F(Fields, QueriesOfListsAreLookedAt) {
  EXPECT_EQ(caller.get("training_runs?limit=1&access_scope=owned&project_id=default")
                .at("training_runs")
                .size(),
            1U);
  EXPECT_THAT(detail(caller.get("training_runs?limits=1"), 422),
              HasSubstr("limits is not known in the query of /api/v1/training_runs: expected one"));
  EXPECT_THAT(detail(caller.get("sessions?access_scope=all"), 422),
              HasSubstr("access_scope is all"));
  EXPECT_THAT(detail(caller.get("training_runs?project_id=p"), 400), HasSubstr("one project"));
}

}  // namespace
}  // namespace heddle::serve
