#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>

#include "comm/endpoint.h"
#include "comm/store_server.h"

namespace c10d {
class Store;
}

namespace heddle::comm {

/// c10d's Store over one connection to a StoreServer. A call that has no answer after the timeout
/// throws, and so do all after it. Throws CommError: nothing answers, what answers is no store, or
/// it has another secret. `server`, if this process has it, lives as long as its clients.
c10::intrusive_ptr<c10d::Store> open_guarded_store(const Endpoint& endpoint,
                                                   const std::string& secret,
                                                   std::chrono::milliseconds timeout,
                                                   std::shared_ptr<StoreServer> server = nullptr);

}  // namespace heddle::comm
