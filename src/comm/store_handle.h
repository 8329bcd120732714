#pragma once

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Store;
}

namespace heddle::comm {

/// c10d's store inside a Store, for the sources that make process groups of it.
struct StoreHandle {
  c10::intrusive_ptr<c10d::Store> store;
};

}  // namespace heddle::comm
