#pragma once

#include "ckpt/adapter_directory.h"
#include "ckpt/model_directory.h"
#include "ckpt/model_writer.h"

namespace heddle::ckpt {

/// Adds to `writer` the vision tensors of `source` that the adapter changes, changed. The model has
/// no vision tower: its tensors go from file to file. Throws ModelError for a module that `source`
/// does not hold or holds in another shape.
void add_vision_changes(ModelWriter& writer, const ModelDirectory& source,
                        const AdapterDirectory& adapter);

}  // namespace heddle::ckpt
