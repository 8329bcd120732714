#include "serve/tinker/inputs_cells.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "serve/http/request.h"

namespace heddle::serve::tinker {
namespace {

/// Tensors that are nearly right, and tensors of anything.
class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed) {}

  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n));
  }
  std::int64_t size(std::int64_t usual) {
    constexpr std::int64_t kOdd[] = {0, -1, 1, 257, INT64_MAX, INT64_MIN};
    return below(12) == 0 ? kOdd[below(6)] : usual;
  }
  std::string integers(std::int64_t count, std::int64_t most) {
    std::vector<std::int64_t> numbers;
    for (std::int64_t i = 0; i < count; ++i) numbers.push_back(size(below(most + 1)));
    if (below(3) > 0) std::ranges::sort(numbers);
    std::string bytes = as_bytes(numbers);
    if (below(20) == 0) bytes.resize(static_cast<std::size_t>(below(std::ssize(bytes) + 1)));
    return bytes;
  }
  Tensor tensor(std::int64_t rows) {
    Tensor made;
    const std::int64_t width = 1 + below(4), values = below(rows * width + 1);
    made.is_sparse = below(2) == 0;
    made.dtype = static_cast<DType>(below(5));
    for (std::int64_t i = below(4); i > 0; --i) made.shape.push_back(size(i == 1 ? width : rows));
    made.values = integers(made.is_sparse ? values : rows * width, 90);
    std::vector<std::int64_t> ends(static_cast<std::size_t>(rows + 1));
    for (std::int64_t& end : ends) end = below(values + 1);
    std::ranges::sort(ends);
    ends.front() = 0;
    ends.back() = values;
    made.crow_indices = below(4) == 0 ? integers(rows + 1, values) : as_bytes(ends);
    made.col_indices = integers(values, width - 1);
    return made;
  }

 private:
  std::mt19937_64 random_;
};

TEST(InputsCells, AnyTensorIsRefusedOrHasItsCellsInOrder) {
  Draw draw(5);
  int taken = 0, placed = 0;
  for (int i = 0; i < 40000; ++i) {
    const std::int64_t rows = 1 + draw.below(5);
    try {
      const Cells cells = cells_of(draw.tensor(rows), static_cast<std::size_t>(rows), "input");
      ++taken;
      if (!cells.is_matrix()) {
        ASSERT_EQ(std::ssize(cells.numbers), rows);
        continue;
      }
      ASSERT_EQ(cells.places.size(), cells.numbers.size());
      ASSERT_TRUE(std::ranges::is_sorted(cells.places, std::less_equal<>()));
      ASSERT_TRUE(cells.places.empty() ||
                  (cells.places.front() >= 0 && cells.places.back() < rows * cells.width));
      tenants::Datum targets;
      targets.target_width = cells.width;
      for (std::int64_t place = 0; place < rows * cells.width; ++place)
        if (draw.below(2) == 0) targets.target_cells.push_back(place);
      const auto found = at_cells(cells, targets, "input");
      ASSERT_EQ(found.size(), targets.target_cells.size());
      ++placed;
    } catch (const HttpError& error) {
      ASSERT_EQ(error.status(), 400);
    }
  }
  EXPECT_GT(taken, 1000);
  EXPECT_GT(placed, 100);
}

TEST(InputsCells, NumbersComeToTheirTargets) {
  tenants::Datum targets;
  targets.target_width = 3;
  targets.target_cells = {0, 2, 4};
  const Cells sparse{{7, 8}, 3, {2, 4}}, whole{{1, 0, 2, 0, 3, 0}, 3, {0, 1, 2, 3, 4, 5}},
      beside{{7}, 3, {1}};
  EXPECT_EQ(at_cells(sparse, targets, "w"), (std::vector<float>{0, 7, 8}));
  EXPECT_EQ(at_cells(whole, targets, "w"), (std::vector<float>{1, 2, 3}));
  EXPECT_THROW(at_cells(beside, targets, "w"), HttpError);
}

}  // namespace
}  // namespace heddle::serve::tinker
