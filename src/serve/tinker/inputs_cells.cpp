// Loss inputs of the API: numbers a token, and matrices of soft targets.
#include "serve/tinker/inputs_cells.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "serve/http/request.h"

namespace heddle::serve::tinker {
namespace {

constexpr std::int64_t kMostWidth = 256;  ///< Targets of one token: each costs a row of the head.

template <class Number>
std::vector<Number> unpacked(const std::string& bytes, const std::string& where) {
  if (bytes.size() % sizeof(Number) != 0)
    throw_http(400, "{} has {} bytes: expected numbers of {}", where, bytes.size(), sizeof(Number));
  std::vector<Number> numbers(bytes.size() / sizeof(Number));
  if (!numbers.empty()) std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}

std::vector<double> numbers_of(const Tensor& tensor, const std::string& where) {
  const auto widened = [](const auto& numbers) {
    return std::vector<double>(numbers.begin(), numbers.end());
  };
  switch (tensor.dtype) {
    case DType::kFloat32:
      return widened(unpacked<float>(tensor.values, where));
    case DType::kInt64:
      return widened(unpacked<std::int64_t>(tensor.values, where));
    case DType::kInt32:
      return widened(unpacked<std::int32_t>(tensor.values, where));
    default:
      throw_http(400, "{} has a dtype that is not known: expected float32 or int64", where);
  }
}

std::vector<std::int64_t> csr_places(const Tensor& tensor, std::int64_t rows, std::int64_t width,
                                     std::size_t values, const std::string& where) {
  const auto ends = unpacked<std::int64_t>(tensor.crow_indices, where + ": crow_indices"),
             columns = unpacked<std::int64_t>(tensor.col_indices, where + ": col_indices");
  const bool is_whole = std::ssize(ends) == rows + 1 && ends.front() == 0 &&
                        ends.back() == static_cast<std::int64_t>(values) &&
                        columns.size() == values && std::ranges::is_sorted(ends);
  if (!is_whole)
    throw_http(400, "{} is no CSR matrix of {} rows and {} values", where, rows, values);
  std::vector<std::int64_t> places;
  places.reserve(values);
  for (std::int64_t row = 0; row < rows; ++row) {
    std::int64_t last = -1;
    for (std::int64_t i = ends[static_cast<std::size_t>(row)];
         i < ends[static_cast<std::size_t>(row) + 1]; ++i) {
      const std::int64_t column = columns[static_cast<std::size_t>(i)];
      if (column <= last || column >= width)
        throw_http(400, "{}: row {} has column {}: expected ascending ones below {}", where, row,
                   column, width);
      places.push_back(row * width + (last = column));
    }
  }
  return places;
}

}  // namespace

Cells cells_of(const Tensor& tensor, std::size_t tokens, const std::string& where) {
  Cells cells;
  cells.numbers = numbers_of(tensor, where);
  const auto rows = static_cast<std::int64_t>(tokens);
  const auto count = static_cast<std::int64_t>(cells.numbers.size());
  const std::vector<std::int64_t>& shape = tensor.shape;
  if (!tensor.is_sparse && shape.size() < 2) {
    if (!shape.empty() && shape[0] != count)
      throw_http(400, "{} has {} numbers, which its shape does not have", where, count);
    if (count != rows)
      throw_http(400, "{} has {} numbers: expected one for each of the {} input tokens", where,
                 count, rows);
    return cells;
  }
  if (shape.size() != 2 || shape[0] != rows || shape[1] < 1 || shape[1] > kMostWidth)
    throw_http(400, "{} is a matrix: expected the shape [{}, 1 to {}], a row for each input token",
               where, rows, kMostWidth);
  cells.width = shape[1];
  if (tensor.is_sparse) {
    cells.places = csr_places(tensor, rows, cells.width, cells.numbers.size(), where);
  } else {
    if (count != rows * cells.width)
      throw_http(400, "{} has {} numbers, which its shape does not have", where, count);
    for (std::int64_t place = 0; place < count; ++place) cells.places.push_back(place);
  }
  return cells;
}

std::vector<float> at_cells(const Cells& input, const tenants::Datum& targets,
                            const std::string& where) {
  if (input.width != targets.target_width)
    throw_http(400, "{} has another shape than target_tokens", where);
  if (!input.is_matrix()) return {input.numbers.begin(), input.numbers.end()};
  std::vector<float> found;
  found.reserve(targets.target_cells.size());
  auto place = input.places.begin();
  auto number = input.numbers.begin();
  const auto pass_until = [&](std::int64_t cell) {
    for (; place != input.places.end() && *place < cell; ++place, ++number) {
      if (*number != 0)
        throw_http(400, "{} has {} in row {}, column {}, where target_tokens has no target", where,
                   *number, *place / input.width, *place % input.width);
    }
  };
  for (const std::int64_t cell : targets.target_cells) {
    pass_until(cell);
    const bool is_there = place != input.places.end() && *place == cell;
    found.push_back(is_there ? static_cast<float>(*number) : 0);
    if (is_there) ++place, ++number;
  }
  pass_until(std::numeric_limits<std::int64_t>::max());
  return found;
}

}  // namespace heddle::serve::tinker
