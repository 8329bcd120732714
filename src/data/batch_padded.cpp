#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/errors.h"
#include "data/batch.h"

namespace heddle::data {
namespace {

/// Tokens [begin, end) of padded row `row` that form one sequence.
struct Segment {
  std::int64_t row;
  std::int64_t begin;
  std::int64_t end;
};

/// Collects entries that do not fit, to name the first few in one message.
class Complaints {
 public:
  void add(std::string text) {
    if (++count_ <= 4) texts_.push_back(std::move(text));
  }
  void raise_if_any() const {
    if (count_ == 0) return;
    const std::string more =
        count_ > texts_.size() ? fmt::format("; and {} more", count_ - texts_.size()) : "";
    throw_error<DataError>(
        "attention_mask does not mean causal attention with key padding or block-diagonal causal "
        "attention: {}{}",
        fmt::join(texts_, "; "), more);
  }
  bool empty() const { return count_ == 0; }

 private:
  std::size_t count_ = 0;
  std::vector<std::string> texts_;
};

std::string shape_of(const at::Tensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.sizes().vec(), ", "));
}

/// The mask as bytes on the host, 1 = attend, with the same shape.
at::Tensor attend_bytes(const at::Tensor& mask, Complaints& complaints) {
  const at::Tensor values = mask.detach().to(at::kCPU, at::kDouble).contiguous();
  const auto* data = values.const_data_ptr<double>();
  const std::int64_t count = values.numel();
  const bool is_float = mask.is_floating_point();
  bool has_negative = false, has_one = false;
  for (std::int64_t i = 0; i < count; ++i) {
    has_negative |= data[i] < 0;
    has_one |= data[i] == 1;
  }
  // A float mask of rank 3 or 4 is added to the scores (0 = attend); one of rank 2 multiplies.
  const bool additive = is_float && (has_negative || (mask.dim() > 2 && !has_one));
  at::Tensor bytes = at::empty(values.sizes(), at::kByte);
  auto* out = bytes.mutable_data_ptr<std::uint8_t>();
  for (std::int64_t i = 0; i < count; ++i) {
    const double value = data[i];
    // Additive masks use -inf, the dtype's lowest value or a round number such as -1e4.
    const bool known = additive ? value == 0 || value <= -1e4 : value == 0 || value == 1;
    if (!known) {
      complaints.add(fmt::format("entry {} is {}, expected {}", i, value,
                                 additive ? "0 or a large negative number" : "0 or 1"));
    }
    out[i] = additive ? value == 0 : value != 0;
  }
  return bytes;
}

/// Rank 2: one run of real tokens per row.
std::vector<Segment> segments_of_rows(const at::Tensor& bytes, Complaints& complaints) {
  const std::int64_t rows = bytes.size(0), width = bytes.size(1);
  const auto* data = bytes.const_data_ptr<std::uint8_t>();
  std::vector<Segment> segments;
  for (std::int64_t b = 0; b < rows; ++b) {
    const auto* row = data + b * width;
    const auto* first = std::find(row, row + width, 1);
    if (first == row + width) continue;
    auto* last = row + width;
    while (last[-1] == 0) --last;
    const auto* hole = std::find(first, static_cast<const std::uint8_t*>(last), 0);
    if (hole != last) {
      complaints.add(fmt::format("[{}, {}] is 0 between real tokens {} and {} of its row", b,
                                 hole - row, first - row, last - row - 1));
    }
    segments.push_back({b, first - row, last - row});
  }
  return segments;
}

