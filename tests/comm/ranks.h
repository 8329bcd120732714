#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/world.h"

namespace heddle::testing {

/// Environments of `count` ranks of this host that meet at `master`, whose store somebody else
/// serves.
inline std::vector<comm::LaunchEnvironment> environments(std::int64_t count,
                                                         const comm::Endpoint& master,
                                                         const std::string& nonce = "test") {
  std::vector<comm::LaunchEnvironment> all;
  for (std::int64_t r = 0; r < count; ++r) {
    all.push_back({"test", r, count, r, count, master, false, false, nonce, false, ""});
  }
  return all;
}

/// Runs `body` once per rank, each rank a thread; returns what each threw, "" if nothing.
inline std::vector<std::string> run_ranks(
    std::int64_t count, const std::function<void(const std::shared_ptr<comm::World>&)>& body,
    double timeout_s = 30) {
  comm::Listener listener(std::uint16_t{0});
  const comm::Endpoint master = listener.local_endpoint();
  const comm::Store store = comm::Store::serve(std::move(listener), comm::Seconds(timeout_s));
  store.below(comm::kStorePrefix).set(comm::kJobKey, "test");
  std::vector<std::string> errors(static_cast<std::size_t>(count));
  std::vector<std::jthread> threads;
  for (const comm::LaunchEnvironment& environment : environments(count, master)) {
    threads.emplace_back([&, environment] {
      try {
        const auto world = comm::World::join(environment, comm::Seconds(timeout_s));
        try {
          body(world);
        } catch (const std::exception& error) {
          world->fail(error.what());
          throw;
        }
        world->leave();
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(environment.rank)] = error.what();
      }
    });
  }
  threads.clear();
  return errors;
}

}  // namespace heddle::testing
