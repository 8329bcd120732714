#pragma once

#include <string>
#include <utility>
#include <vector>

#include "ckpt/safetensors.h"

namespace heddle::ckpt {

enum class Companions {
  kTokenizer,  // tokenizer and chat template
  kAll,        // these, and generation, processor, licence and README files
};

/// The files beside the weights that a new directory must carry along and that stand in
/// `directory`: (name, path).
std::vector<std::pair<std::string, Path>> find_companions(const Path& directory, Companions which);
/// Copies each (name, path) to `directory`/name. Throws FileError.
void copy_files(const std::vector<std::pair<std::string, Path>>& files, const Path& directory);

}  // namespace heddle::ckpt
