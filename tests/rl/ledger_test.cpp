#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/errors.h"
#include "base/hash.h"
#include "rl/ledger.h"
#include "testing/message_of.h"
#include "testing/temporary_directory.h"

namespace heddle::rl {
namespace {

using testing::message_of;

std::string bytes_of(const files::Path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const files::Path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

class LedgerFile : public ::testing::Test {
 protected:
  /// Six groups: 0 to 2 consumed, 3 rejected, 4 completed under its second attempt, 5 under way.
  std::uint64_t fill() {
    Ledger ledger(path_);
    for (std::int64_t cursor = 0; cursor < 6; ++cursor)
      ledger.dispatched({cursor, 0, static_cast<std::uint64_t>(cursor) + 100, 0});
    for (const std::int64_t cursor : {0, 1, 2}) ledger.completed(cursor);
    ledger.consumed(1, std::vector<std::int64_t>{0, 1});
    ledger.published(1, "abc");
    const std::uint64_t checkpoint = ledger.commit();
    ledger.consumed(2, std::vector<std::int64_t>{2});
    ledger.rejected(3, Rejection::kFailed, 17);
    ledger.dispatched({4, 1, 200, 1});
    ledger.completed(4);
    ledger.epoch(1);
    ledger.commit();
    return checkpoint;
  }

  static void expect_filled(const LedgerState& state) {
    EXPECT_EQ(state.next_cursor, 6);
    EXPECT_EQ(state.consumed, 3);
    EXPECT_EQ(state.rejected.at(Rejection::kFailed), 1);
    EXPECT_EQ(state.pending.size(), 2u);
    EXPECT_EQ(state.pending.at(4), (Dispatch{4, 1, 200, 1}));
    EXPECT_EQ(state.completed, (std::set<std::int64_t>{4}));
    EXPECT_EQ(state.step, 2);
    EXPECT_EQ(state.version, 1);
    EXPECT_EQ(state.weights_hash, "abc");
    EXPECT_EQ(state.epoch, 1);
  }

  testing::TemporaryDirectory folder_;
  files::Path path_ = folder_ / "ledger";
};

TEST_F(LedgerFile, IsReadAgain) {
  fill();
  expect_filled(Ledger(path_).state());
}

TEST_F(LedgerFile, GoesOnAfterIsReadAgain) {
  fill();
  {
    Ledger ledger(path_);
    ledger.consumed(3, std::vector<std::int64_t>{4});
    ledger.commit();
  }
  EXPECT_EQ(Ledger(path_).state().consumed, 4);
}

TEST_F(LedgerFile, GoesBackToACheckpoint) {
  const std::uint64_t checkpoint = fill();
  const Ledger ledger(path_, checkpoint);
  EXPECT_EQ(ledger.state().consumed, 2);
  EXPECT_EQ(ledger.state().pending.size(), 4u);
  EXPECT_EQ(ledger.state().completed, (std::set<std::int64_t>{2}));
  EXPECT_EQ(std::filesystem::file_size(path_), checkpoint);
}

TEST_F(LedgerFile, KeepsWhatStandsBeforeACut) {
  fill();
  const std::string whole = bytes_of(path_);
  std::size_t records = 0;
  for (std::size_t length = 0; length < whole.size(); length += 7) {
    write(path_, whole.substr(0, length));
    const Ledger ledger(path_);
    const std::string kept = bytes_of(path_);
    EXPECT_TRUE(whole.starts_with(kept));
    EXPECT_TRUE(kept.empty() || kept.back() == '\n');
    EXPECT_LE(length - kept.size(), 100u);
    records = std::max<std::size_t>(records, ledger.state().next_cursor);
  }
  EXPECT_EQ(records, 6u);
}

TEST_F(LedgerFile, CutsWhatFollowsADamagedByte) {
  fill();
  const std::string whole = bytes_of(path_);
  for (std::size_t at = 0; at < whole.size(); at += 11) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 4);
    write(path_, damaged);
    const Ledger ledger(path_);
    EXPECT_LE(bytes_of(path_).size(), at);
  }
}

TEST_F(LedgerFile, RefusesDamageBeforeTheCheckpoint) {
  const std::uint64_t checkpoint = fill();
  std::string damaged = bytes_of(path_);
  damaged[40] = '!';
  write(path_, damaged);
  EXPECT_NE(message_of([&] { Ledger(path_, checkpoint); }).find("damaged at byte 0"),
            std::string::npos);
  write(path_, bytes_of(path_).substr(0, checkpoint - 1));
  EXPECT_THROW(Ledger(path_, checkpoint), DataError);
}

TEST_F(LedgerFile, RefusesRecordsInAnotherOrder) {
  fill();
  const std::string whole = bytes_of(path_);
  const std::size_t first = whole.find('\n') + 1, second = whole.find('\n', first) + 1;
  write(path_, whole.substr(first, second - first) + whole.substr(0, first));
  EXPECT_EQ(Ledger(path_).state().next_cursor, 0);
}

TEST_F(LedgerFile, RefusesRecordsThatOnlyTheirChecksumMakesOurs) {
  for (
      const char* text :
      {"{}",
       "[]",
       "7",
       R"({"epoch": {"number": 1}, "completed": {"cursor": 0}})",
       R"({"epoch": 7})",
       R"({"epoch": {"number": -1}})",
       R"({"epoch": {"number": 1.5}})",
       R"({"epoch": {"number": 1e300}})",
       R"({"epoch": {"number": "1"}})",
       R"({"epoch": {"number": 9223372036854775807}})",
       R"({"epoch": {}})",
       R"({"dispatched": {"cursor": 0, "attempt": 0, "seed": -1, "version": 0}})",
       R"({"dispatched": {"cursor": 18446744073709551615, "attempt": 0, "seed": 1, "version": 0}})",
       R"({"consumed": {"step": 1, "groups": {"a": 1}}})",
       R"({"consumed": {"step": 1, "groups": [0.5]}})",
       R"({"resumed": {"next_cursor": 1, "step": 1, "version": 1, "tried": [1, [2]]}})",
       R"({"rejected": {"cursor": 0, "reason": "\u001b[2J", "tokens": 1}})",
       R"({"published": {"version": 1, "hash": 5}})",
       R"({"\u001b[2J": {}})",
       "{\"epoch\"",
       "null"}) {
    write(path_, fmt::format("{:016x} {}\n", hash::of(text, 0), text));
    const std::string message = message_of([&] { Ledger{path_}; });
    EXPECT_NE(message.find("ledger: byte 0: "), std::string::npos) << text << ": " << message;
    EXPECT_EQ(message.find('\x1b'), std::string::npos) << text;
  }
}

TEST_F(LedgerFile, LosesWhatWasNotCommitted) {
  {
    Ledger ledger(path_);
    ledger.dispatched({0, 0, 1, 0});
    ledger.commit();
    ledger.dispatched({1, 0, 1, 0});
  }
  EXPECT_EQ(Ledger(path_).state().next_cursor, 1);
}

TEST_F(LedgerFile, ConsumesEachGroupOnce) {
  fill();
  Ledger ledger(path_);
  EXPECT_THROW(ledger.consumed(3, std::vector<std::int64_t>{0}), InternalError);
  EXPECT_THROW(ledger.consumed(3, std::vector<std::int64_t>{3}), InternalError);
  EXPECT_THROW(ledger.consumed(3, std::vector<std::int64_t>{6}), InternalError);
  EXPECT_THROW(ledger.consumed(2, std::vector<std::int64_t>{4}), InternalError);
  EXPECT_THROW(ledger.rejected(1, Rejection::kStale, 0), InternalError);
  EXPECT_THROW(ledger.completed(4), InternalError);
  EXPECT_THROW(ledger.dispatched({7, 0, 1, 1}), InternalError);
  EXPECT_THROW(ledger.dispatched({5, 2, 1, 1}), InternalError);
  EXPECT_THROW(ledger.dispatched({0, 1, 1, 1}), InternalError);
  expect_filled(ledger.state());
}

TEST_F(LedgerFile, RunOfItsOwnBeginsWhereAnotherStood) {
  {
    Ledger ledger(path_);
    ledger.resumed(6, 2, 3, std::vector<Dispatch>{{.cursor = 4, .attempt = 1}});
    EXPECT_THROW(ledger.dispatched({4, 1, 7, 3}), InternalError);  // tried already
    ledger.dispatched({4, 2, 7, 3});
    ledger.dispatched({6, 0, 8, 3});
    ledger.consumed(3, std::vector<std::int64_t>{4});
    EXPECT_THROW(ledger.resumed(1, 1, 1, {}), InternalError);
    ledger.commit();
  }
  const Ledger ledger(path_);
  EXPECT_EQ(ledger.state().next_cursor, 7);
  EXPECT_EQ(ledger.state().step, 3);
  EXPECT_EQ(ledger.state().version, 3);
  EXPECT_EQ(ledger.state().consumed, 1);
  EXPECT_EQ(ledger.state().pending.size(), 1u);
}

}  // namespace
}  // namespace heddle::rl
