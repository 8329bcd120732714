#include "comm/store_dialogue.h"

#include "comm/store_greeting.h"

namespace heddle::comm {

StoreDialogue::StoreDialogue(const hash::Key128& secret, const hash::Key128& challenge)
    : secret_(secret),
      challenge_(challenge),
      out_(std::string(kStoreMagic).append(as_text(challenge_))) {}

bool StoreDialogue::hear(std::string_view bytes, StoreTable& table) {
  if (is_refused_) return true;
  in_.append(bytes);
  if (!is_member_ && !greet()) return true;
  return answer(table);
}

/// True once the peer is a member.
bool StoreDialogue::greet() {
  if (in_.size() < kClientHelloBytes) return false;
  const std::string_view hello = std::string_view(in_).substr(0, kClientHelloBytes);
  const std::string_view number = hello.substr(0, 16), own = as_text(challenge_);
  is_member_ = hash::equal(as_key(hello.substr(16)), proof(secret_, "client", own, number));
  if (!is_member_) {
    out_.append(kStoreReplyBytes, '\0');
    is_refused_ = true;
    in_.clear();
    return false;
  }
  out_ += as_text(proof(secret_, "store", own, number));
  in_.erase(0, kClientHelloBytes);
  return true;
}

bool StoreDialogue::answer(StoreTable& table) {
  std::size_t at = 0;
  is_paused_ = false;
  while (in_.size() - at >= 4) {
    if (out_.size() >= kMostUnread) {
      is_paused_ = true;
      break;
    }
    std::size_t length = 0;
    for (std::size_t i = 4; i-- > 0;)
      length = length << 8 | static_cast<unsigned char>(in_[at + i]);
    if (length > StoreTable::kLargestMessage) return false;
    if (in_.size() - at - 4 < length) break;
    out_ += framed(table.answer(std::string_view(in_).substr(at + 4, length)));
    at += 4 + length;
  }
  in_.erase(0, at);
  return true;
}

}  // namespace heddle::comm
