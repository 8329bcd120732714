#pragma once

#include <cstdint>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "comm/store.h"

namespace c10d {
class Backend;
}

namespace heddle::comm {

/// A Gloo process group of `size` processes that meet in `store` (its keys are this group's alone).
/// `address`: this host's, under which the others reach it. Blocks until all are connected; throws
/// what c10d throws when they are not within `timeout`.
c10::intrusive_ptr<c10d::Backend> make_gloo(const Store& store, std::int64_t rank,
                                            std::int64_t size, const std::string& address,
                                            Seconds timeout);

}  // namespace heddle::comm
