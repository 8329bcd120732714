#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/mesh.h"
#include "config/run_config.h"

namespace heddle::train {

/// Rows that a step has to divide.
struct StepRows {
  std::int64_t global_batch_size = 0;  ///< Value of `keys`.
  std::int64_t of_data = 0;            ///< Rows of an epoch; 0: not known.
  double micro_batches = 0;            ///< Micro-batches of a data rank; 0: not known.
  const char* keys = "train.global_batch_size";
};
/// The first and the last of it: rows of data.train, or completions with train.objective policy.
StepRows rows_of_step(const config::RunConfig& config);

/// A sentence for each dimension of the mesh along which ranks have nothing to do in a usual step:
/// data ranks without a row, and pipeline stages with fewer micro-batches than stages. Empty if all
/// have work.
std::vector<std::string> idle_ranks(const comm::Mesh& mesh, const StepRows& rows);

}  // namespace heddle::train
