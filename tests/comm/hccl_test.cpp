#include "comm/device_backend.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <set>

namespace heddle::comm {
namespace {

struct Range {
  int first = 0, last = 0;
};

Range range(std::uint16_t master_port, const std::string& variable) {
  for (const auto& [name, value] : hccl_port_variables(master_port)) {
    Range range;
    if (name == variable && std::sscanf(value.c_str(), "%d-%d", &range.first, &range.last) == 2)
      return range;
  }
  ADD_FAILURE() << "no range in " << variable;
  return {};
}

TEST(HcclPorts, NeighbouringJobsShareNoPort) {
  std::map<int, int> owner;
  for (int master = 29500; master < 29900; ++master) {
    for (const char* variable : {"HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"}) {
      const Range r = range(static_cast<std::uint16_t>(master), variable);
      EXPECT_EQ(r.last - r.first, 49);
      for (int port = r.first; port <= r.last; ++port)
        EXPECT_TRUE(owner.emplace(port, master).second) << port << " of " << master;
    }
  }
}

TEST(HcclPorts, AreUnprivilegedAndNeverTheMasterPort) {
  for (int master = 1; master < 65536; master += 7) {
    for (const char* variable : {"HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"}) {
      const Range r = range(static_cast<std::uint16_t>(master), variable);
      EXPECT_TRUE(r.first >= 20000 && r.last < 60100);
      EXPECT_TRUE(master < r.first || master > r.last) << master;
    }
  }
}

}  // namespace
}  // namespace heddle::comm
