#include "train/scorer.h"

#include <cmath>
#include <limits>

#include "base/errors.h"
#include "data/batch.h"
#include "ops/autograd.h"
#include "train/head.h"
#include "train/micro_batch.h"

namespace heddle::train {

std::vector<RowScore> score_rows(Model& model, std::span<const std::vector<std::int32_t>> rows,
                                 bool normalize_embedding) {
  const ops::NoGradient guard;
  std::vector<std::vector<std::int32_t>> labels(rows.size());
  std::vector<std::vector<float>> weights(rows.size());
  std::vector<data::SequenceView> views;
  const std::int64_t vocabulary = model.config().vocab_size;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    if (rows[r].empty()) throw DataError("a row without tokens cannot be scored");
    for (const std::int32_t id : rows[r]) {
      if (id < 0 || id >= vocabulary) {
        throw_error<DataError>("token id {} is outside the model's vocabulary of {}", id,
                               vocabulary);
      }
    }
    labels[r].assign(rows[r].begin() + 1, rows[r].end());
    labels[r].push_back(static_cast<std::int32_t>(data::kIgnoredLabel));
    weights[r].assign(rows[r].size(), 1.0F);
    weights[r].back() = 0;
    views.push_back({rows[r], labels[r], weights[r], static_cast<std::int64_t>(r), 0});
  }
  const LocalBatch local(model, data::Batch::from_sequences(views));
  const data::Batch& batch = local.device;
  std::vector<parallel::BlockEntry> blocks;
  for (const auto& layer : model.layers()) blocks.push_back({layer.get(), {}});
  const at::Tensor hidden =
      parallel::BlockRunner(std::move(blocks))
          .evaluate(model.embed(batch.tokens), local.inputs(model, /*training=*/false));
  const ScoreResult scored = score_head(model, hidden, batch, normalize_embedding);

  std::vector<RowScore> result(rows.size());
  if (scored.logprobs.defined()) {
    const at::Tensor host = scored.logprobs.cpu().to(at::kDouble);
    const double* logprobs = host.const_data_ptr<double>();
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const std::int32_t begin = batch.cu_seqlens_host[r], end = batch.cu_seqlens_host[r + 1];
      result[r].logprobs.push_back(std::numeric_limits<double>::quiet_NaN());
      result[r].logprobs.insert(result[r].logprobs.end(), logprobs + begin, logprobs + end - 1);
    }
  } else {
    const at::Tensor host = scored.outputs.cpu().to(at::kDouble).contiguous();
    const double* outputs = host.const_data_ptr<double>();
    const std::int64_t width = host.size(1);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      result[r].outputs.assign(outputs + r * width, outputs + (r + 1) * width);
    }
  }
  return result;
}

}  // namespace heddle::train
