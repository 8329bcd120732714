// Weights that are saved for a sampler without a name.
#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

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

using Directory = heddle::testing::TemporaryDirectory;

/// A client that saves without a name, and samples from what it saved.
class Unnamed {
 public:
  explicit Unnamed(const Served& served)
      : caller_(served.port()),
        session_(caller_.session()),
        run_(caller_.create_model(session_).at("model_id")) {}

  json save(int number) { return save_as(number, number + 1); }
  json save_as(int number, int seq) {
    return caller_.wait(
        caller_.post("save_weights_for_sampler",
                     {{"model_id", run_}, {"seq_id", seq}, {"sampling_session_seq_id", number}}));
  }
  /// The server's answer, of the client's next request to this sampler.
  json sample(int number) {
    const json promise = caller_.post("asample", {{"sampling_session_id", sampler(number)},
                                                  {"seq_id", ++asked_},
                                                  {"num_samples", 1},
                                                  {"prompt", text({1})},
                                                  {"sampling_params", {{"max_tokens", 1}}}});
    if (caller_.status == 200) caller_.wait(promise);
    return promise;
  }
  std::string sampler(int number) const { return session_ + ":sample:" + std::to_string(number); }
  ApiClient& caller() { return caller_; }
  const std::string& session() const { return session_; }
  const std::string& run() const { return run_; }

 private:
  static json text(const std::vector<int>& tokens) {
    return {{"chunks", {{{"type", "encoded_text"}, {"tokens", tokens}}}}};
  }
  ApiClient caller_;
  std::string session_, run_;
  int asked_ = 0;
};

TEST(TinkerSamplers, WeightsWithoutANameAreSampledFromMemory) {
  const Directory folder;
  Served served(folder.path());
  Unnamed client(served);
  EXPECT_EQ(client.save(0).at("sampling_session_id"), client.sampler(0));
  EXPECT_TRUE(client.sample(0).contains("request_id"));
  EXPECT_EQ(served.backend().calls, " snapshot 1 sample of memory://" + client.run() + "/0");
  // It is no checkpoint, nor can it be named as one.
  EXPECT_TRUE(client.caller().get("checkpoints").at("checkpoints").empty());
  EXPECT_FALSE(client.caller().get("samplers/" + client.sampler(0)).contains("model_path"));
  client.caller().post("create_sampling_session",
                       {{"session_id", client.session()},
                        {"sampling_session_seq_id", 9},
                        {"model_path", "memory://" + client.run() + "/0"}});
  EXPECT_EQ(client.caller().status, 404);
}

TEST(TinkerSamplers, SamplesThatComeTogetherLoadACheckpointOnce) {
  const Directory folder;
  Served served(folder.path());
  ApiClient caller(served.port());
  const std::string session = caller.session(), run = caller.create_model(session).at("model_id");
  int seq = 0;
  const auto save = [&](int number) {
    const json saved = caller.wait(
        caller.post("save_weights_for_sampler",
                    {{"model_id", run}, {"seq_id", ++seq}, {"path", std::to_string(number)}}));
    caller.post("create_sampling_session", {{"session_id", session},
                                            {"sampling_session_seq_id", number},
                                            {"model_path", saved.at("path")}});
    return saved.at("path").get<std::string>();
  };
  /// Outcomes of three samples that come while the model is at other work.
  const auto outcomes = [&](int number) {
    const json work = caller.post("forward_backward", ApiClient::work(run, ++seq, {98}));
    served.backend().long_work_began.acquire();
    served.backend().calls.clear();
    std::vector<json> promises;
    for (int i = 1; i <= 3; ++i) {
      promises.push_back(caller.post(
          "asample", {{"sampling_session_id", session + ":sample:" + std::to_string(number)},
                      {"seq_id", i},
                      {"num_samples", 1},
                      {"prompt", {{"chunks", {{{"type", "encoded_text"}, {"tokens", {1}}}}}}},
                      {"sampling_params", {{"max_tokens", 1}}}}));
    }
    served.backend().long_work_may_end.release();
    std::vector<json> found;
    for (const json& promise : promises) found.push_back(caller.wait(promise));
    return found;
  };
  const std::string path = save(0), gone = save(1);
  outcomes(0);
  EXPECT_EQ(served.backend().calls,
            " load sample of " + path + " sample of " + path + " sample of " + path);

  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path()))
    if (entry.path().filename() == "weights") std::filesystem::remove(entry.path());
  for (const json& outcome : outcomes(1))
    EXPECT_EQ(outcome.at("error"), gone + " cannot be loaded") << "all of them";
  EXPECT_EQ(served.backend().calls, " load");
}

