#include "serve/samples_in_flight.h"

#include <map>
#include <mutex>

#include <fmt/format.h>

#include "serve/http/request.h"

namespace heddle::serve {

struct SamplesInFlight::State {
  explicit State(std::int64_t most) : most(most) {}
  const std::int64_t most;
  std::mutex mutex;
  std::map<std::string, std::int64_t> counts;
};

SamplesInFlight::SamplesInFlight(std::int64_t most) : state_(std::make_shared<State>(most)) {}

SamplesInFlight::Places SamplesInFlight::take(const std::string& tenant, std::int64_t count) {
  if (count > state_->most) {
    throw HttpError(400, fmt::format("{} samples are asked for, and a tenant may have {} under way "
                                     "(serve.max_samples): send them in several requests",
                                     count, state_->most));
  }
  const std::lock_guard lock(state_->mutex);
  std::int64_t& present = state_->counts[tenant];
  if (present + count > state_->most) {
    throw HttpError(429,
                    fmt::format("{} samples of this key's tenant are under way, and {} are allowed "
                                "(serve.max_samples)",
                                present, state_->most),
                    1);
  }
  present += count;
  // The state outlives whoever made it: an answer may end after the server's other parts.
  return {nullptr, [state = state_, tenant, count](const void*) {
            const std::lock_guard held(state->mutex);
            const auto found = state->counts.find(tenant);
            if ((found->second -= count) == 0) state->counts.erase(found);
          }};
}

}  // namespace heddle::serve
