#pragma once

#include <string>

#include "ckpt/safetensors.h"

namespace heddle::ckpt {

/// The folder that a user means by `name`: the folder of that name; "~/x" below the home folder; a
/// folder "models--org--model" of a Hugging Face cache: its snapshot; "org/model" where there is no
/// such folder: its snapshot in the cache (HF_HUB_CACHE, else HF_HOME/hub, else
/// ~/.cache/huggingface/hub). Downloads nothing; returns `name` if there is nothing of that kind.
/// Throws ModelError for a cache folder of which no snapshot is there.
Path find_model(const std::string& name);

/// A suggestion for a name that find_model() did not find, as "; ...", or "".
std::string advice_on_model_name(const std::string& name);

/// The name on the Hub of a snapshot in a cache, "org/model"; the absolute path of any other
/// folder.
std::string model_name(const Path& folder);

}  // namespace heddle::ckpt
