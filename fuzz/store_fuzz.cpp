// Words of a peer to the ranks' store. The first byte says whether it is one that has the secret,
// and how many bytes come at a time. A stranger changes nothing and hears nothing; what a member
// says is answered or refused, and the store never holds more than it may.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

#include "comm/store_dialogue.h"
#include "comm/store_greeting.h"

namespace {

using namespace heddle;

void require(bool holds) {
  if (!holds) std::abort();
}

/// The complete answers to a member, each a refusal or a value.
void check_answers(std::string_view out) {
  while (!out.empty()) {
    require(out.size() >= 4);
    std::size_t length = 0;
    for (std::size_t i = 4; i-- > 0;) length = length << 8 | static_cast<unsigned char>(out[i]);
    require(length > 0 && length <= out.size() - 4 && (out[4] == '\0' || out[4] == '\1'));
    out.remove_prefix(4 + length);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  using namespace heddle::comm;
  if (size == 0) return 0;
  std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  const bool is_member = data[0] % 8 != 0;
  const std::size_t piece = 1 + data[0] * std::size_t{37};
  const hash::Key128 secret{1, 2, 3}, challenge{4, 5, 6};
  StoreTable table;
  StoreDialogue dialogue(secret, challenge);
  require(dialogue.out().size() == kStoreHelloBytes);
  dialogue.out().clear();
  if (is_member) {
    const std::string number(16, 'n');
    const std::string hello =
        number + std::string(as_text(proof(secret, "client", as_text(challenge), number)));
    require(dialogue.hear(hello, table) && dialogue.is_member());
    require(dialogue.out().size() == kStoreReplyBytes);
    dialogue.out().clear();
  }
  bool is_open = true;
  while (is_open && !(input.empty() && !dialogue.is_paused())) {
    is_open = dialogue.hear(input.substr(0, piece), table);
    input.remove_prefix(std::min(input.size(), piece));
    if (!dialogue.is_paused()) continue;
    require(dialogue.out().size() <= StoreDialogue::kMostUnread + StoreTable::kLargestMessage + 64);
    check_answers(dialogue.out());
    dialogue.out().clear();
  }
  require(dialogue.is_member() == is_member && table.bytes() <= StoreTable::kMostBytes);
  if (is_member) {
    check_answers(dialogue.out());
  } else {
    require(table.bytes() == 0 && dialogue.out() == std::string(dialogue.out().size(), '\0'));
  }
  return 0;
}
