#pragma once

#include <string>
#include <string_view>

#include "base/siphash.h"
#include "comm/store_table.h"

namespace heddle::comm {

/// A store's words to one peer, without a socket: the greeting (store_greeting.h), then an answer
/// to each request.
class StoreDialogue {
 public:
  static constexpr std::size_t kMostUnread = StoreTable::kLargestMessage;

  /// `challenge`: a number that was never used.
  StoreDialogue(const hash::Key128& secret, const hash::Key128& challenge);

  /// Takes what the peer said, maybe nothing, and answers until kMostUnread bytes wait to be sent:
  /// a peer that asks and does not read must not fill the memory. False if the connection is over,
  /// with nothing more to be sent.
  bool hear(std::string_view bytes, StoreTable& table);
  /// Answers wait for out() to be sent: the caller then calls hear() again.
  bool is_paused() const { return is_paused_; }
  /// To be sent; the caller removes what it has sent.
  std::string& out() { return out_; }
  const std::string& out() const { return out_; }
  /// The peer has shown that it has the job's secret.
  bool is_member() const { return is_member_; }
  /// The peer has shown that it has not: the connection is over when out() is sent.
  bool is_refused() const { return is_refused_; }

 private:
  bool greet();
  bool answer(StoreTable& table);

  hash::Key128 secret_, challenge_;
  bool is_member_ = false, is_refused_ = false, is_paused_ = false;
  std::string in_, out_;
};

}  // namespace heddle::comm
