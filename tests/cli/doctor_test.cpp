#include "cli/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/files.h"
#include "cli/run_command.h"
#include "models/registry.h"
#include "testing/paths.h"
#include "testing/temporary_directory.h"

namespace heddle::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class FakeMachine {
 public:
  FakeMachine() {
    std::filesystem::create_directories(dir_ / "proc");
    std::filesystem::create_directories(dir_ / "cgroup");
  }
  void write(const std::string& name, const std::string& text) {
    files::write_atomically(dir_ / name, text);
  }
  MachineFacts probe() const {
    return probe_machine((dir_ / "proc").string(), (dir_ / "cgroup").string());
  }

 private:
  testing::TemporaryDirectory dir_;
};

TEST(Doctor, ReadsCpuAndMemory) {
  FakeMachine machine;
  machine.write(
      "proc/cpuinfo",
      "processor\t: 0\nmodel name\t: AMD EPYC 9B14\nflags\t\t: fpu avx2 fma avx512f xyz\n");
  machine.write("proc/meminfo", "MemTotal:       1000000 kB\nMemAvailable:    400000 kB\n");
  const MachineFacts facts = machine.probe();
  EXPECT_EQ(facts.cpu, "AMD EPYC 9B14");
  EXPECT_THAT(facts.instruction_sets, ElementsAre("avx2", "fma", "avx512f"));
  EXPECT_EQ(facts.memory_bytes, 1000000 * 1024LL);
  EXPECT_EQ(facts.memory_available_bytes, 400000 * 1024LL);
  EXPECT_GT(facts.disk_free_bytes, 0);
}

TEST(Doctor, AContainersMemoryLimitCounts) {
  FakeMachine machine;
  machine.write("proc/meminfo", "MemTotal:       1000000 kB\nMemAvailable:    900000 kB\n");
  machine.write("cgroup/memory.max", "max\n");
  EXPECT_EQ(machine.probe().memory_bytes, 1000000 * 1024LL);
  machine.write("cgroup/memory.max", "500000000\n");
  machine.write("cgroup/memory.current", "200000000\n");
  EXPECT_EQ(machine.probe().memory_bytes, 500000000);
  EXPECT_EQ(machine.probe().memory_available_bytes, 300000000);
}

TEST(Doctor, AMachineThatShowsNothingIsNoError) {
  const MachineFacts facts = probe_machine("/nonexistent", "/nonexistent");
  EXPECT_EQ(facts.cpu, "");
  EXPECT_THAT(facts.instruction_sets, IsEmpty());
  EXPECT_GE(facts.cores, 1);
}

DoctorFacts good_machine() {
  DoctorFacts facts;
  facts.machine.instruction_sets = {"avx2"};
  facts.machine.cores = facts.machine.machine_cores = 8;
  facts.machine.memory_available_bytes = std::int64_t{64} << 30;
  facts.machine.disk_free_bytes = std::int64_t{500} << 30;
  facts.why_no_accelerator = "this build has no CUDA back end";
  return facts;
}

TEST(Doctor, NothingIsMissingOnAGoodMachine) {
  EXPECT_THAT(find_problems(good_machine()), IsEmpty());
  EXPECT_THAT(render(good_machine(), false, 0), HasSubstr("Nothing is missing."));
}

