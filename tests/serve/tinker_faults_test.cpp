// Requests that would bring down more than themselves.
#include <filesystem>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "serve/samples_in_flight.h"
#include "served.h"
#include "testing/message_of.h"

namespace heddle::serve {
namespace {

using nlohmann::json;
using testing::ApiClient;
using ::testing::HasSubstr;
using testing::OneRun;
using testing::Served;

json asample(int token, int samples = 1) {
  return {{"num_samples", samples},
          {"base_model", "base"},
          {"prompt", {{"chunks", {{{"type", "encoded_text"}, {"tokens", {token}}}}}}},
          {"sampling_params", {{"max_tokens", 1}}}};
}
constexpr int kWaits = 99;  ///< A prompt that begins so is not answered.

TEST(SamplesInFlight, AreCountedByTenantUntilTheLastCopyGoes) {
  SamplesInFlight samples(3);
  SamplesInFlight::Places two = samples.take("ann", 2), same = two;
  EXPECT_THAT(heddle::testing::message_of([&] { samples.take("ann", 2); }),
              HasSubstr("2 samples of this key's tenant are under way, and 3 are allowed"));
  samples.take("bob", 3);
  two.reset();
  EXPECT_NE(heddle::testing::message_of([&] { samples.take("ann", 2); }), "");
  same.reset();
  samples.take("ann", 3);
  EXPECT_THAT(heddle::testing::message_of([&] { samples.take("ann", 4); }),
              HasSubstr("send them in several requests"));
}

struct FewSamples : public OneRun {
  static tinker::ServiceOptions options() {
    tinker::ServiceOptions options = Served::quick();
    options.samples = std::make_shared<SamplesInFlight>(2);
    options.promises.fetched_s = 0;
    options.tick_s = 0.05;
    return options;
  }
  FewSamples() : OneRun(options()) {}
  /// How many of so many samples are taken at once.
  int taken(int tried) {
    std::vector<json> promises;
    for (int i = 0; i < tried; ++i) {
      const json promise = caller.post("asample", asample(kWaits));
      if (caller.status == 200) promises.push_back(promise);
    }
    for (const json& promise : promises)
      caller.post("cancel_future", {{"request_id", promise.at("request_id")}});
    return static_cast<int>(promises.size());
  }
};

// An end and a cancellation may meet: the place is given back once.
TEST_F(FewSamples, StayFewWhereEndsAndCancellationsMeet) {
  EXPECT_EQ(taken(5), 2);
  for (int i = 0; i < 100; ++i) {
    const json promise = caller.post("asample", asample(1));
    caller.post("cancel_future", {{"request_id", promise.at("request_id")}});
  }
  EXPECT_EQ(taken(5), 2);
  caller.post("asample", asample(1, 3));
  EXPECT_EQ(caller.status, 400) << "it may never be taken";
}

TEST_F(FewSamples, ResultsThatWereFetchedDoNotStay) {
  const json promise = caller.post("asample", asample(1));
  EXPECT_FALSE(caller.wait(promise).is_null());
  // Until the server looks for what is too old.
  while (caller.status == 200)
    caller.post("retrieve_future", {{"request_id", promise.at("request_id")}});
  EXPECT_EQ(caller.status, 410);
}

TEST_F(OneRun, ResultsGoWithTheirSession) {
  caller.post("create_sampling_session",
              {{"session_id", session}, {"sampling_session_seq_id", 0}, {"base_model", "base"}});
  json body = asample(1);
  body.erase("base_model");
  body["sampling_session_id"] = session + ":sample:0";
  body["seq_id"] = 1;
  const json promise = caller.post("asample", body);
  ASSERT_EQ(caller.status, 200) << promise;
  caller.wait(promise);
  caller.post("retrieve_future", {{"request_id", promise.at("request_id")}});
  EXPECT_EQ(caller.status, 200) << "a client may ask again";
  caller.post("sessions/" + session + "/finish", {{"reason", {{"type", "success"}}}});
  caller.post("retrieve_future", {{"request_id", promise.at("request_id")}});
  EXPECT_EQ(caller.status, 410);
}

TEST_F(OneRun, StepsThatFloatsDoNotHoldAreRefused) {
  const auto refused = [&](const char* name, double value) {
    json body = ApiClient::step(run, 1);
    body["adam_params"][name] = value;
    const json answer = caller.post("optim_step", body);
    EXPECT_EQ(caller.status, 422) << name << value;
    return answer.dump();
  };
  EXPECT_THAT(refused("eps", 0), HasSubstr("adam_params.eps: expected a number above 0"));
  EXPECT_THAT(refused("eps", 1e-46), HasSubstr("adam_params.eps"));
  EXPECT_THAT(refused("learning_rate", 1e39), HasSubstr("adam_params.learning_rate"));
  EXPECT_THAT(refused("weight_decay", 1e300), HasSubstr("adam_params.weight_decay"));
}

TEST_F(OneRun, WeightsThatAreNotFiniteAreNotSaved) {
  served.backend().weights_are_finite = false;
  const json outcome =
      caller.wait(caller.post("save_weights", {{"model_id", run}, {"path", "w"}, {"seq_id", 1}}));
  EXPECT_THAT(outcome.value("error", ""), HasSubstr("NaN or infinity"));
  EXPECT_EQ(outcome.value("category", ""), "user");
  EXPECT_THAT(caller.get("checkpoints").at("checkpoints"), ::testing::IsEmpty());
}

TEST_F(OneRun, AnotherRankIsNotLoadedIntoARun) {
  const json saved =
      caller.wait(caller.post("save_weights", {{"model_id", run}, {"path", "w"}, {"seq_id", 1}}));
  const std::string other = caller.create_model(session, 1, 4).at("model_id"),
                    same = caller.create_model(session, 2, 8).at("model_id");
  const auto load = [&](const std::string& into) {
    return caller.post("load_weights",
                       {{"model_id", into}, {"path", saved.at("path")}, {"seq_id", 1}});
  };
  EXPECT_THAT(load(other).dump(), HasSubstr("has rank 8"));
  EXPECT_EQ(caller.status, 400);
  load(same);
  EXPECT_EQ(caller.status, 200);
}

// The folder that an overwriting save replaces goes after the entry of the new one is on the disk.
TEST_F(OneRun, WhatAnOverwriteReplacesStaysUntilItIsEntered) {
  const auto save = [&](int seq) {
    // The second entry takes more than the first one's pages.
    const std::string note(seq == 1 ? 1 : 20'000, 'x');
    return caller.post("save_weights", {{"model_id", run},
                                        {"path", "w"},
                                        {"seq_id", seq},
                                        {"overwrite", true},
                                        {"user_metadata", {{"note", note}}}});
  };
  const auto folders = [&] {
    int count = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path()))
      count += entry.path().filename() == "weights";
    return count;
  };
  caller.wait(save(1));
  served.backend().saved.acquire();
  EXPECT_EQ(folders(), 1);
  // The promise is entered while there is room, and its outcome is not.
  served.backend().calls.clear();
  const json work = caller.post("forward_backward", ApiClient::work(run, 2, {98}));
  served.backend().long_work_began.acquire();
  const json promise = save(3);
  served.leave_room(2);  // a table's first page
  served.fill();
  served.backend().long_work_may_end.release();
  served.backend().saved.acquire();
  EXPECT_EQ(caller.post("retrieve_future", {{"request_id", promise.at("request_id")}}).at("type"),
            "try_again");
  EXPECT_EQ(folders(), 2) << "both, as neither entry is certain";
  served.leave_room(100000);
  EXPECT_FALSE(caller.wait(promise).contains("error"));
  served.rows_scanned();  // comes after the turn of the loop that told the outcome
  EXPECT_EQ(folders(), 1);
}

TEST(Strays, FoldersWithoutACheckpointGoAtTheStart) {
  const heddle::testing::TemporaryDirectory folder;
  std::filesystem::path kept, stray;
  {
    Served served(folder.path());
    ApiClient caller(served.port());
    const std::string run = caller.create_model(caller.session()).at("model_id");
    caller.wait(caller.post("save_weights", {{"model_id", run}, {"path", "w"}, {"seq_id", 1}}));
  }
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path()))
    if (entry.path().filename() == "weights") kept = entry.path().parent_path();
  ASSERT_FALSE(kept.empty());
  stray = kept.parent_path() / "weights-w-00000000";
  std::filesystem::copy(kept, stray);
  const std::filesystem::path state = kept.parent_path() / "other";
  std::filesystem::create_directory(state);
  const Served again(folder.path());
  EXPECT_TRUE(std::filesystem::exists(kept));
  EXPECT_FALSE(std::filesystem::exists(stray));
  EXPECT_TRUE(std::filesystem::exists(state)) << "it is no checkpoint";
}

}  // namespace
}  // namespace heddle::serve
