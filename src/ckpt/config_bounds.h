#pragma once

#include "ckpt/model_directory.h"
#include "models/config.h"

namespace heddle::ckpt {

/// Throws ModelError that names the keys of config.json whose product asks for more weights than
/// the files of the directory could hold, so that no memory is taken for a model that cannot be
/// filled. Up to twice of what they hold passes: which tensor is missing or has another shape is
/// said better when they are read.
void require_size_of_files(const models::Config& config, const ModelDirectory& directory);

}  // namespace heddle::ckpt