TEST(Doctor, NamesWhatIsMissingAndHowToGetIt) {
  DoctorFacts facts = good_machine();
  facts.machine.instruction_sets = {};
  facts.machine.has_amx_without_tiles = true;
  facts.machine.cores = 2;
  facts.machine.memory_available_bytes = 1 << 30;
  facts.machine.disk_free_bytes = 1 << 30;
  facts.has_nvidia_driver = true;
  facts.findings = find_problems(facts);
  ASSERT_EQ(facts.findings.size(), 6u);
  const std::string text = render(facts, false, 0);
  for (const char* part :
       {"has no AVX2", "announces AMX", "2 of the machine's 8 cores", "only 1.0 GiB of memory",
        "set train.output_dir", "cmake --preset cuda"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST(Doctor, AnNpuHostShowsItsPlatformAndWhatDoesNotFit) {
  DoctorFacts facts = good_machine();
  facts.accelerators = {{"Ascend910B3", "A2, CANN 8.5.0", std::int64_t{64} << 30, "npu:0"}};
  facts.platform = {{"driver", "25.0"}, {"CANN", "8.5.0"}};
  facts.platform_mismatches = {"CANN is 8.5.0, torch_npu wants 9.1.0"};
  facts.findings = find_problems(facts);
  ASSERT_EQ(facts.findings.size(), 1u);
  EXPECT_TRUE(facts.findings[0].is_problem);
  const std::string text = render(facts, false, 0);
  for (const char* part : {"npu:0", "Ascend910B3", "driver", "CANN is 8.5.0", "docs/ascend.md"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  const auto root = nlohmann::json::parse(to_json(facts));
  EXPECT_EQ(root.at("platform").at("CANN"), "8.5.0");
}

TEST(Doctor, AnAscendDriverWithoutABackEndIsAProblem) {
  DoctorFacts facts = good_machine();
  facts.has_ascend_driver = true;
  facts.why_no_accelerator = "this build has no Ascend back end";
  ASSERT_EQ(find_problems(facts).size(), 1u);
  EXPECT_THAT(find_problems(facts)[0].remedy, HasSubstr("--preset npu"));
}

TEST(DoctorCommand, JsonIsOneDocumentOfThisMachine) {
  const Outcome outcome = run_command({"doctor", "--json"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  const auto root = nlohmann::json::parse(outcome.out);
  EXPECT_GE(root.at("machine").at("cores").get<int>(), 1);
  EXPECT_GT(root.at("machine").at("memory_bytes").get<std::int64_t>(), 0);
  EXPECT_TRUE(root.at("kernels").contains("gated_delta_rule"));
  bool has_torch = false;
  for (const auto& library : root.at("libraries")) {
    has_torch = has_torch || library.at("name") == "libtorch_cpu.so";
  }
  EXPECT_TRUE(has_torch);
}

TEST(DoctorCommand, MeasuredRunsAsJsonHoldWhatTheTableShows) {
  const std::string file = testing::source_path("bench/plan/measured.yaml");
  const Outcome table = run_command({"doctor", "--measured", file});
  const Outcome json = run_command({"doctor", "--measured", file, "--json"});
  ASSERT_EQ(json.status, 0) << json.err;
  const auto runs = nlohmann::json::parse(json.out).at("runs");
  ASSERT_GE(runs.size(), 10u);
  for (const auto& run : runs) {
    EXPECT_THAT(table.out, HasSubstr(run.at("run").get<std::string>()));
    EXPECT_GT(run.at("measured_s").get<double>(), 0);
    EXPECT_GT(run.at("predicted_s").get<double>(), 0);
    EXPECT_GT(run.at("predicted_bytes").get<double>(), 0);
  }
}

class LayoutPlanTest : public ::testing::Test {
 protected:
  LayoutPlanTest() {
    // A layout needs the model's shape alone: no weights.
    std::filesystem::create_directories(folder_ / "model");
    files::write_atomically(folder_ / "model/config.json",
                            models::preset_json("qwen3.5-35b-a3b").dump());
    files::write_atomically(folder_ / "run.yaml",
                            "model: {path: " + (folder_ / "model").string() +
                                ", dtype: bfloat16}\n"
                                "data: {train: none.jsonl, max_length: 32768}\n"
                                "train: {global_batch_size: 64, recompute: full}\n");
  }
  Outcome plan(std::vector<std::string> words) const {
    words.insert(words.begin(), {"doctor", "--mesh", (folder_ / "run.yaml").string()});
    return run_command(words);
  }

  testing::TemporaryDirectory folder_;
};

TEST_F(LayoutPlanTest, ShowsGroupsBytesAndMemoryOfManyRanksAndStartsNothing) {
  const Outcome outcome =
      plan({"--json", "--ranks", "1024", "parallel.tp=2", "parallel.pp=4", "parallel.ep=8",
            "parallel.cp=2", "parallel.fsdp=16", "parallel.dp=auto"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto json = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(json["groups"][0]["dimension"], "tp");
  EXPECT_EQ(json["groups"][0]["of_rank0"], (std::vector<int>{0, 1}));
  EXPECT_EQ(json["memory_bytes"].size(), 4u);
  double received = 0;
  for (const auto& row : json["received_bytes"]) received += row["bytes"].get<double>();
  EXPECT_GT(received, 0);
}

TEST_F(LayoutPlanTest, MemoryOfShardedStateIsTheWholeDivided) {
  const auto memory = [&](const std::string& fsdp) {
    const Outcome outcome = plan({"--json", "parallel.fsdp=" + fsdp});
    return nlohmann::json::parse(outcome.out)["memory_bytes"][0];
  };
  const auto one = memory("1"), eight = memory("8");
  EXPECT_EQ(one["optimizer"].get<double>(), 8 * eight["optimizer"].get<double>());
  // 35 billion parameters in bf16.
  EXPECT_NEAR(one["weights"].get<double>(), 2 * 34.7e9, 1e9);
}

TEST_F(LayoutPlanTest, TakesAFileWithRlAsTheCommandOfThatNameDoes) {
  const auto memory = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words = {"--json", "rl.reward.verifiers.exact=1"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = plan(words);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return nlohmann::json::parse(outcome.out)["memory_bytes"][0];
  };
  EXPECT_EQ(memory({}), memory({"train.objective=policy"}));
  EXPECT_GT(memory({}).at("caches"), 0);
  // An objective that is given is taken.
  EXPECT_FALSE(memory({"train.objective=language_model"}).contains("caches"));
}

TEST_F(LayoutPlanTest, PredictsAStepAndProposesLayoutsOnGivenHardware) {
  const Outcome step = plan({"--json", "--hardware", "h200", "parallel.fsdp=8"});
  ASSERT_EQ(step.status, 0) << step.err;
  const auto time = nlohmann::json::parse(step.out)["time_s"];
  EXPECT_GT(time["step"].get<double>(), time["products"].get<double>());
  const Outcome best = plan({"--json", "--hardware", "h200", "--ranks", "16", "--propose", "3"});
  ASSERT_EQ(best.status, 0) << best.err;
  EXPECT_EQ(nlohmann::json::parse(best.out)["proposals"].size(), 3u);
  EXPECT_THAT(plan({"--propose", "3"}).err, HasSubstr("--hardware"));
  EXPECT_THAT(run_command({"doctor", "--hardware", "h200"}).err, HasSubstr("--mesh"));
}

TEST_F(LayoutPlanTest, ADryRunMakesEveryRank) {
  const Outcome outcome = plan({"--json", "--dry-run", "parallel.tp=2", "parallel.pp=2",
                                "parallel.fsdp=4", "parallel.ep=8"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto json = nlohmann::json::parse(outcome.out);
  EXPECT_EQ(json["ranks"], 16);
  EXPECT_NEAR(json["elements"].get<double>(), 34.7e9, 1e9);
  EXPECT_EQ(json["stages"].size(), 2u);
}

TEST_F(LayoutPlanTest, WarnsOfRanksWithoutWork) {
  const char* warning = "train.global_batch_size 64 over dp x fsdp 128: 64 ranks have no row";
  EXPECT_THAT(plan({"parallel.dp=128"}).out, HasSubstr(std::string("warning: ") + warning));
  const auto json = nlohmann::json::parse(plan({"--json", "parallel.dp=128"}).out);
  EXPECT_THAT(json["idle"].at(0).get<std::string>(), HasSubstr(warning));
  EXPECT_THAT(nlohmann::json::parse(plan({"--json", "parallel.dp=64"}).out)["idle"], IsEmpty());
}

TEST_F(LayoutPlanTest, APresetStandsForTheModelsPath) {
  files::write_atomically(folder_ / "run.yaml", "data: {train: none.jsonl}\n");
  const Outcome outcome = plan({"--json", "--preset", "qwen3.5-4b", "parallel.tp=2"});
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(nlohmann::json::parse(outcome.out)["groups"][0]["size"], 2);
}

TEST_F(LayoutPlanTest, AModelWithoutAShapeIsTheUsersMistake) {
  const Outcome outcome = plan({"model.path=none"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, HasSubstr("model.path: there is no none/config.json; --preset NAME"));
}

TEST_F(LayoutPlanTest, MoreRanksThanAnyJobHasAreRefusedAtOnce) {
  for (const Outcome& outcome :
       {plan({"--ranks", "99999999999", "parallel.fsdp=auto"}), plan({"parallel.fsdp=99999999999"}),
        plan({"--ranks", "8", "parallel.tp=4294967296", "parallel.cp=4294967296",
              "parallel.dp=auto"})}) {
    EXPECT_EQ(outcome.status, 2);
    EXPECT_THAT(outcome.err, HasSubstr("expected at most 1048576"));
  }
  EXPECT_EQ(plan({"--ranks", "1048576", "parallel.fsdp=auto"}).status, 0);
}

TEST_F(LayoutPlanTest, SaysWhereItCountsExpertsInEightBits) {
  const char* note = "; frozen experts in 8-bit floats";
  const std::vector<std::string> lora = {"train.method=lora", "train.recompute=full"};
  const std::vector<std::vector<std::string>> tables = {
      {}, {"--dry-run"}, {"--hardware", "h200", "--propose", "1"}};
  for (const std::string& asked :
       {std::string("kernels.fp8=true"), std::string("kernels.frozen_experts=cuda.fp8")}) {
    for (std::vector<std::string> words : tables) {
      words.insert(words.end(), lora.begin(), lora.end());
      EXPECT_THAT(plan(words).out, ::testing::Not(HasSubstr(note)));
      words.push_back(asked);
      EXPECT_THAT(plan(words).out, HasSubstr(note)) << words.front();
    }
  }
  const auto json = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"--json", "train.method=lora"});
    return nlohmann::json::parse(plan(more).out);
  };
  EXPECT_EQ(json({})["eight_bit_experts"], false);
  EXPECT_EQ(json({"kernels.fp8=true"})["eight_bit_experts"], true);
  // A dry run's objects hold after loading a byte of each element, and a scale of each
  // expert.
  const auto weights = [&](const char* fp8) {
    return json({"--dry-run", fp8})["stages"][0]["weight_bytes"].get<double>();
  };
  EXPECT_EQ(weights("kernels.fp8=false") - weights("kernels.fp8=true"),
            40.0 * 256 * (3 * 2048 * 512 - 2 * 4));
  // Ranks that share a job keep them as they were loaded.
  EXPECT_THAT(plan({"train.method=lora", "kernels.fp8=true", "parallel.fsdp=2"}).out,
              ::testing::Not(HasSubstr(note)));
}

TEST_F(LayoutPlanTest, RefusesAFormOfExpertsInOneLine) {
  const std::vector<std::string> asked = {"kernels.frozen_experts=cuda.fp8", "train.method=lora",
                                          "parallel.fsdp=2"};
  for (const std::vector<std::string>& more :
       std::vector<std::vector<std::string>>{{}, {"--dry-run"}, {"--hardware", "h200"}}) {
    std::vector<std::string> words = asked;
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = plan(words);
    EXPECT_EQ(outcome.status, 2);
    EXPECT_THAT(outcome.err,
                HasSubstr("kernels.frozen_experts: experts that ranks divide "
                          "(parallel.tp, cp, fsdp, ep) are kept by 'as_loaded' alone"));
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  }
}

TEST_F(LayoutPlanTest, RefusesAMergedAdapterInOneLine) {
  for (const std::vector<std::string>& more : std::vector<std::vector<std::string>>{
           {}, {"--dry-run"}, {"--hardware", "h200", "--propose", "1"}}) {
    std::vector<std::string> words = {"rl.reward.verifiers.exact=1", "train.method=lora",
                                      "rollout.merge_adapter=true", "parallel.fsdp=2"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = plan(words);
    EXPECT_EQ(outcome.status, 2);
    EXPECT_THAT(outcome.err, HasSubstr("merge_adapter: this rank does not hold model.layers.0."));
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  }
}

TEST_F(LayoutPlanTest, RefusesWhatARunWouldRefuse) {
  const Outcome layout = plan({"parallel.tp=3"});
  EXPECT_EQ(layout.status, 2);
  EXPECT_THAT(layout.err, HasSubstr("the nearest degree that does is 2"));
  const Outcome ranks = plan({"parallel.dp=auto"});
  EXPECT_EQ(ranks.status, 2);
  EXPECT_THAT(ranks.err, HasSubstr("--ranks"));
}

}  // namespace
}  // namespace heddle::cli
