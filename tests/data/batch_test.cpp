#include "data/batch.h"

#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/tril.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "loader_fixture.h"
#include "testing/device.h"

namespace heddle::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::to_doubles;
using testing::to_list;

struct OwnedSequence {
  std::vector<std::int32_t> tokens, labels;
  std::vector<float> weights;
  SequenceView view(std::int64_t row, double target = 0) const {
    return {tokens, labels, weights, row, target};
  }
};

template <class F>
std::string data_error(F&& body) {
  try {
    body();
  } catch (const DataError& error) {
    return error.what();
  }
  return "no DataError";
}

at::Tensor ids(std::int64_t rows, std::int64_t width) {
  return at::arange(rows * width, at::kLong).reshape({rows, width});
}

TEST(Batch, LaysSequencesEndToEnd) {
  const OwnedSequence a{{5, 6, 7}, {6, 7, -100}, {1, 0.5, 0}}, b{{8}, {-100}, {0}};
  const std::vector<SequenceView> views = {a.view(4), b.view(9)};
  const Batch batch = Batch::from_sequences(views);
  EXPECT_THAT(to_list(batch.tokens), ElementsAre(5, 6, 7, 8));
  EXPECT_THAT(to_list(batch.cu_seqlens), ElementsAre(0, 3, 4));
  EXPECT_EQ(batch.cu_seqlens.scalar_type(), at::kInt);
  EXPECT_THAT(to_list(batch.position_ids), ElementsAre(0, 1, 2, 0));
  EXPECT_THAT(to_list(batch.labels), ElementsAre(6, 7, -100, -100));
  EXPECT_THAT(to_doubles(batch.loss_weights), ElementsAre(1, 0.5, 0, 0));
  EXPECT_THAT(batch.cu_seqlens_host, ElementsAre(0, 3, 4));
  EXPECT_THAT(batch.row_ids, ElementsAre(4, 9));
  EXPECT_EQ(batch.max_seqlen, 3);
  EXPECT_EQ(batch.loss_rows, 2);
  EXPECT_DOUBLE_EQ(batch.loss_weight_sum, 1.5);
  EXPECT_EQ(batch.real_tokens, 4);
}

TEST(Batch, NeverLetsALabelCrossASequencesEnd) {
  // A poisoned cache: the last label would be the neighbour's first token.
  const OwnedSequence a{{5, 6}, {6, 8}, {1, 1}}, b{{8, 9}, {9, -100}, {1, 0}};
  const std::vector<SequenceView> views = {a.view(0), b.view(1)};
  const Batch batch = Batch::from_sequences(views);
  EXPECT_THAT(to_list(batch.labels), ElementsAre(6, -100, 9, -100));
  EXPECT_EQ(batch.loss_rows, 2);
}

TEST(Batch, FillsAStaticCapacityWithADummyTail) {
  const OwnedSequence a{{5, 6, 7}, {6, 7, -100}, {1, 1, 0}};
  const std::vector<SequenceView> views = {a.view(0)};
  const Batch batch = Batch::from_sequences(views, {.tokens = 8, .sequences = 4});
  EXPECT_EQ(batch.size(), 8);
  EXPECT_THAT(batch.cu_seqlens_host, ElementsAre(0, 3, 8, 8, 8));
  EXPECT_THAT(to_list(batch.position_ids), ElementsAre(0, 1, 2, 0, 1, 2, 3, 4));
  EXPECT_THAT(to_list(batch.labels), ElementsAre(6, 7, -100, -100, -100, -100, -100, -100));
  EXPECT_EQ(batch.real_tokens, 3);
  EXPECT_EQ(batch.real_sequences, 1);
  EXPECT_EQ(batch.max_seqlen, 5);
  EXPECT_EQ(batch.loss_rows, 2);
  EXPECT_THAT(batch.row_ids, ElementsAre(0));
}

TEST(Batch, SaysWhatDoesNotFitTheCapacity) {
  const OwnedSequence a{{5, 6, 7}, {6, 7, -100}, {1, 1, 0}};
  const std::vector<SequenceView> views = {a.view(0), a.view(1)};
  EXPECT_THAT(data_error([&] { Batch::from_sequences(views, {.tokens = 5}); }),
              HasSubstr("6 tokens do not fit the batch's capacity of 5"));
  EXPECT_THAT(data_error([&] { Batch::from_sequences(views, {.tokens = 8, .sequences = 2}); }),
              HasSubstr("2 sequences and the dummy tail do not fit"));
  const OwnedSequence empty;
  const std::vector<SequenceView> bad = {empty.view(17)};
  EXPECT_THAT(data_error([&] { Batch::from_sequences(bad); }), HasSubstr("row 17 has no token"));
}

TEST(Batch, WithoutSequencesIsOneDummyToken) {
  const Batch batch = Batch::from_sequences({});
  EXPECT_EQ(batch.size(), 1);
  EXPECT_EQ(batch.real_tokens, 0);
  EXPECT_EQ(batch.loss_rows, 0);
  EXPECT_THAT(batch.cu_seqlens_host, ElementsAre(0, 1));
}

