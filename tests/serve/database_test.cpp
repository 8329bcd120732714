#include "serve/store/database.h"

#include <gtest/gtest.h>

#include <vector>

#include "base/errors.h"
#include "testing/temporary_directory.h"

namespace heddle::serve {
namespace {

class DatabaseTest : public ::testing::Test {
 protected:
  DatabaseTest() {
    database_.execute("CREATE TABLE item(id INTEGER PRIMARY KEY, name TEXT)");
    for (const char* name : {"a", "b", "c"})
      Statement(database_, "INSERT INTO item(name) VALUES (?)").bind(name).run();
  }

  static constexpr const char* kNames = "SELECT name FROM item WHERE id >= ? ORDER BY id";
  std::vector<std::string> names(std::int64_t first) {
    Statement rows(database_, kNames);
    rows.bind(first);
    std::vector<std::string> found;
    while (rows.step()) found.push_back(rows.text(0));
    return found;
  }

  heddle::testing::TemporaryDirectory directory_;
  Database database_{directory_.path() / "test.sqlite"};
};

using Names = std::vector<std::string>;

TEST_F(DatabaseTest, OneTextIsUsedWithinItsOwnRows) {
  Statement outer(database_, kNames);
  outer.bind(std::int64_t{1});
  Names found;
  for (std::int64_t id = 1; outer.step(); ++id) {
    found.push_back(outer.text(0));
    for (const std::string& inner : names(id + 1)) found.push_back(outer.text(0) + inner);
  }
  EXPECT_EQ(found, (Names{"a", "ab", "ac", "b", "bc", "c"}));
}

TEST_F(DatabaseTest, AStatementBeginsAnewWithoutOldValues) {
  {
    Statement first(database_, kNames);
    first.bind(std::int64_t{2});
    ASSERT_TRUE(first.step());  // left before its last row
  }
  EXPECT_EQ(names(1), (Names{"a", "b", "c"}));
  EXPECT_FALSE(Statement(database_, kNames).step()) << "a value that was not given is NULL";
}

TEST_F(DatabaseTest, AFailedStatementIsUsedAgain) {
  const auto add = [&](std::int64_t id) {
    Statement(database_, "INSERT INTO item(id, name) VALUES (?, 'd')").bind(id).run();
  };
  EXPECT_THROW(add(1), FileError);
  add(4);
  EXPECT_EQ(names(4), Names{"d"});
}

TEST_F(DatabaseTest, AStatementFollowsTheTables) {
  EXPECT_EQ(names(3), Names{"c"});
  database_.execute("DROP TABLE item");
  EXPECT_THROW(names(1), FileError);
  database_.execute("CREATE TABLE item(id INTEGER PRIMARY KEY, other TEXT, name TEXT)");
  database_.execute("INSERT INTO item(name) VALUES ('e')");
  EXPECT_EQ(names(1), Names{"e"});
}

TEST_F(DatabaseTest, AChangeThatIsNotCommittedIsTakenBack) {
  for (int i = 0; i < 2; ++i) {
    Transaction change(database_);
    Statement(database_, "DELETE FROM item").run();
    EXPECT_EQ(names(1), Names{});
  }
  EXPECT_EQ(names(1), (Names{"a", "b", "c"}));
}

}  // namespace
}  // namespace heddle::serve
