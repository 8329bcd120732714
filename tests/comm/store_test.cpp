#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "base/errors.h"
#include "base/files.h"
#include "base/siphash.h"
#include "comm/launch_environment.h"
#include "comm/store.h"
#include "comm/store_dialogue.h"
#include "comm/store_greeting.h"
#include "comm/store_table.h"
#include "testing/message_of.h"
#include "testing/temporary_directory.h"

namespace heddle::comm {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

constexpr const char* kSecret = "a secret of the job";

Listener on_loopback() { return Listener(make_endpoint("127.0.0.1", 0, "test")); }

/// A stranger's connection to the store.
class Stranger {
 public:
  explicit Stranger(std::uint16_t port) : descriptor_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    is_connected_ =
        connect(descriptor_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  }
  ~Stranger() { close(descriptor_); }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;

  bool is_connected() const { return is_connected_; }
  void say(std::string_view bytes) const {
    static_cast<void>(send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL));
  }
  /// Bytes received until the other side closes the connection.
  std::string hear_all() const {
    std::string all;
    char buffer[4096];
    for (ssize_t got = 0; (got = recv(descriptor_, buffer, sizeof buffer, 0)) > 0;)
      all.append(buffer, static_cast<std::size_t>(got));
    return all;
  }
  /// Whether the other side has not closed the connection. Takes what it has said.
  bool is_open() const {
    char buffer[4096];
    ssize_t got = 0;
    while ((got = recv(descriptor_, buffer, sizeof buffer, MSG_DONTWAIT)) > 0) {
    }
    return got < 0 && errno == EAGAIN;
  }
  std::string hear(std::size_t count) const {
    std::string bytes(count, '\0');
    bytes.resize(static_cast<std::size_t>(
        std::max<ssize_t>(0, recv(descriptor_, bytes.data(), count, MSG_WAITALL))));
    return bytes;
  }

 private:
  int descriptor_;
  bool is_connected_ = false;
};

TEST(SipHash, EqualsTheReference) {
  // Vectors of the authors' implementation (vectors_sip128): key 00..0f, message 00..(n-1).
  hash::Key128 key;
  for (int i = 0; i < 16; ++i) key[i] = static_cast<std::uint8_t>(i);
  const auto hex = [](const hash::Key128& bytes) {
    return fmt::format("{:02x}", fmt::join(bytes, ""));
  };
  EXPECT_EQ(hex(hash::siphash(key, "")), "a3817f04ba25a8e66df67214c7550293");
  EXPECT_EQ(hex(hash::siphash(key, std::string(1, '\0'))), "da87c1d86b99af44347659119b22fc45");
  EXPECT_NE(hash::siphash(key, "ab"), hash::siphash(key, "abc"));
  EXPECT_NE(hash::key_of("a"), hash::key_of("b"));
}

TEST(StoreGuard, MembersShareKeysAndCounters) {
  const Store store = Store::serve(on_loopback(), Seconds(10), kSecret);
  const Store other = Store::connect(store.endpoint(), Seconds(10), kSecret);
  store.set("a", "1");
  EXPECT_EQ(other.find("a"), "1");
  EXPECT_EQ(other.find("b"), std::nullopt);
  EXPECT_EQ(other.set_if_absent("a", "2"), "1");
  EXPECT_EQ(other.set_if_absent("b", "2"), "2");
  EXPECT_EQ(store.add("n", 3), 3);
  EXPECT_EQ(other.reconnected().add("n", -1), 2);
  EXPECT_EQ(other.below("x").set_if_absent("a", "y"), "y");
  EXPECT_EQ(store.find("x/a"), "y");
  const std::string large(3 << 20, 'l');
  other.set("large", large);
  EXPECT_EQ(store.find("large"), large);
}

TEST(StoreGuard, WhoHasAnotherSecretIsNotHeard) {
  const Store store = Store::serve(on_loopback(), Seconds(10), kSecret);
  for (const std::string secret :
       {"", "a secret of another job", "a secret of the jo", "x", "\n"}) {
    EXPECT_THAT(message_of([&] { Store::connect(store.endpoint(), Seconds(5), secret); }),
                HasSubstr("belongs to another job"))
        << secret;
  }
}

TEST(StoreGuard, StrangersReadAndChangeNothing) {
  const Store store = Store::serve(on_loopback(), Seconds(10), kSecret);
  store.set("job", "nonce");
  const std::string get = framed(store_request(StoreOperation::kGet, {"job"}));
  const std::string set = framed(store_request(StoreOperation::kSet, {"job", "other"}));
  const std::vector<std::string> attacks = {get,
                                            set,
                                            std::string(32, '\0') + set,
                                            "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
                                            std::string(1 << 16, '\xff'),
                                            std::string("\x00\x00\x00\x00\x03job", 8) + get};
  for (const std::string& bytes : attacks) {
    const Stranger stranger(store.endpoint().port);
    stranger.say(bytes);
    // The greeting, and for those that said enough the refusal; never a value.
    EXPECT_THAT(stranger.hear_all(), Not(HasSubstr("nonce")));
  }
  {
    // A proof that was heard once is worth nothing for another connection.
    const Stranger first(store.endpoint().port), second(store.endpoint().port);
    const std::string hello = first.hear(kStoreHelloBytes), number(16, 'n');
    const auto mine = proof(hash::key_of(kSecret), "client", hello.substr(8), number);
    second.hear(kStoreHelloBytes);
    second.say(number + std::string(as_text(mine)) + get);
    EXPECT_EQ(second.hear_all(), std::string(kStoreReplyBytes, '\0'));
  }
  EXPECT_EQ(store.find("job"), "nonce");
}