/// One [S, S] map of queries to keys. A position is padding when it does not attend to itself, or
/// when it attends to everything including what follows it (as transformers leaves fully masked
/// rows for fused attention).
void segments_of_square(const std::uint8_t* map, std::int64_t b, std::int64_t width,
                        std::vector<Segment>& segments, Complaints& complaints) {
  std::vector<std::uint8_t> real(width);
  for (std::int64_t q = 0; q < width; ++q) {
    const auto* row = map + q * width;
    const bool sees_all = q + 1 < width && std::find(row, row + width, 0) == row + width;
    real[q] = row[q] != 0 && !sees_all;
  }
  std::int64_t begin = -1;  // of the sequence that q - 1 belongs to; -1 after padding
  for (std::int64_t q = 0; q < width; ++q) {
    if (!real[q]) {
      begin = -1;
      continue;
    }
    const auto* row = map + q * width;
    for (std::int64_t k = q + 1; k < width; ++k) {
      if (row[k])
        complaints.add(fmt::format("[{}, {}, {}]: query attends to a later key", b, q, k));
    }
    const std::int64_t expected_begin = begin >= 0 && row[q - 1] ? begin : q;
    for (std::int64_t k = 0; k < q; ++k) {
      const bool expected = k >= expected_begin;
      if ((row[k] != 0) == expected) continue;
      if (expected) {
        complaints.add(
            fmt::format("[{}, {}, {}]: query does not attend to a key of its sequence "
                        "that its predecessor attends to",
                        b, q, k));
      } else {
        complaints.add(fmt::format("[{}, {}, {}]: query attends to {}", b, q, k,
                                   real[k] ? "a key of another sequence" : "padding"));
      }
    }
    if (expected_begin == q) segments.push_back({b, q, q});
    begin = expected_begin;
    if (!segments.empty()) segments.back().end = q + 1;
  }
}

std::vector<Segment> find_segments(const at::Tensor& mask, std::int64_t rows, std::int64_t width) {
  Complaints complaints;
  const auto fail_shape = [&](const char* expected) {
    throw_error<DataError>("attention_mask has shape {}, expected {} for tokens [{}, {}]",
                           shape_of(mask), expected, rows, width);
  };
  if (mask.dim() == 2) {
    if (mask.size(0) != rows || mask.size(1) != width) fail_shape("[B, S]");
    std::vector<Segment> segments = segments_of_rows(attend_bytes(mask, complaints), complaints);
    complaints.raise_if_any();
    return segments;
  }
  if (mask.dim() != 3 && mask.dim() != 4) fail_shape("rank 2, 3 or 4");
  const std::int64_t batch = mask.size(0);
  if ((batch != rows && batch != 1) || mask.size(-1) != width || mask.size(-2) != width) {
    fail_shape(mask.dim() == 3 ? "[B, S, S]" : "[B, 1 or heads, S, S]");
  }
  const std::int64_t heads = mask.dim() == 4 ? mask.size(1) : 1;
  if (heads < 1) fail_shape("at least one head");
  const at::Tensor bytes = attend_bytes(mask, complaints);
  complaints.raise_if_any();
  const auto* data = bytes.const_data_ptr<std::uint8_t>();
  const std::int64_t square = width * width;
  std::vector<Segment> segments;
  for (std::int64_t b = 0; b < rows; ++b) {
    const auto* map = data + (batch == 1 ? 0 : b) * heads * square;
    for (std::int64_t h = 1; h < heads; ++h) {
      const auto [one, other] = std::mismatch(map, map + square, map + h * square);
      if (one != map + square) {
        complaints.add(
            fmt::format("[{}, {}, {}, {}] differs from head 0; masks per head are not "
                        "supported",
                        b, h, (one - map) / width, (one - map) % width));
      }
    }
    segments_of_square(map, b, width, segments, complaints);
  }
  complaints.raise_if_any();
  return segments;
}

void check_like_tokens(const at::Tensor& tensor, const at::Tensor& tokens, const char* name) {
  if (tensor.dim() == 2 && tensor.sizes() == tokens.sizes()) return;
  throw_error<DataError>("{} has shape {}, expected that of the tokens, {}", name, shape_of(tensor),
                         shape_of(tokens));
}

std::int32_t narrow_id(std::int64_t id, const char* name, std::int64_t row, std::int64_t column) {
  if (id >= std::numeric_limits<std::int32_t>::min() &&
      id <= std::numeric_limits<std::int32_t>::max()) {
    return static_cast<std::int32_t>(id);
  }
  throw_error<DataError>("{}[{}, {}] is {}, which is no token id", name, row, column, id);
}