TEST(TinkerSamplers, ARunKeepsTheLastWeightsWithoutANameThatWereUsed) {
  const Directory folder;
  Served served(folder.path());
  Unnamed client(served);
  const int last = 4;  // one more than stay
  for (int number = 0; number < last; ++number) client.save(number);
  EXPECT_TRUE(client.sample(0).contains("request_id")) << "used anew: another one goes";
  client.save(last);
  EXPECT_TRUE(client.sample(0).contains("request_id"));
  EXPECT_TRUE(client.sample(last).contains("request_id"));
  EXPECT_THAT(client.sample(1).at("detail").get<std::string>(), HasSubstr("save with a name"));
  EXPECT_EQ(client.caller().status, 404);
  client.caller().post("unload_model", {{"model_id", client.run()}});
  EXPECT_TRUE(client.sample(last).contains("request_id")) << "the session goes on";
  client.caller().raw("POST", "sessions/" + client.session() + "/finish", "{}");
  client.sample(last);
  EXPECT_EQ(client.caller().status, 404) << "the session has ended";
}

/// Asks until a run that goes back to where it was is there.
void ask_after_restart(ApiClient& caller, const std::string& sampler) {
  do {
    caller.post("asample", {{"sampling_session_id", sampler},
                            {"seq_id", 1},
                            {"num_samples", 1},
                            {"prompt", {{"chunks", {{{"type", "encoded_text"}, {"tokens", {1}}}}}}},
                            {"sampling_params", {{"max_tokens", 1}}}});
  } while (caller.status == 503);
}

TEST(TinkerSamplers, WeightsWithoutANameGoWithTheServerUnlessItIsDurable) {
  for (const int durable_steps : {0, 1}) {
    const Directory folder;
    tinker::ServiceOptions options = Served::quick();
    options.durable_steps = durable_steps;
    std::string sampler;
    {
      Served served(folder.path(), options);
      Unnamed client(served);
      client.save(0);
      sampler = client.sampler(0);
    }
    Served served(folder.path(), options);
    ApiClient caller(served.port());
    ask_after_restart(caller, sampler);
    EXPECT_EQ(caller.status, durable_steps > 0 ? 200 : 404) << "never the base model's answer";
  }
}

TEST(TinkerSamplers, DurableWeightsWithoutANameLieInTheStatesAlone) {
  const Directory folder;
  tinker::ServiceOptions options = Served::quick();
  options.durable_steps = 1;
  std::string run;
  std::vector<std::string> samplers;
  const auto in_states = [&] {
    std::vector<std::string> names;
    const auto root = folder.path() / "tenants" / "local" / "runs" / run;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root))
      if (entry.is_directory() && entry.path().filename().string().starts_with("unnamed-"))
        names.push_back(entry.path().filename());
    std::ranges::sort(names);
    return names;
  };
  const auto step = [](Unnamed& client, int seq) {
    client.caller().wait(client.caller().post("optim_step", ApiClient::step(client.run(), seq)));
  };
  {
    Served served(folder.path(), options);
    Unnamed client(served);
    run = client.run();
    // Saves 0 to 4 and steps between them; the first goes, as four stay.
    for (int number = 0; number < 5; ++number) {
      client.save_as(number, 2 * number + 1);
      if (number < 4) step(client, 2 * number + 2);
      samplers.push_back(client.sampler(number));
    }
    EXPECT_THAT(in_states(),
                ::testing::ElementsAre("unnamed-0", "unnamed-1", "unnamed-2", "unnamed-3"));
    EXPECT_THAT(served.backend().calls, HasSubstr(" save save snapshot"));
    EXPECT_TRUE(client.caller().get("checkpoints").at("checkpoints").empty());
  }
  // Save 4 came after the last state: it runs again.
  Served served(folder.path(), options);
  ApiClient caller(served.port());
  for (int number = 4; number > 0; --number) {
    ask_after_restart(caller, samplers[static_cast<std::size_t>(number)]);
    EXPECT_EQ(caller.status, 200) << number;
  }
  ask_after_restart(caller, samplers[0]);
  EXPECT_EQ(caller.status, 404);
  caller.wait(caller.post("optim_step", ApiClient::step(run, 10)));
  EXPECT_THAT(in_states(),
              ::testing::ElementsAre("unnamed-1", "unnamed-2", "unnamed-3", "unnamed-4"));
  caller.post("unload_model", {{"model_id", run}});
  EXPECT_TRUE(in_states().empty());
}

}  // namespace
}  // namespace heddle::serve
