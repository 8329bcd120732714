#pragma once

#include <string>

#include "base/files.h"
#include "hub/repository.h"

/// Where the hubs' own Python tools keep what they download.
namespace heddle::hub {

using files::Path;

/// The folder of a repository: ".../models--owner--name" of the Hugging Face cache, and
/// ModelScope's
/// ".../models/owner/name" ('.' in names is "___" there).
Path cache_folder(const Repository& repository);

/// The folder with the files of the repository's revision, if the cache has one; else "". A branch
/// is what refs/ says it was when it was downloaded last; the only snapshot of a folder without
/// refs/, as a copied one, stands for any.
Path cached_snapshot(const Repository& repository);

/// The snapshot of a folder "models--owner--name" that its branch "main" names, or the only one.
/// Throws ModelError.
Path snapshot_of(const Path& folder);

/// True where a folder has config.json, all weights and a tokenizer, or a whole adapter.
bool is_whole_model(const Path& folder);

/// The name on the Hub of a snapshot in a Hugging Face cache, "org/model"; the absolute path of any
/// other folder.
std::string model_name(const Path& folder);

}  // namespace heddle::hub