TEST(StoreGuard, IdleConnectionsKeepNobodyOut) {
  const Store store = Store::serve(on_loopback(), Seconds(10), kSecret);
  std::vector<std::unique_ptr<Stranger>> idle;
  for (int i = 0; i < 500; ++i) idle.push_back(std::make_unique<Stranger>(store.endpoint().port));
  const Store member = Store::connect(store.endpoint(), Seconds(10), kSecret);
  member.set("a", "1");
  EXPECT_EQ(store.find("a"), "1");
  // It came in before the time was over in which a stranger is to greet.
  EXPECT_TRUE(idle.back()->is_open());
  idle.front()->hear_all();  // closed, as one of the oldest
}

TEST(StoreGuard, ASilentStoreEndsEveryCallAtTheDeadline) {
  Listener listener = on_loopback();
  // It takes connections, as a frozen process does, and answers nothing.
  EXPECT_THAT(message_of([&] { Store::connect(listener.local_endpoint(), Seconds(5), kSecret); }),
              HasSubstr("no answer for 5 s"));
}

TEST(StoreDialogue, AnswersNoMoreThanThePeerReads) {
  const hash::Key128 secret = hash::key_of(kSecret), challenge{1};
  StoreTable table;
  table.answer(store_request(StoreOperation::kSet, {"large", std::string(8 << 20, 'v')}));
  StoreDialogue dialogue(secret, challenge);
  const std::string number(16, 'n');
  ASSERT_TRUE(dialogue.hear(
      number + std::string(as_text(proof(secret, "client", as_text(challenge), number))), table));
  ASSERT_TRUE(dialogue.is_member());
  dialogue.out().clear();
  std::string requests;
  for (int i = 0; i < 4000; ++i) requests += framed(store_request(StoreOperation::kGet, {"large"}));
  std::size_t answered = 0;
  ASSERT_TRUE(dialogue.hear(requests, table));
  for (bool is_over = false; !is_over && answered < 40; ++answered) {
    EXPECT_LE(dialogue.out().size(), StoreDialogue::kMostUnread + (std::size_t{9} << 20));
    is_over = !dialogue.is_paused();
    dialogue.out().clear();
    ASSERT_TRUE(dialogue.hear("", table));
  }
  EXPECT_EQ(answered, 40u);  // two at a time: the peer reads, and the rest waits
}

TEST(StoreTable, RefusesWhatIsNoRequestAndWhatGrowsWithoutBound) {
  StoreTable table;
  const auto ask = [&](StoreOperation operation, std::vector<std::string_view> fields) {
    return table.answer(store_request(operation, fields));
  };
  for (const std::string& bytes :
       {std::string(), std::string("\0", 1), std::string("\xff"), std::string("\x01"),
        std::string("\x02\xff\xff\xff\xff", 5), std::string("\x02\x01\x00\x00\x00", 5),
        std::string("\x03\x01\x00\x00\x00k\x01\x00\x00\x00x", 11)}) {
    EXPECT_EQ(table.answer(bytes)[0], '\0');
  }
  EXPECT_EQ(ask(StoreOperation::kSet, {std::string(2000, 'k'), "v"}),
            std::string("\0", 1) + "the key is too long");
  const std::string value(15 << 20, 'v');
  int stored = 0;
  while (ask(StoreOperation::kSet, {std::to_string(stored), value})[0] == '\1') ++stored;
  EXPECT_EQ(stored, 17);
  EXPECT_LE(table.bytes(), StoreTable::kMostBytes);
  EXPECT_EQ(ask(StoreOperation::kDelete, {"0"}),
            "\1"
            "1");
  EXPECT_EQ(ask(StoreOperation::kSet, {"new", value}), "\1");
  EXPECT_EQ(ask(StoreOperation::kAdd, {"n", "9223372036854775807"}),
            "\1"
            "9223372036854775807");
  EXPECT_EQ(ask(StoreOperation::kAdd, {"n", "1"})[0], '\0');
}

TEST(SecretFile, MustBeLongAndTheOwnersAlone) {
  const testing::TemporaryDirectory dir;
  const auto read = [&](const std::string& text, std::filesystem::perms mode) {
    files::write_atomically(dir / "secret", text);
    std::filesystem::permissions(dir / "secret", mode);
    return message_of([&] { read_secret((dir / "secret").string(), "--secret-file"); });
  };
  using std::filesystem::perms;
  constexpr perms kOwner = perms::owner_read | perms::owner_write;
  EXPECT_EQ(read("0123456789abcdef\n", kOwner), "(no error)");
  EXPECT_THAT(read("0123456789abcdef", kOwner | perms::group_read), HasSubstr("chmod 600"));
  EXPECT_THAT(read("0123456789abcdef", kOwner | perms::others_read), HasSubstr("chmod 600"));
  EXPECT_THAT(read("short", kOwner), HasSubstr("has 5 characters"));
  EXPECT_THAT(read(std::string(5000, 'x'), kOwner), HasSubstr("a secret may have"));
  EXPECT_THAT(message_of([&] { read_secret((dir / "absent").string(), "--secret-file"); }),
              HasSubstr("No such file"));
}

}  // namespace
}  // namespace heddle::comm
