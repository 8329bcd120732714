#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "comm/launch_environment.h"

namespace heddle::comm {

/// For a rank that ends before it could join: leaves its reason with the job, so that those that
/// arrive do not wait for it. A launcher refuses for all `ranks` of its host. Takes a few seconds
/// where the store is not there. Does not throw.
void refuse_to_join(const LaunchEnvironment& environment, const std::string& message,
                    std::int64_t ranks = 1) noexcept;
/// Refuses for this process, if a launcher started it among others.
void refuse_to_join(const std::string& message) noexcept;

/// Runs what a rank does before it joins: the other ranks are told what it throws.
template <class Body>
auto before_joining(const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    refuse_to_join(error.what());
    throw;
  }
}

}  // namespace heddle::comm
