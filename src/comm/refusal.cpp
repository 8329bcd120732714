#include "comm/refusal.h"

#include "comm/world.h"

namespace heddle::comm {
namespace {

// The time that a store gets to appear.
constexpr Seconds kPatience{10};

}  // namespace

void refuse_to_join(const LaunchEnvironment& environment, const std::string& message,
                    std::int64_t ranks) noexcept {
  try {
    const Store store = open_job_store(environment, kPatience);
    if (environment.announces_job) store.set(kJobKey, environment.nonce);
    if (store.wait(kJobKey, kPatience).value_or("") != environment.nonce) return;
    store.set_if_absent(
        kFailureKey, fmt::format("{} {}", environment.rank, message.substr(0, message.find('\n'))));
    count_out(store, environment, ranks);
  } catch (const std::exception&) {
    // The others end at their deadline.
  }
}

void refuse_to_join(const std::string& message) noexcept {
  try {
    const auto environment = read_launch_environment();
    if (environment && environment->world > 1) refuse_to_join(*environment, message);
  } catch (const std::exception&) {
    // The launcher's own message says what is wrong.
  }
}

}  // namespace heddle::comm