TEST(Batch, KeepsTargetsPerSequence) {
  const OwnedSequence a{{5, 6}, {-100, -100}, {0, 0}};
  const std::vector<SequenceView> views = {a.view(0, 2), a.view(1, 0)};
  const Batch batch = Batch::from_sequences(views, {}, true);
  EXPECT_THAT(batch.targets, ElementsAre(2, 0));
  EXPECT_EQ(batch.loss_rows, 2);
  EXPECT_DOUBLE_EQ(batch.loss_weight_sum, 2);
}

class PaddedSides : public ::testing::TestWithParam<bool> {};

TEST_P(PaddedSides, MasksOfEveryRankMeanTheSame) {
  const bool left = GetParam();
  constexpr std::int64_t kRows = 4, kWidth = 7;
  const std::vector<std::int64_t> lengths = {3, 7, 0, 1};
  const at::Tensor tokens = ids(kRows, kWidth);
  at::Tensor flat = at::zeros({kRows, kWidth}, at::kLong);
  for (std::int64_t b = 0; b < kRows; ++b) {
    const std::int64_t begin = left ? kWidth - lengths[b] : 0;
    flat[b].slice(0, begin, begin + lengths[b]).fill_(1);
  }
  // As transformers builds it: causal, and no key that is padding.
  const at::Tensor square =
      at::tril(at::ones({kWidth, kWidth}, at::kLong)).unsqueeze(0) * flat.unsqueeze(1);
  const at::Tensor additive = (square == 0).to(at::kFloat) * std::numeric_limits<float>::lowest();
  const at::Tensor infinite =
      at::zeros({kRows, 1, kWidth, kWidth}, at::kDouble)
          .masked_fill((square == 0).unsqueeze(1), -std::numeric_limits<double>::infinity());
  // Fully masked rows attend to everything, as transformers leaves them for fused kernels.
  at::Tensor unmasked =
      square.to(at::kBool).unsqueeze(1).expand({kRows, 3, kWidth, kWidth}).clone();
  const at::Tensor in_real_row = (flat.sum(1) > 0).reshape({kRows, 1, 1});
  unmasked.masked_fill_(((square.sum(-1, true) == 0) & in_real_row).unsqueeze(1), true);

  Batch::PaddedOptions options;
  options.labels = at::full({kRows, kWidth}, 9, at::kLong) * flat + (flat - 1) * 100;
  const Batch expected = Batch::from_padded(tokens, flat, options);
  EXPECT_THAT(expected.cu_seqlens_host, ElementsAre(0, 3, 10, 11));
  EXPECT_THAT(expected.row_ids, ElementsAre(0, 1, 3));
  EXPECT_EQ(expected.loss_rows, 2 + 6 + 0);
  EXPECT_EQ(to_list(expected.tokens)[0], left ? 4 : 0);
  int number = 0;
  for (const at::Tensor& mask :
       {flat.to(at::kBool), flat.to(at::kFloat), square, square.to(at::kBool), additive, infinite,
        square.unsqueeze(1), unmasked, square.to(at::kBFloat16)}) {
    SCOPED_TRACE(number++);
    const Batch batch = Batch::from_padded(tokens, mask, options);
    EXPECT_EQ(to_list(batch.tokens), to_list(expected.tokens));
    EXPECT_EQ(batch.cu_seqlens_host, expected.cu_seqlens_host);
    EXPECT_EQ(to_list(batch.labels), to_list(expected.labels));
    EXPECT_EQ(to_list(batch.position_ids), to_list(expected.position_ids));
    EXPECT_EQ(batch.row_ids, expected.row_ids);
  }
}

INSTANTIATE_TEST_SUITE_P(Batch, PaddedSides, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "left" : "right"; });

TEST(BatchFromPadded, ReadsBlockDiagonalMasksWithGaps) {
  // Row 0: sequences [0, 3) and [3, 5), padding 5; row 1: padding 0, [1, 2), padding 2, [3, 6).
  at::Tensor mask = at::zeros({2, 6, 6}, at::kBool);
  for (const auto& [b, begin, end] : {std::tuple(0, 0, 3), {0, 3, 5}, {1, 1, 2}, {1, 3, 6}}) {
    mask[b]
        .slice(0, begin, end)
        .slice(1, begin, end)
        .copy_(at::tril(at::ones({end - begin, end - begin}, at::kLong)).to(at::kBool));
  }
  Batch::PaddedOptions options;
  options.labels = ids(2, 6);
  const Batch batch = Batch::from_padded(ids(2, 6), mask, options);
  EXPECT_THAT(to_list(batch.tokens), ElementsAre(0, 1, 2, 3, 4, 7, 9, 10, 11));
  EXPECT_THAT(batch.cu_seqlens_host, ElementsAre(0, 3, 5, 6, 9));
  EXPECT_THAT(batch.row_ids, ElementsAre(0, 0, 1, 1));
  EXPECT_THAT(to_list(batch.position_ids), ElementsAre(0, 1, 2, 0, 1, 0, 0, 1, 2));
  EXPECT_THAT(to_list(batch.labels), ElementsAre(1, 2, -100, 4, -100, -100, 10, 11, -100));
}

