// Weights that are saved for a sampler without a name.
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

  json save(int number) {
    return caller_.wait(caller_.post(
        "save_weights_for_sampler",
        {{"model_id", run_}, {"seq_id", number + 1}, {"sampling_session_seq_id", number}}));
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
    caller.post("asample", {{"sampling_session_id", sampler},
                            {"seq_id", 1},
                            {"num_samples", 1},
                            {"prompt", {{"chunks", {{{"type", "encoded_text"}, {"tokens", {1}}}}}}},
                            {"sampling_params", {{"max_tokens", 1}}}});
    EXPECT_EQ(caller.status, durable_steps > 0 ? 200 : 404) << "never the base model's answer";
  }
}

}  // namespace
}  // namespace heddle::serve
