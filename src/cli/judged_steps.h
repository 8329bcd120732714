#pragma once

#include "config/run_config.h"
#include "train/step_source.h"

namespace heddle::cli {

/// Rows of data.train and data.eval, whose evaluations also judge the model's answers to the rows
/// of eval.input. For a configuration that names such rows.
train::Subject judged_subject(const config::RunConfig& config, train::Setup& setup);

}  // namespace heddle::cli
