#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <thread>

#include "base/siphash.h"
#include "comm/listener.h"
#include "comm/store_table.h"

namespace heddle::comm {

/// Serves a StoreTable on one thread to clients that have the job's secret. Others are heard for a
/// few seconds and no longer, and however many come, they keep nobody out. Warns of the first that
/// shows another secret.
class StoreServer {
 public:
  /// Takes the listener's socket. Throws CommError.
  StoreServer(Listener listener, const std::string& secret);
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

 private:
  struct Peer;
  void run();
  void accept_all();
  /// Drops strangers that are late, and the oldest beyond `most`.
  void drop_strangers(std::size_t most);
  /// False if the connection is over.
  bool hear(Peer& peer);
  void say_refused(int descriptor);
  static bool flush(Peer& peer);

  hash::Key128 secret_;
  std::string where_;
  bool has_refused_ = false;
  int listener_ = -1, wake_ = -1;
  std::map<int, Peer> peers_;  // by descriptor
  std::uint64_t accepted_ = 0;
  StoreTable table_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace heddle::comm
