#pragma once

#include <string_view>

#include "comm/store.h"

namespace heddle::comm {

/// Throws ConfigError that begins with `what` and names the host if there is none of that name. A
/// name server that does not answer takes seconds and throws nothing: it may later.
void require_resolvable(const Endpoint& endpoint, std::string_view what);

/// Waits until something listens. c10d would too, but it prints a trace for each attempt and does
/// not say which of the reasons it was. Throws ConfigError for a host that does not exist, and
/// CommError with the reason of the last attempt, at most one second after the deadline for each of
/// the host's addresses.
void wait_for_listener(const Endpoint& endpoint, Seconds timeout);

}  // namespace heddle::comm
