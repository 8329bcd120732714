// Rectangles of tensors: what two holders have in common, and who holds what.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/layout.h"

namespace heddle {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::ThrowsMessage;

/// Some columns of a [6, 4] matrix.
Layout columns(std::int64_t first, std::int64_t count) {
  return {{6, 4}, {6, count}, {{{{0, first}, {6, count}}, {0, 0}}}};
}
/// One row of each block of three.
Layout rows(std::int64_t row) {
  return {{6, 4}, {2, 4}, {{{{row, 0}, {1, 4}}, {0, 0}}, {{{3 + row, 0}, {1, 4}}, {1, 0}}}};
}

TEST(Layout, CopiesSayWhereEqualElementsLie) {
  EXPECT_THAT(copies_between(rows(1), columns(1, 2)),
              ElementsAre(LayoutCopy{{0, 1}, {1, 0}, {1, 2}}, LayoutCopy{{1, 1}, {4, 0}, {1, 2}}));
  EXPECT_THAT(copies_between(rows(0), rows(2)), IsEmpty());
  const Layout whole = Layout::whole({6, 4});
  EXPECT_THAT(copies_between(whole, whole), ElementsAre(LayoutCopy{{0, 0}, {0, 0}, {6, 4}}));
  const Layout scalar = Layout::whole({});
  EXPECT_THAT(copies_between(scalar, scalar), ElementsAre(LayoutCopy{}));
  EXPECT_THROW(copies_between(whole, Layout::whole({4, 6})), InternalError);
}

/// Element by element: what is copied is what both hold, once.
TEST(Layout, CopiesBringEveryElementThatBothHold) {
  for (const Layout& from : {rows(0), rows(2), columns(0, 3), columns(3, 1)}) {
    for (const Layout& to : {rows(0), columns(2, 2), Layout::whole({6, 4})}) {
      const auto holds = [](const Layout& layout, std::int64_t r, std::int64_t c) {
        for (const Layout::Part& part : layout.parts) {
          if (intersect(part.global, {{r, c}, {1, 1}})) return 1;
        }
        return 0;
      };
      std::int64_t common = 0, copied = 0;
      for (std::int64_t r = 0; r < 6; ++r) {
        for (std::int64_t c = 0; c < 4; ++c) common += holds(from, r, c) * holds(to, r, c);
      }
      for (const LayoutCopy& copy : copies_between(from, to)) copied += copy.size[0] * copy.size[1];
      EXPECT_EQ(copied, common);
    }
  }
}

TEST(Layout, JsonBringsItBack) {
  for (const Layout& layout : {rows(1), columns(1, 3), Layout::whole({7})})
    EXPECT_EQ(layout_of(nlohmann::ordered_json::parse(to_json(layout).dump())), layout);
  EXPECT_THROW(layout_of(nlohmann::ordered_json::parse("{}")), InternalError);
}

TEST(Coverage, EachElementIsHeldOnce) {
  Coverage good;
  for (std::int64_t r = 0; r < 3; ++r) {
    for (const Layout::Part& part : rows(r).parts) good.add(part.global);
  }
  EXPECT_NO_THROW(good.check("w", {6, 4}));

  Coverage missing;
  missing.add({{0, 0}, {6, 3}});
  EXPECT_THAT(
      [&] {
        missing.check("w", {6, 4});
      },
      ThrowsMessage<ModelError>(AllOf(HasSubstr("w"), HasSubstr("6 of 24 elements"))));
  Coverage twice;
  twice.add({{0, 0}, {6, 3}});
  twice.add({{2, 2}, {1, 2}});
  EXPECT_THAT(
      [&] {
        twice.check("w", {6, 4});
      },
      ThrowsMessage<ModelError>(HasSubstr("[1, 1] from [2, 2] on is owned by two ranks")));
  Coverage beyond;
  beyond.add({{4, 0}, {3, 4}});
  EXPECT_THROW(beyond.check("w", {6, 4}), ModelError);
}

}  // namespace
}  // namespace heddle