TEST(BatchFromPadded, RefusesWhatItCannotRepresent) {
  const at::Tensor tokens = ids(1, 4);
  const auto complain = [&](const at::Tensor& mask) {
    return data_error([&] { Batch::from_padded(tokens, mask); });
  };
  at::Tensor hole = at::ones({1, 4}, at::kLong);
  hole[0][1] = 0;
  EXPECT_THAT(complain(hole), HasSubstr("[0, 1] is 0 between real tokens 0 and 3"));
  at::Tensor segments = at::ones({1, 4}, at::kLong);
  segments[0][3] = 2;
  EXPECT_THAT(complain(segments), HasSubstr("entry 3 is 2, expected 0 or 1"));
  EXPECT_THAT(complain(at::ones({1, 3}, at::kLong)), HasSubstr("shape [1, 3], expected [B, S]"));
  EXPECT_THAT(complain(at::ones({1, 1, 1, 4}, at::kLong)), HasSubstr("[B, 1 or heads, S, S]"));
  EXPECT_THAT(complain(at::ones({4}, at::kLong)), HasSubstr("rank 2, 3 or 4"));

  const at::Tensor causal = at::tril(at::ones({1, 4, 4}, at::kLong));
  at::Tensor forward = causal.clone();
  forward[0][1][2] = 1;
  EXPECT_THAT(complain(forward), HasSubstr("[0, 1, 2]: query attends to a later key"));
  at::Tensor window = causal.clone();
  window[0][3][0] = 0;
  EXPECT_THAT(complain(window), HasSubstr("[0, 3, 0]: query does not attend to a key of its "
                                          "sequence"));
  at::Tensor across = at::zeros({1, 4, 4}, at::kLong);
  for (const auto& [q, k] : {std::pair(0, 0), {1, 0}, {1, 1}, {2, 2}, {3, 2}, {3, 3}, {3, 0}}) {
    across[0][q][k] = 1;
  }
  EXPECT_THAT(complain(across), HasSubstr("[0, 3, 0]: query attends to a key of another sequence"));
  at::Tensor heads = causal.unsqueeze(1).expand({1, 2, 4, 4}).clone();
  heads[0][1][3][0] = 0;
  EXPECT_THAT(complain(heads), HasSubstr("[0, 1, 3, 0] differs from head 0"));
  at::Tensor bias = at::zeros({1, 4, 4}, at::kFloat);
  bias[0][0][1] = -0.5;
  EXPECT_THAT(complain(bias), HasSubstr("entry 1 is -0.5, expected 0 or a large negative number"));
  EXPECT_THAT(complain(at::ones({1, 4, 4}, at::kLong)), HasSubstr("attention_mask"));
}

TEST(BatchFromPadded, TakesPositionsAndWeightsAlong) {
  const at::Tensor tokens = ids(2, 3);
  at::Tensor mask = at::ones({2, 3}, at::kLong);
  mask[1][0] = 0;
  Batch::PaddedOptions options;
  options.labels = tokens;
  options.loss_weights = tokens.to(at::kFloat) * 0.5;
  options.position_ids = at::arange(18, at::kLong).reshape({3, 2, 3});
  options.capacity.tokens = 7;
  const Batch batch = Batch::from_padded(tokens, mask, options);
  EXPECT_EQ(batch.position_ids.sizes().vec(), (std::vector<std::int64_t>{3, 7}));
  EXPECT_THAT(to_list(batch.position_ids[1]), ElementsAre(6, 7, 8, 10, 11, 0, 1));
  EXPECT_THAT(to_doubles(batch.loss_weights), ElementsAre(0.5, 1, 0, 2.5, 0, 0, 0));
  EXPECT_DOUBLE_EQ(batch.loss_weight_sum, 4);
  options.position_ids = at::zeros({2, 4}, at::kLong);
  EXPECT_THAT(data_error([&] { Batch::from_padded(tokens, mask, options); }),
              HasSubstr("position_ids has shape [2, 4]"));
}

TEST(BatchUpload, ArrivesWholeAndKeepsTheHostsCopies) {
  const std::vector<std::int32_t> tokens = {5, 6, 7}, labels = {6, 7, -100};
  const std::vector<float> weights = {1, 0.5F, 0};
  const std::vector<SequenceView> views = {{tokens, labels, weights, 0, 0},
                                           {tokens, labels, weights, 1, 0}};
  const Batch host = Batch::from_sequences(views);
  const c10::Device device = heddle::testing::device();
  const Batch there = host.to(device);
  for (const auto tensor : {&Batch::tokens, &Batch::cu_seqlens, &Batch::position_ids,
                            &Batch::labels, &Batch::loss_weights}) {
    EXPECT_EQ((there.*tensor).device(), device);
    EXPECT_TRUE(at::equal((there.*tensor).cpu(), host.*tensor));
  }
  EXPECT_EQ(there.cu_seqlens_host, host.cu_seqlens_host);
  EXPECT_EQ(there.max_seqlen, 3);
  EXPECT_EQ(there.loss_rows, 4);
}

}  // namespace
}  // namespace heddle::data
