#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace heddle::serve {

/// Samples that are generated or wait for it, of each tenant, whatever API asked for them. Its
/// calls may come from any thread.
class SamplesInFlight {
 public:
  static constexpr std::int64_t kMost = 4096;

  /// `most`: of one tenant at the same time.
  explicit SamplesInFlight(std::int64_t most = kMost);

  /// Places for samples, given back with the last copy.
  using Places = std::shared_ptr<const void>;
  /// Throws HttpError 400 for more than a tenant may ever have, 429 for more than it may have now.
  Places take(const std::string& tenant, std::int64_t count);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace heddle::serve
