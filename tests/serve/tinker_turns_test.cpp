// Requests of many runs that share a pass or a step.
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "served.h"
#include "testing/temporary_directory.h"

namespace heddle::serve {
namespace {

using nlohmann::json;
using testing::ApiClient;
using testing::Served;

using Directory = heddle::testing::TemporaryDirectory;

/// The names of runs of one session, with sets of these ranks.
std::vector<std::string> made_runs(ApiClient& caller, const std::vector<int>& ranks) {
  const std::string session = caller.session();
  std::vector<std::string> runs;
  for (const int rank : ranks) {
    const json made = caller.create_model(session, static_cast<int>(runs.size()), rank);
    caller.wait(made);
    runs.push_back(made.at("model_id"));
  }
  return runs;
}

TEST(TinkerTurns, JoinsTheWorkOfManyRunsInOnePass) {
  const Directory folder;
  Served served(folder.path(), Served::quick(), {});
  ApiClient caller(served.port());
  const std::vector<std::string> runs = made_runs(caller, {8, 8, 8, 8, 8, 8});
  const auto norm_after = [&](const std::string& run, const json& work, int seq) {
    caller.wait(work);
    return caller.wait(caller.post("optim_step", ApiClient::step(run, seq)))
        .at("metrics")
        .at("grad_norm:mean");
  };
  const json alone =
      norm_after(runs[5], caller.post("forward_backward", ApiClient::work(runs[5], 1, {1, 2})), 2);
  // While the model is at the first one's, the others' come.
  caller.post("forward_backward", ApiClient::work(runs[0], 1, {98}));
  served.backend().long_work_began.acquire();
  std::vector<json> works;
  for (int i = 1; i < 5; ++i)
    works.push_back(caller.post("forward_backward", ApiClient::work(runs[i], 1, {i, i + 1})));
  served.backend().long_work_may_end.release();
  const json joined = norm_after(runs[1], works[0], 2);
  EXPECT_EQ(served.backend().most_joined, 4);
  EXPECT_EQ(joined, alone) << "as if it had been alone";
}

TEST(TinkerTurns, TheLogSaysWhichRunHasFactorsWithoutAGradient) {
  const Directory folder;
  ::testing::internal::CaptureStderr();
  std::vector<std::string> runs;
  {
    Served served(folder.path(), Served::quick(), {});
    ApiClient caller(served.port());
    runs = made_runs(caller, {8, 8});
    for (const std::string& run : runs) {
      caller.wait(caller.post("forward_backward", ApiClient::work(run, 1, {1, 2})));
      json step = ApiClient::step(run, 2);
      if (run == runs[1]) step["adam_params"]["learning_rate"] = 17;
      EXPECT_TRUE(caller.wait(caller.post("optim_step", step)).contains("metrics"));
    }
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("run " + runs[1] + ": no gradient reaches q_proj"), std::string::npos) << log;
  EXPECT_EQ(log.find("run " + runs[0] + ": no gradient"), std::string::npos) << log;
}

TEST(TinkerTurns, ARunThatCouldNotBeMadeFailsAlone) {
  const Directory folder;
  Served served(folder.path(), Served::quick(), {});
  ApiClient caller(served.port());
  const std::vector<std::string> runs = made_runs(caller, {8, 13, 8});  // 13 cannot be
  caller.post("forward_backward", ApiClient::work(runs[0], 1, {98}));
  served.backend().long_work_began.acquire();
  const json without = caller.post("forward_backward", ApiClient::work(runs[1], 1, {1, 2})),
             with = caller.post("forward_backward", ApiClient::work(runs[2], 1, {1, 2}));
  served.backend().long_work_may_end.release();
  const json failed = caller.wait(without);
  EXPECT_EQ(failed.at("category"), "user");
  EXPECT_EQ(failed.at("error"), "run " + runs[1] + " has no weights: it could not be made");
  EXPECT_FALSE(caller.wait(with).is_object()) << "another run's failure";
}

TEST(TinkerTurns, RunsThatTrainInStepStayInStep) {
  const Directory folder;
  Served served(folder.path(), Served::quick(), {});
  ApiClient caller(served.port());
  const std::vector<std::string> runs = made_runs(caller, {8, 8, 8, 8});
  const json first = caller.post("forward_backward", ApiClient::work(runs[3], 1, {98}));
  served.backend().long_work_began.acquire();
  std::vector<json> promises;
  for (int i = 0; i < 3; ++i) {
    promises.push_back(caller.post("forward_backward", ApiClient::work(runs[i], 1, {1, 2})));
    promises.push_back(caller.post("optim_step", ApiClient::step(runs[i], 2)));
    promises.push_back(caller.post("forward_backward", ApiClient::work(runs[i], 3, {3, 4})));
  }
  served.backend().long_work_may_end.release();
  caller.wait(first);
  for (const json& promise : promises) caller.wait(promise);
  EXPECT_EQ(served.backend().calls, " pass of 1 pass of 3 step of 3 pass of 3");
}

TEST(TinkerTurns, ARunIsNotKeptWaitingByOthersOfItsTenant) {
  const Directory folder;
  Served served(folder.path(), Served::quick(), {});
  ApiClient caller(served.port());
  const std::vector<std::string> runs = made_runs(caller, {8, 8, 8});
  const json first = caller.post("forward_backward", ApiClient::work(runs[0], 1, {98}));
  served.backend().long_work_began.acquire();
  std::vector<json> promises;
  for (int seq = 2; seq < 8; ++seq)
    for (int i = 0; i < 2; ++i)
      promises.push_back(
          caller.post("forward_backward", ApiClient::work(runs[i], i == 0 ? seq : seq - 1, {1})));
  // It shares no pass with them, and its name comes after theirs.
  promises.push_back(
      caller.post("save_weights", {{"model_id", runs[2]}, {"path", "a"}, {"seq_id", 1}}));
  served.backend().long_work_may_end.release();
  caller.wait(first);
  for (const json& promise : promises) caller.wait(promise);
  EXPECT_EQ(served.backend().calls.substr(0, 30), " pass of 1 pass of 2 save pass");
}

TEST(TinkerTurns, SavesForSamplersShareATurn) {
  const Directory folder;
  Served served(folder.path(), Served::quick(), {});
  ApiClient caller(served.port());
  const std::vector<std::string> runs = made_runs(caller, {8, 8, 8, 8});
  const json first = caller.post("forward_backward", ApiClient::work(runs[0], 1, {98}));
  served.backend().long_work_began.acquire();
  const auto save = [&](int run) {
    return caller.post("save_weights_for_sampler",
                       {{"model_id", runs[run]}, {"seq_id", 1}, {"sampling_session_seq_id", run}});
  };
  const std::vector<json> promises = {
      save(1), caller.post("forward_backward", ApiClient::work(runs[2], 1, {1})), save(3)};
  served.backend().long_work_may_end.release();
  caller.wait(first);
  for (const json& promise : promises) caller.wait(promise);
  // Sets are numbered as they were made; the work of the third came before the last save.
  EXPECT_EQ(served.backend().calls, " pass of 1 snapshot 2 snapshot 4 pass of 1");
}

TEST(TinkerTurns, ARunThatCameLateSharesTheNextPass) {
  const Directory folder;
  tinker::ServiceOptions options = Served::quick();
  options.runs.join_s = 3600;  // no race with a slow machine
  Served served(folder.path(), options, {});
  ApiClient caller(served.port());
  const std::vector<std::string> runs = made_runs(caller, {8, 8});
  const json first = caller.post("forward_backward", ApiClient::work(runs[0], 1, {98}));
  served.backend().long_work_began.acquire();
  std::vector<json> promises = {
      caller.post("forward_backward", ApiClient::work(runs[1], 1, {1, 2}))};
  served.backend().long_work_may_end.release();
  caller.wait(first);
  promises.push_back(caller.post("forward_backward", ApiClient::work(runs[0], 2, {3, 4})));
  for (const json& promise : promises) caller.wait(promise);
  EXPECT_EQ(served.backend().calls, " pass of 1 pass of 2");
  // One that has left is not awaited: for an hour, if it were.
  caller.post("unload_model", {{"model_id", runs[0]}});
  caller.wait(caller.post("forward_backward", ApiClient::work(runs[1], 2, {5, 6})));
}

TEST(TinkerTurns, AnIdleModelWaitsWhileOthersStillSend) {
  const Directory folder;
  tinker::ServiceOptions options = Served::quick();
  options.runs.join_s = options.runs.arrival_s = 3600;  // no race with a slow machine
  Served served(folder.path(), options, {});
  ApiClient caller(served.port());
  // None has a pause that would tell when it comes back.
  const std::vector<std::string> runs = made_runs(caller, {8, 8, 8});
  std::vector<json> promises;
  for (const std::string& run : runs)
    promises.push_back(caller.post("forward_backward", ApiClient::work(run, 1, {1, 2})));
  // With the last one nobody is left to wait for.
  for (const json& promise : promises) caller.wait(promise);
  EXPECT_EQ(served.backend().calls, " pass of 3");
}

TEST(TinkerTurns, AStepThatFailsLeavesThoseBesideItAlone) {
  const Directory folder;
  Served served(folder.path(), Served::quick(), {});
  ApiClient caller(served.port());
  // No set of rank 13 can be made: that run's later requests fail.
  const std::vector<std::string> runs = made_runs(caller, {8, 8, 13, 8, 8});
  const json first = caller.post("forward_backward", ApiClient::work(runs[4], 1, {98}));
  served.backend().long_work_began.acquire();
  std::vector<json> promises;
  for (int i = 0; i < 4; ++i) {
    json step = ApiClient::step(runs[i], 1);
    if (i == 1) step["adam_params"]["learning_rate"] = 13;
    promises.push_back(caller.post("optim_step", step));
  }
  served.backend().long_work_may_end.release();
  caller.wait(first);
  EXPECT_TRUE(caller.wait(promises[0]).contains("metrics"));
  EXPECT_EQ(caller.wait(promises[1]).at("error"),
            "the norm of the gradients is not finite: the gradients were dropped and nothing else "
            "changed");
  EXPECT_EQ(caller.wait(promises[2]).at("category"), "user");
  EXPECT_TRUE(caller.wait(promises[3]).contains("metrics"));
  EXPECT_EQ(served.backend().calls, " pass of 1 step of 3");
}

}  // namespace
}  // namespace heddle::serve
