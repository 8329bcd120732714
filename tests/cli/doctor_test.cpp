#include "cli/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/files.h"
#include "cli/run_command.h"
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
  facts.machine.cores = 2;
  facts.machine.memory_available_bytes = 1 << 30;
  facts.machine.disk_free_bytes = 1 << 30;
  facts.has_nvidia_driver = true;
  facts.findings = find_problems(facts);
  ASSERT_EQ(facts.findings.size(), 5u);
  const std::string text = render(facts, false, 0);
  for (const char* part : {"has no AVX2", "2 of the machine's 8 cores", "only 1.0 GiB of memory",
                           "set train.output_dir", "cmake --preset cuda"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
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

}  // namespace
}  // namespace heddle::cli
