// Copies of checkpoints, and the record of who did what and used how much.
#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "serve/usage_keeper.h"
#include "served.h"
#include "testing/temporary_directory.h"

namespace heddle::serve {
namespace {

using nlohmann::json;
using testing::ApiClient;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Served;

using Directory = heddle::testing::TemporaryDirectory;

/// A client with a checkpoint.
class Owner {
 public:
  Owner(const Served& served, const std::string& key)
      : caller(served.port(), key),
        session(caller.session()),
        run(caller.create_model(session).at("model_id")),
        path(caller
                 .wait(
                     caller.post("save_weights", {{"model_id", run}, {"path", "w"}, {"seq_id", 1}}))
                 .at("path")) {}

  json copy(json more) {
    json body{{"source_path", path}};
    body.update(more);
    return caller.post("copy_weights", body);
  }

  /// The status of a copy of somebody's checkpoint.
  int post_copy(const std::string& source, const std::string& token) {
    copy({{"source_path", source},
          {"destination_project_id", "default"},
          {"weights_access_token", token}});
    return caller.status;
  }

  ApiClient caller;
  std::string session, run, path;
};

TEST(TinkerCopies, ACopyIsACheckpointOfItsOwnThatIsNotTrained) {
  const Directory folder;
  Served served(folder.path());
  Owner owner(served, "");
  const json body{{"session_id", owner.session}, {"model_seq_id", 5}, {"ttl_seconds", 7200}};
  const std::string copy = owner.copy(body).at("tinker_path");
  EXPECT_EQ(copy, "tinker://" + owner.session + ":train:5/weights/w");
  EXPECT_EQ(owner.copy(body).at("tinker_path"), copy) << "a repeat makes no other";
  const json all = owner.caller.get("checkpoints").at("checkpoints");
  ASSERT_EQ(all.size(), 2U);
  EXPECT_EQ(std::ranges::count_if(all, [](const json& c) { return c.contains("expires_at"); }), 1)
      << "the source's end is not the copy's";
  // It outlives its source.
  owner.caller.raw("DELETE", "training_runs/" + owner.run + "/checkpoints/weights/w", "");
  EXPECT_EQ(owner.caller.post("weights_info", {{"tinker_path", copy}}).at("lora_rank"), 8);
  const json loaded = owner.caller.wait(owner.caller.post(
      "load_weights",
      {{"path", copy}, {"optimizer", true}, {"session_id", owner.session}, {"model_seq_id", 6}}));
  EXPECT_EQ(loaded.at("path"), copy);
  const json step = ApiClient::step(owner.session + ":train:5", 1);
  EXPECT_TRUE(owner.caller.wait(owner.caller.post("optim_step", step)).contains("error"))
      << "there is nothing to train";
  owner.caller.create_model(owner.session, 5);
  EXPECT_EQ(owner.caller.status, 409);
  owner.path = copy;
  owner.copy({{"session_id", owner.session}, {"model_seq_id", 0}});
  EXPECT_EQ(owner.caller.status, 409) << "the number is a run's";
}

TEST(TinkerCopies, TheOneProjectIsNamedAndARepeatIsKnownByItsKey) {
  const Directory folder;
  Served served(folder.path());
  Owner owner(served, "");
  EXPECT_THAT(owner.copy({{"destination_project_id", "p"}}).at("detail").get<std::string>(),
              HasSubstr("one project, which is 'default'"));
  EXPECT_EQ(owner.caller.status, 400);
  const json body{{"source_path", owner.path}, {"destination_project_id", "default"}};
  const auto send = [&](const char* key) {
    return json::parse(testing::body_of(testing::Client(served.port())
                                            .ask("POST", "/api/v1/copy_weights", body.dump(),
                                                 std::string("X-Idempotency-Key: ") + key +
                                                     "\r\nContent-Type: application/json\r\n")))
        .at("tinker_path")
        .get<std::string>();
  };
  const std::string first = send("one");
  EXPECT_EQ(send("one"), first);
  EXPECT_NE(send("two"), first);
}

TEST(TinkerCopies, OnlyReadableWeightsAreCopied) {
  const Directory folder;
  Served served(folder.path());
  const std::string ann = served.keys().add("ann", "train"),
                    bob = served.keys().add("bob", "train");
  Owner owner(served, ann), other(served, bob);
  const json into{{"session_id", other.session}, {"model_seq_id", 3}};
  other.path = owner.path;
  other.copy(into);
  EXPECT_EQ(other.caller.status, 404);
  owner.caller.post("training_runs/" + owner.run + "/checkpoints/weights/w/publish",
                    json::object());
  EXPECT_EQ(other.copy(into).at("tinker_path"), "tinker://" + other.session + ":train:3/weights/w");
  other.copy({{"session_id", owner.session}, {"model_seq_id", 4}});
  EXPECT_EQ(other.caller.status, 404) << "somebody else's session";
}

TEST(TinkerCopies, AnotherTenantsKeyReadsItsWeights) {
  const Directory folder;
  Served served(folder.path());
  const std::string ann = served.keys().add("ann", "train"),
                    grant = served.keys().add("ann", "read"),
                    sampling = served.keys().add("ann", "sample"),
                    bob = served.keys().add("bob", "train");
  Owner owner(served, ann), other(served, bob);
  other.path = owner.path;
  const auto with = [&](const std::string& token, int number) {
    return json{
        {"session_id", other.session}, {"model_seq_id", number}, {"weights_access_token", token}};
  };
  for (const std::string& wrong : {std::string("tml-none"), sampling}) {
    EXPECT_THAT(other.copy(with(wrong, 3)).at("detail").get<std::string>(),
                HasSubstr("with the scope read, train or admin"));
    EXPECT_EQ(other.caller.status, 403);
  }
  EXPECT_EQ(other.copy(with(grant, 3)).at("tinker_path"),
            "tinker://" + other.session + ":train:3/weights/w");
  json load = with(grant, 4);
  load["path"] = owner.path;
  load["optimizer"] = true;
  EXPECT_EQ(other.caller.wait(other.caller.post("load_weights", load)).at("model_id"),
            other.session + ":train:4");
  // The request that a restart would read again names the tenant; no client can name one.
  load.erase("weights_access_token");
  load["model_seq_id"] = 5;
  load["heddle_reader"] = "ann";
  other.caller.post("load_weights", load);
  EXPECT_EQ(other.caller.status, 422);
  served.keys().revoke(grant.substr(0, 12));
  other.copy(with(grant, 6));
  EXPECT_EQ(other.caller.status, 403);
}

TEST(TinkerCopies, AGrantReadsOneCheckpoint) {
  const Directory folder;
  Served served(folder.path());
  Owner owner(served, served.keys().add("ann", "train")),
      other(served, served.keys().add("bob", "train"));
  const std::string granted = served.keys().grant(owner.path);
  const auto load = [&](const std::string& path, int number) {
    other.caller.post("load_weights", {{"session_id", other.session},
                                       {"model_seq_id", number},
                                       {"path", path},
                                       {"optimizer", true},
                                       {"weights_access_token", granted}});
    return other.caller.status;
  };
  EXPECT_EQ(load(owner.path, 3), 200);
  EXPECT_EQ(other.post_copy(owner.path, granted), 200);
  const std::string another =
      owner.caller
          .wait(owner.caller.post("save_weights",
                                  {{"model_id", owner.run}, {"path", "v"}, {"seq_id", 2}}))
          .at("path");
  EXPECT_EQ(load(another, 4), 403);
  EXPECT_EQ(other.post_copy(another, granted), 403);
  ApiClient holder(served.port(), granted);
  holder.get("training_runs");
  EXPECT_EQ(holder.status, 401) << "it is nobody's key";
  EXPECT_EQ(served.keys().list().back().scopes, "reads " + owner.path);
  served.keys().revoke(granted);
  EXPECT_EQ(load(owner.path, 5), 403);
  EXPECT_EQ(other.post_copy(owner.path, served.keys().grant(owner.path, now_s() - 1)), 403);
  EXPECT_THROW(served.keys().grant(owner.path + "x"), ConfigError);
}

TEST(TinkerCopies, AGrantKeepsNobodyOutOfAServerWithoutKeys) {
  const Directory folder;
  Served served(folder.path());
  Owner owner(served, "");
  served.keys().grant(owner.path);
  EXPECT_TRUE(served.keys().is_empty());
  EXPECT_FALSE(owner.caller.session().empty());
}

TEST(TinkerCopies, TheAuditLogTellsAdminsWhoDidWhat) {
  const Directory folder;
  Served served(folder.path());
  const std::string ann = served.keys().add("ann", "train"),
                    admin = served.keys().add("ops", "admin,read");
  Owner owner(served, ann);
  owner.copy({{"session_id", owner.session}, {"model_seq_id", 2}});
  owner.caller.raw("DELETE", "training_runs/" + owner.run + "/checkpoints/weights/w", "");
  ApiClient reader(served.port(), admin);
  std::vector<std::string> events;
  const json log = reader.get("audit");
  for (const json& entry : log.at("entries")) {
    EXPECT_EQ(entry.at("event_details").at("tenant"), "ann");
    EXPECT_EQ(entry.at("event_details").at("key_prefix"), ann.substr(0, 12));
    events.push_back(entry.at("event").get<std::string>() + " " +
                     entry.at("event_details").at("object").get<std::string>());
  }
  EXPECT_THAT(events,
              ElementsAre("session_create " + owner.session, "run_create " + owner.run,
                          "checkpoint_save " + owner.path, "checkpoint_read " + owner.path,
                          "checkpoint_copy tinker://" + owner.session + ":train:2/weights/w",
                          "checkpoint_delete " + owner.path));
  EXPECT_EQ(reader.get("audit?event_type=checkpoints").at("entries").size(), 4U);
  EXPECT_EQ(reader.get("audit?day=2001-02-03").at("entries").size(), 0U);
  reader.get("audit?day=2001-02-30");
  EXPECT_EQ(reader.status, 422);
  reader.get("audit?event_type=secrets");
  EXPECT_EQ(reader.status, 422);
  owner.caller.get("audit");
  EXPECT_EQ(owner.caller.status, 403);
}

TEST(Usage, IsAddedByDayAndKeptWhereTheDiskIsFull) {
  const Directory folder;
  DataDirectory data(folder.path());
  Server server;
  Quotas quotas;
  UsageKeeper keeper(server, quotas, data.database());
  const UsageTable table(data.database());
  const auto use = [&](std::int64_t tokens) {
    quotas.admit({"ann", "", {}, {}}, Cost::kRequest)
        .meter->add_tokens(Meter::Tokens::kTrained, tokens);
  };
  use(5);
  data.database().execute("ALTER TABLE usage RENAME TO hidden");
  keeper.save();
  data.database().execute("ALTER TABLE hidden RENAME TO usage");
  use(7);
  keeper.save();
  keeper.save();
  std::int64_t requests = 0, trained = 0;
  for (const UsageTable::Row& row : table.list("2000-01-01")) {  // two, if midnight passes
    EXPECT_EQ(row.tenant, "ann");
    requests += row.requests;
    trained += row.trained;
  }
  EXPECT_EQ(requests, 2);
  EXPECT_EQ(trained, 12);
  EXPECT_TRUE(table.list("9999-01-01").empty());
}

TEST(ModelThread, ATurnIsOverdueAfterItsTimeAndThatOfItsTokens) {
  // The model's thread, which ends first, holds them.
  std::promise<void> began, may_end;
  ModelThread model(std::make_unique<testing::RecordingBackend>());
  const auto soon = std::chrono::steady_clock::now() + std::chrono::hours(1);
  EXPECT_FALSE(model.overdue(1, soon)) << "nothing runs";
  model.run(
      [&](Backend&) {
        began.set_value();
        may_end.get_future().wait();
      },
      1000);
  began.get_future().wait();
  // A tenth of a second for each of the tokens: 100 s.
  EXPECT_FALSE(model.overdue(3600, soon));
  ASSERT_TRUE(model.overdue(3400, soon));
  may_end.set_value();
}

}  // namespace
}  // namespace heddle::serve
