#include "train/idle_ranks.h"

#include <fmt/format.h>

#include <cmath>

#include "config/objective.h"

namespace heddle::train {

StepRows rows_of_step(const config::RunConfig& config) {
  if (config::objective_of(config) != config::Objective::kPolicy)
    return {.global_batch_size = config.train.global_batch_size};
  return {.global_batch_size = config.rl.groups_per_step * config.rl.samples_per_group,
          .keys = "rl.groups_per_step x rl.samples_per_group"};
}

std::vector<std::string> idle_ranks(const comm::Mesh& mesh, const StepRows& rows) {
  std::vector<std::string> sentences;
  const bool is_small_data = rows.of_data > 0 && rows.of_data < rows.global_batch_size;
  const std::int64_t divided = is_small_data ? rows.of_data : rows.global_batch_size;
  const std::int64_t data = mesh.data_size();
  if (divided < data) {
    const std::int64_t idle = (data - divided) * (mesh.world_size() / data);
    sentences.push_back(fmt::format("{} over dp x fsdp {}: {} rank{} no row in a step",
                                    is_small_data ? fmt::format("the data's {} row{} an epoch",
                                                                divided, divided == 1 ? "" : "s")
                                                  : fmt::format("{} {}", rows.keys, divided),
                                    data, idle, idle == 1 ? " has" : "s have"));
  }
  const double micro_batches = std::ceil(rows.micro_batches);
  const std::int64_t stages = mesh.size(comm::Dim::kPp);
  if (micro_batches > 0 && micro_batches < static_cast<double>(stages)) {
    sentences.push_back(
        fmt::format("{:.0f} micro-batch{} a step over pp {}: of the stages at most as many work at "
                    "a time; a larger {} or smaller train.micro_batch_tokens gives more",
                    micro_batches, micro_batches == 1 ? "" : "es", stages, rows.keys));
  }
  return sentences;
}

}  // namespace heddle::train
