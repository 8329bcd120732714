#include "data/batch.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/ops/empty.h>

#include "base/errors.h"
#include "base/splitmix.h"
#include "device/upload.h"

namespace heddle::data {
namespace {

void check(const SequenceView& sequence) {
  if (sequence.tokens.empty()) {
    throw_error<DataError>("row {} has no token; a sequence of a batch needs at least one",
                           sequence.row);
  }
  if (sequence.labels.size() != sequence.tokens.size() ||
      sequence.weights.size() != sequence.tokens.size()) {
    throw_error<DataError>("row {} has {} tokens but {} labels and {} weights", sequence.row,
                           sequence.tokens.size(), sequence.labels.size(), sequence.weights.size());
  }
}

/// The texts of all rows, those of a row one after the other.
std::vector<SequenceView> texts_of(std::span<const SequenceView> rows) {
  std::vector<SequenceView> texts;
  for (const SequenceView& row : rows) {
    check(row);
    if (row.text_lengths.empty()) texts.push_back(row);
    std::size_t begin = 0;
    for (const std::int64_t length : row.text_lengths) {
      const auto count = static_cast<std::size_t>(length);
      texts.push_back({.tokens = row.tokens.subspan(begin, count),
                       .labels = row.labels.subspan(begin, count),
                       .weights = row.weights.subspan(begin, count),
                       .row = row.row,
                       .target = row.target});
      begin += count;
    }
  }
  return texts;
}

}  // namespace

Batch Batch::from_sequences(std::span<const SequenceView> sequences, BatchCapacity capacity,
                            bool with_targets) {
  const auto has_texts = [](const SequenceView& row) { return !row.text_lengths.empty(); };
  if (std::any_of(sequences.begin(), sequences.end(), has_texts)) {
    Batch batch = from_sequences(texts_of(sequences), capacity, with_targets);
    for (const SequenceView& row : sequences) {
      const std::int64_t texts = std::max<std::int64_t>(1, std::ssize(row.text_lengths));
      for (std::int64_t text = 0; text < texts; ++text) batch.text_of_row.push_back(text);
    }
    return batch;
  }
  Batch batch;
  std::int64_t content = 0;
  for (const SequenceView& sequence : sequences) {
    check(sequence);
    content += static_cast<std::int64_t>(sequence.tokens.size());
  }
  const auto count = static_cast<std::int64_t>(sequences.size());
  // Without any content one dummy token stands in, so that a rank without rows still runs the step.
  const std::int64_t size =
      capacity.tokens > 0 ? capacity.tokens : std::max<std::int64_t>(content, 1);
  if (content > size) {
    throw_error<DataError>("{} tokens do not fit the batch's capacity of {}", content, size);
  }
  if (size > std::numeric_limits<std::int32_t>::max()) {
    throw_error<DataError>("a batch of {} tokens passes the 2^31 of cu_seqlens", size);
  }
  const bool has_tail = content < size;
  const std::int64_t slots =
      capacity.sequences > 0 ? capacity.sequences : count + (has_tail ? 1 : 0);
  if (count + (has_tail ? 1 : 0) > slots) {
    throw_error<DataError>("{} sequences{} do not fit the batch's capacity of {}", count,
                           has_tail ? " and the dummy tail" : "", slots);
  }

  batch.tokens = at::empty({size}, at::kLong);
  batch.position_ids = at::empty({size}, at::kLong);
  batch.labels = at::empty({size}, at::kLong);
  batch.loss_weights = at::empty({size}, at::kFloat);
  auto* tokens = batch.tokens.mutable_data_ptr<std::int64_t>();
  auto* positions = batch.position_ids.mutable_data_ptr<std::int64_t>();
  auto* labels = batch.labels.mutable_data_ptr<std::int64_t>();
  auto* weights = batch.loss_weights.mutable_data_ptr<float>();

  batch.cu_seqlens_host.reserve(static_cast<std::size_t>(slots) + 1);
  batch.cu_seqlens_host.push_back(0);
  std::int64_t at = 0;
  for (const SequenceView& sequence : sequences) {
    const auto length = static_cast<std::int64_t>(sequence.tokens.size());
    for (std::int64_t t = 0; t < length; ++t, ++at) {
      tokens[at] = sequence.tokens[t];
      positions[at] = t;
      // The last position has no successor of its own; whatever it carries must not leak over.
      const bool last = t + 1 == length;
      const std::int64_t label = last ? kIgnoredLabel : sequence.labels[t];
      const bool has_loss = label != kIgnoredLabel && sequence.weights[t] != 0;
      labels[at] = has_loss ? label : kIgnoredLabel;
      weights[at] = has_loss ? sequence.weights[t] : 0;
      batch.loss_rows += has_loss;
      batch.loss_weight_sum += weights[at];
    }
    batch.cu_seqlens_host.push_back(static_cast<std::int32_t>(at));
    batch.max_seqlen = std::max(batch.max_seqlen, length);
    batch.last_tokens.push_back(at - 1);
    batch.row_ids.push_back(sequence.row);
    if (with_targets) batch.targets.push_back(sequence.target);
  }
  if (with_targets) {
    batch.loss_rows = count;
    batch.loss_weight_sum = static_cast<double>(count);
  }
  batch.real_tokens = content;
  batch.real_sequences = count;
  batch.max_seqlen = std::max(batch.max_seqlen, size - content);
  for (std::int64_t t = 0; at < size; ++t, ++at) {
    tokens[at] = 0;
    positions[at] = t;
    labels[at] = kIgnoredLabel;
    weights[at] = 0;
  }
  while (static_cast<std::int64_t>(batch.cu_seqlens_host.size()) <= slots) {
    batch.cu_seqlens_host.push_back(static_cast<std::int32_t>(size));
  }
  batch.cu_seqlens = at::empty({static_cast<std::int64_t>(batch.cu_seqlens_host.size())}, at::kInt);
  std::copy(batch.cu_seqlens_host.begin(), batch.cu_seqlens_host.end(),
            batch.cu_seqlens.mutable_data_ptr<std::int32_t>());
  return batch;
}

void Batch::number_tokens() {
  token_numbers = at::empty({size()}, at::kLong);
  auto* numbers = token_numbers.mutable_data_ptr<std::int64_t>();
  for (std::int64_t s = 0; s < sequences(); ++s) {
    const auto i = static_cast<std::size_t>(s);
    std::uint64_t first = 0;
    if (i < row_ids.size()) first += static_cast<std::uint64_t>(row_ids[i]) * splitmix::kStride;
    if (i < text_of_row.size())
      first += static_cast<std::uint64_t>(text_of_row[i]) * splitmix::kSequence;
    for (std::int64_t t = cu_seqlens_host[i]; t < cu_seqlens_host[i + 1]; ++t)
      numbers[t] = static_cast<std::int64_t>(first++);
  }
}

Batch Batch::to(const c10::Device& device) const {
  Batch moved = *this;
  const auto upload = [&](at::Tensor& tensor) {
    if (tensor.defined()) tensor = device::upload(tensor, device);
  };
  upload(moved.cu_seqlens);
  visit_token_columns([&](auto column, const auto&) { upload(moved.*column); });
  return moved;
}

}  // namespace heddle::data
