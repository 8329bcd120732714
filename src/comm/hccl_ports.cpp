#include <fmt/format.h>

#include "comm/device_backend.h"

namespace heddle::comm {

std::vector<std::pair<std::string, std::string>> hccl_port_variables(std::uint16_t master_port) {
  constexpr int kFirst = 20000, kJobs = 400, kPorts = 50;
  int base = kFirst + master_port % kJobs * 2 * kPorts;
  // A hundred that holds the master port itself is exchanged for one after all others.
  if (master_port >= base && master_port < base + 2 * kPorts) base = kFirst + kJobs * 2 * kPorts;
  return {
      {"HCCL_HOST_SOCKET_PORT_RANGE", fmt::format("{}-{}", base, base + kPorts - 1)},
      {"HCCL_NPU_SOCKET_PORT_RANGE", fmt::format("{}-{}", base + kPorts, base + 2 * kPorts - 1)}};
}

}  // namespace heddle::comm
