#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "objective/score_head.h"
#include "objective/support_table.h"

namespace heddle::train {

using objective::LocalBatch;
using objective::ScoreRequest;
using objective::ScoreResult;

/// Scores of one row.
struct RowScore {
  std::vector<double> logprobs;   ///< Language model: [n], entry i is log p(token i | tokens before
                                  ///< i); entry 0 is NaN.
  std::vector<double> entropies;  ///< Entropy of p(. | tokens before i), in nats;
                                  ///< empty unless asked for.
  std::vector<double> outputs;    ///< Classification: logits; embedding: the vector.
};

/// Scores rows with a model, batch by batch.
class Scorer {
 public:
  /// Made by all ranks of the model, which it does not own. Without adapters: of the base model.
  explicit Scorer(const assembly::ModelOnRanks& model, bool with_adapters = true)
      : placed_(model), with_adapters_(with_adapters) {}

  /// Scores rows of tokens, in order, in one packed pass on each data rank. All ranks of the model
  /// call it with the same rows and get all scores. Throws DataError for an empty row or an id
  /// outside the vocabulary. `experts`: gets those of the rows of this data rank, as first_row()
  /// divides them, see Pipeline::evaluate. `given`: by row the experts [tokens, choices] int16 that
  /// its tokens take, as the columns of data::Batch::experts; empty: the routers choose.
  /// `supports`: by row those of its labels, the token after each; a log-probability then is that
  /// within the support, and 0 where there is none. Empty: all are over all tokens.
  std::vector<RowScore> score(std::span<const std::vector<std::int32_t>> rows,
                              const ScoreRequest& request,
                              std::vector<at::Tensor>* experts = nullptr,
                              std::span<const at::Tensor> given = {},
                              std::span<const objective::Supports> supports = {});
  /// After score(): the place of each token of this rank's share (of tp and cp) among those of its
  /// data rank's rows; beyond their end for padding.
  const std::vector<std::int64_t>& places() const { return places_; }
  /// The first of `count` rows that data rank `rank` scores; of the next one, where its end is.
  std::size_t first_row(std::size_t count, std::int64_t rank) const;

 private:
  /// Numbers of this rank's tokens and rows; none where the last stage is elsewhere.
  ScoreResult score_locally(const LocalBatch& local, const ScoreRequest& request,
                            const objective::Supports& supports, std::vector<at::Tensor>* experts);

  const assembly::ModelOnRanks& placed_;
  bool with_adapters_;
  std::vector<std::int64_t> places_;
};

}  // namespace heddle::train
