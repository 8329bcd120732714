#include "base/control_group.h"

#include <gtest/gtest.h>

#include "base/files.h"
#include "base/host_memory.h"
#include "testing/temporary_directory.h"

namespace heddle {
namespace {

class ControlGroups : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((dir_ / name).parent_path());
    files::write_atomically(dir_ / name, text);
  }
  ControlGroupLimits limits() const { return control_group_limits(dir_ / "proc", dir_ / "cgroup"); }

  testing::TemporaryDirectory dir_;
};

TEST_F(ControlGroups, WithoutAnyNothingIsLimited) {
  EXPECT_FALSE(limits().cores);
  EXPECT_FALSE(limits().memory_total);
}

TEST_F(ControlGroups, TakesTheLeastOfAllLevelsOfVersion2) {
  write("proc/self/cgroup", "0::/system.slice/job.scope/task\n");
  write("cgroup/system.slice/job.scope/task/cpu.max", "max 100000\n");
  write("cgroup/system.slice/job.scope/cpu.max", "250000 100000\n");
  write("cgroup/system.slice/cpu.max", "400000 100000\n");
  write("cgroup/system.slice/job.scope/task/memory.max", "max\n");
  write("cgroup/system.slice/job.scope/memory.max", "1000\n");
  write("cgroup/system.slice/job.scope/memory.current", "700\n");
  write("cgroup/system.slice/job.scope/memory.stat", "anon 500\ninactive_file 200\n");
  write("cgroup/system.slice/memory.max", "4000\n");
  write("cgroup/system.slice/memory.current", "3900\n");
  EXPECT_EQ(limits().cores, 2.5);
  EXPECT_EQ(limits().memory_total, 4000);
  EXPECT_EQ(limits().memory_available, 100);
  write("cgroup/system.slice/memory.current", "1000\n");
  EXPECT_EQ(limits().memory_total, 1000);
  EXPECT_EQ(limits().memory_available, 500);
}

TEST_F(ControlGroups, ReadsVersion1AndBothVersionsTogether) {
  write("proc/self/cgroup", "5:cpu,cpuacct:/a/b\n4:memory:/a\n0::/user\n");
  write("cgroup/cpu/a/b/cpu.cfs_quota_us", "30000\n");
  write("cgroup/cpu/a/b/cpu.cfs_period_us", "100000\n");
  write("cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  write("cgroup/cpu/cpu.cfs_period_us", "100000\n");
  write("cgroup/memory/a/memory.limit_in_bytes", "800\n");
  write("cgroup/memory/a/memory.usage_in_bytes", "100\n");
  write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("cgroup/unified/user/cpu.max", "max 100000\n");
  EXPECT_DOUBLE_EQ(*limits().cores, 0.3);
  EXPECT_EQ(limits().memory_total, 800);
  EXPECT_EQ(limits().memory_available, 700);
}

TEST_F(ControlGroups, AContainerSeesItsGroupAtTheMountPoint) {
  write("proc/self/cgroup", "0::/docker/4711\n");  // a name of the host
  write("cgroup/cpu.max", "150000 100000\n");
  write("cgroup/memory.max", "600000\n");
  write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 900 kB\n");
  EXPECT_EQ(limits().cores, 1.5);
  const HostMemory memory = host_memory(dir_ / "proc", dir_ / "cgroup");
  EXPECT_EQ(memory.total, 600000);
  EXPECT_EQ(memory.available, 600000);
}

}  // namespace
}  // namespace heddle
