#include "runtime/free_memory.h"

#include <algorithm>

#include "comm/world.h"
#include "device/device.h"

namespace heddle::runtime {

std::int64_t free_bytes(const Context& context) {
  const std::int64_t there = device::free_bytes(context.device);
  const comm::World* const world = context.mesh.world().get();
  if (!context.device.is_cpu() || world == nullptr) return there;
  return there / std::max<std::int64_t>(1, world->environment().local_world);
}

}  // namespace heddle::runtime
