#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

namespace heddle::data {

/// A label that takes part in no loss.
inline constexpr std::int64_t kIgnoredLabel = -100;

/// One sequence as the tokenised cache holds it; borrowed memory, all three spans equally long.
struct SequenceView {
  std::span<const std::int32_t> tokens;
  std::span<const std::int32_t>
      labels;  ///< shifted: labels[t] is the target of position t; the last is -100
  std::span<const float> weights;  ///< weight of labels[t]; 0 where the label is -100
  std::int64_t row = 0;            ///< number of the row in its data set
  double target = 0;               ///< class index or regression target; 0 without one
  /// Lengths of the texts that the row lays end to end, each a sequence of its own; empty: one.
  std::span<const std::int64_t> text_lengths = {};
};

/// Static sizes, so that a step can be captured in a graph. 0: as large as the content.
struct BatchCapacity {
  std::int64_t tokens = 0;  ///< T; the tail beyond the content is one dummy sequence
  std::int64_t sequences =
      0;  ///< S, the dummy sequence included; entries beyond it are empty sequences
};

/// The one batch form below the boundary: sequences laid end to end, never a mask. The host copies
/// exist because kernels and heads need these numbers without a device synchronisation. A new
/// column by token or by sequence also gets a line in visit_token_columns() or
/// visit_sequence_columns(), through which batches are cut, lengthened and uploaded.
struct Batch {
  at::Tensor tokens;        ///< [T] int64
  at::Tensor cu_seqlens;    ///< [S+1] int32, begins with 0 and ends with T
  at::Tensor position_ids;  ///< [T] or [3, T] int64; restarts at 0 in every sequence unless given
  at::Tensor
      labels;  ///< [T] int64, already shifted; -100 = no loss; never crosses a sequence's end
  at::Tensor loss_weights;  ///< [T] float32; 0 where the label is -100

  /// [T] int64: a number of each token that depends on its row, text and place in the sequence
  /// alone, and so is the same in every layout; undefined before number_tokens().
  at::Tensor token_numbers;

  /// [layers with experts * k, T] int16: the experts that each token goes to, layer by layer
  /// (router replay); undefined: those that the routers choose.
  at::Tensor experts;

  std::vector<std::int32_t> cu_seqlens_host;
  std::int64_t max_seqlen = 0;   ///< longest sequence, the dummy tail included
  std::int64_t loss_rows = 0;    ///< positions with a label and a weight other than 0
  double loss_weight_sum = 0;    ///< over all positions
  std::int64_t real_tokens = 0;  ///< T without the dummy tail
  std::int64_t real_sequences =
      0;  ///< S without the dummy tail and empty sequences; the first ones
  std::vector<std::int64_t> last_tokens;  ///< [real_sequences] where each one's last token is
  std::vector<std::int64_t> row_ids;      ///< [real_sequences] the input row of each sequence
  std::vector<double>
      targets;  ///< [real_sequences] for classification and regression, otherwise empty
  std::vector<std::int64_t> text_of_row;  ///< [real_sequences] which text of its row a sequence
                                          ///< is, from 0; empty if every row is one text

  /// Calls visit(member, value of a dummy token) for each column by token, whose last dimension is
  /// T. position_ids, which count on in a dummy tail, have no such value: std::nullopt.
  template <class Visit>
  static void visit_token_columns(Visit&& visit) {
    visit(&Batch::tokens, std::optional<double>(0));
    visit(&Batch::position_ids, std::optional<double>());
    visit(&Batch::labels, std::optional<double>(kIgnoredLabel));
    visit(&Batch::loss_weights, std::optional<double>(0));
    visit(&Batch::token_numbers, std::optional<double>(0));
    visit(&Batch::experts, std::optional<double>(0));
  }
  /// Calls visit(member) for each column by sequence, a vector of [real_sequences] or empty; but
  /// for last_tokens, which are places in the batch.
  template <class Visit>
  static void visit_sequence_columns(Visit&& visit) {
    visit(&Batch::row_ids);
    visit(&Batch::targets);
    visit(&Batch::text_of_row);
  }

  /// Lays the sequences end to end; those of a row with several texts follow each other under its
  /// row id. `with_targets` fills `targets`, and then loss_rows and loss_weight_sum count
  /// sequences. Throws DataError when they exceed the capacity, when one is empty, or when its
  /// spans differ in length. No sequence at all gives one dummy token (a rank without rows).
  static Batch from_sequences(std::span<const SequenceView> sequences, BatchCapacity capacity = {},
                              bool with_targets = false);

  struct PaddedOptions {
    std::optional<at::Tensor>
        labels;  ///< [B, S], aligned as in Hugging Face: labels[t] is token t or -100
    std::optional<at::Tensor>
        loss_weights;  ///< [B, S], aligned with `labels`; default 1 where there is a label
    std::optional<at::Tensor> position_ids;  ///< [B, S] or [3, B, S]
    BatchCapacity capacity = {};
  };

  /// From the padded form. tokens [B, S]; attention_mask of rank 2 [B, S] (1 = real token, padding
  /// left or right), rank 3 [B, S, S] or rank 4 [B, 1|heads, S, S] ("query attends key": bool or
  /// 0/1, or additive floats of 0 and large negative values), which must be causal with key padding
  /// or block-diagonal causal; rank 3 and 4 may hold several sequences in a row. Throws DataError
  /// that names the entries that do not fit. A row without a real token gives no sequence;
  /// `row_ids` names the padded row of each sequence.
  static Batch from_padded(const at::Tensor& tokens, const at::Tensor& attention_mask,
                           const PaddedOptions& options);
  static Batch from_padded(const at::Tensor& tokens, const at::Tensor& attention_mask);

  /// Fills token_numbers; of a batch whose sequences are whole.
  void number_tokens();

  /// This batch with its tensors on `device`; the host copies stay.
  Batch to(const c10::Device& device) const;

  std::int64_t size() const { return tokens.defined() ? tokens.numel() : 0; }
  std::int64_t sequences() const {
    return cu_seqlens_host.empty() ? 0 : static_cast<std::int64_t>(cu_seqlens_host.size()) - 1;
  }
};

}  // namespace heddle::data