/// Gathers position ids [B, S] or [3, B, S] along the segments, after `batch` was laid out from
/// them.
at::Tensor gather_positions(const at::Tensor& given, const at::Tensor& tokens,
                            const std::vector<Segment>& segments, const Batch& batch) {
  const bool is_mrope = given.dim() == 3 && given.size(0) == 3;
  const at::Tensor& shape = is_mrope ? given[0] : given;
  check_like_tokens(shape, tokens, "position_ids");
  const at::Tensor source = given.to(at::kCPU, at::kLong).contiguous();
  const std::int64_t planes = is_mrope ? 3 : 1, size = batch.size(), width = tokens.size(1);
  at::Tensor out = is_mrope ? at::empty({3, size}, at::kLong) : at::empty({size}, at::kLong);
  const auto* from = source.const_data_ptr<std::int64_t>();
  auto* to = out.mutable_data_ptr<std::int64_t>();
  const auto* dummy = batch.position_ids.const_data_ptr<std::int64_t>();
  for (std::int64_t plane = 0; plane < planes; ++plane) {
    for (const Segment& segment : segments) {
      const auto* begin = from + (plane * tokens.size(0) + segment.row) * width;
      to = std::copy(begin + segment.begin, begin + segment.end, to);
    }
    to = std::copy(dummy + batch.real_tokens, dummy + size, to);
  }
  return out;
}

}  // namespace

Batch Batch::from_padded(const at::Tensor& tokens, const at::Tensor& attention_mask) {
  return from_padded(tokens, attention_mask, PaddedOptions());
}

Batch Batch::from_padded(const at::Tensor& tokens, const at::Tensor& attention_mask,
                         const PaddedOptions& options) {
  if (tokens.dim() != 2) {
    throw_error<DataError>("padded tokens have shape {}, expected [B, S]", shape_of(tokens));
  }
  const std::int64_t width = tokens.size(1);
  const std::vector<Segment> segments = find_segments(attention_mask, tokens.size(0), width);
  const auto host = [&](const at::Tensor& tensor, const char* name, at::ScalarType dtype) {
    check_like_tokens(tensor, tokens, name);
    return tensor.detach().to(at::kCPU, dtype).contiguous();
  };
  const at::Tensor ids = host(tokens, "tokens", at::kLong);
  at::Tensor given_labels, given_weights;
  if (options.labels) given_labels = host(*options.labels, "labels", at::kLong);
  if (options.loss_weights) given_weights = host(*options.loss_weights, "loss_weights", at::kFloat);

  std::vector<std::int32_t> flat_tokens, flat_labels;
  std::vector<float> flat_weights;
  for (const Segment& segment : segments) {
    const std::int64_t base = segment.row * width;
    for (std::int64_t t = segment.begin; t < segment.end; ++t) {
      flat_tokens.push_back(
          narrow_id(ids.const_data_ptr<std::int64_t>()[base + t], "tokens", segment.row, t));
      std::int32_t label = kIgnoredLabel;
      float weight = 0;
      if (given_labels.defined() && t + 1 < segment.end) {
        label = narrow_id(given_labels.const_data_ptr<std::int64_t>()[base + t + 1], "labels",
                          segment.row, t + 1);
        weight = given_weights.defined() ? given_weights.const_data_ptr<float>()[base + t + 1] : 1;
      }
      flat_labels.push_back(label);
      flat_weights.push_back(label == kIgnoredLabel ? 0 : weight);
    }
  }
  std::vector<SequenceView> views;
  std::size_t at = 0;
  for (const Segment& segment : segments) {
    const auto length = static_cast<std::size_t>(segment.end - segment.begin);
    views.push_back({.tokens = std::span(flat_tokens).subspan(at, length),
                     .labels = std::span(flat_labels).subspan(at, length),
                     .weights = std::span(flat_weights).subspan(at, length),
                     .row = segment.row});
    at += length;
  }
  Batch batch = from_sequences(views, options.capacity);
  if (options.position_ids) {
    batch.position_ids = gather_positions(*options.position_ids, tokens, segments, batch);
  }
  return batch;
}

}  // namespace heddle::data
