#pragma once

#include "config/config.h"
#include "config/run_config.h"

namespace heddle::train {

/// Gives a classifier's run the names of its classes: those of data.labels; else of the
/// adapter in adapter.path or the model's config.json, where the model is a classifier of as many
/// and knows the rows' labels; else the labels of data.train, sorted, if they are texts and no
/// digits. Fills data.labels and model.num_labels, and says which names it took. Does nothing for
/// other heads and for regression. Throws ConfigError where the number of classes stays unknown,
/// which for kPartial it may, DataError for more than kMostClasses labels, for an empty one and for
/// numbers among texts, ModelError for two equal names of the model. kPartial leaves bad rows to
/// the reader.
void find_class_labels(config::RunConfig& config,
                       config::Completeness completeness = config::Completeness::kComplete);

/// Texts with more different labels are no classes: a wrong field, most likely.
inline constexpr int kMostClasses = 1000;

}  // namespace heddle::train
