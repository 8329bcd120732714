#include "comm/standalone_group.h"

#include <numeric>
#include <utility>
#include <vector>

#include "base/errors.h"

namespace heddle::comm {
namespace {

LaunchEnvironment environment_of(const StandaloneOptions& options) {
  LaunchEnvironment environment;
  environment.launcher = options.name;
  environment.rank = options.rank;
  environment.world = options.size;
  // The sides may be on different hosts.
  environment.local_rank = 0;
  environment.local_world =
      options.endpoint.kind == Endpoint::Kind::kIpv4 && options.endpoint.host.starts_with("127.")
          ? options.size
          : 1;
  environment.master = options.endpoint;
  environment.announces_job = options.rank == 0;
  environment.secret = options.secret;
  environment.nonce = fmt::format("{}#{}", options.name, options.generation);
  return environment;
}

/// A wrong partner would give a wrong sum: every rank adds a number that follows from its place and
/// the generation.
void verify(const Group& group, const StandaloneOptions& options) {
  const auto mark = [&](std::int64_t rank) {
    return static_cast<double>((rank + 1) * 1000 + options.generation % 1000);
  };
  double expected = 0;
  for (std::int64_t rank = 0; rank < options.size; ++rank) expected += mark(rank);
  const double found = group.all_reduce_sum(mark(options.rank));
  if (found != expected) {
    throw_error<CommError>("group {} generation {}: the first sum is {} on rank {}, expected {}",
                           options.name, options.generation, found, options.rank, expected);
  }
}

Group meet(const StandaloneOptions& options, std::optional<Listener> listener) {
  const auto environment = environment_of(options);
  const auto world = listener ? World::serve(environment, std::move(*listener), options.timeout)
                              : World::join(environment, options.timeout);
  std::vector<std::int64_t> ranks(static_cast<std::size_t>(options.size));
  std::iota(ranks.begin(), ranks.end(), 0);
  try {
    Group group(options.name, std::move(ranks), world, options.name);
    verify(group, options);
    return group;
  } catch (const std::exception& error) {
    world->fail(error.what());
    throw;
  }
}

}  // namespace

StandaloneMeeting StandaloneMeeting::start(StandaloneOptions options,
                                           std::optional<Listener> listener) {
  if (options.size < 2 || options.rank < 0 || options.rank >= options.size ||
      listener.has_value() != (options.rank == 0)) {
    throw_error<ConfigError>(
        "group {}: rank {} of {}{}: expected rank 0 with a listener and others without",
        options.name, options.rank, options.size, listener ? " with a listener" : "");
  }
  StandaloneMeeting meeting;
  meeting.group_ = std::async(
      std::launch::async, [options = std::move(options), listener = std::move(listener)]() mutable {
        return meet(options, std::move(listener));
      });
  return meeting;
}

Group StandaloneMeeting::wait() { return group_.get(); }

bool StandaloneMeeting::is_ready() const {
  return group_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

}  // namespace heddle::comm
