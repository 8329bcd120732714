#pragma once

#include "base/files.h"

namespace heddle::files {

/// HF_HOME, else ~/.cache/huggingface (XDG_CACHE_HOME for ~/.cache).
Path hugging_face_home();

/// Where huggingface_hub keeps what it downloads: HF_HUB_CACHE, else `hub` of its home.
Path hugging_face_cache();

}  // namespace heddle::files
