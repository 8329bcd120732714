#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ckpt/safetensors.h"

namespace heddle::ckpt {

enum class Companions {
  kTokenizer,  // tokenizer and chat template
  kOther,      // generation, processor, licence and README files
  kAll,
};

/// (name, content)
using Files = std::vector<std::pair<std::string, std::string>>;

/// Writes more files into a directory before it takes its final name.
using AddFiles = std::function<void(const Path&)>;

/// Where the tokenizer of a new directory comes from: a folder, and files of which it holds another
/// text (name, content).
struct TokenizerSource {
  Path directory;
  Files changed = {};
};

/// The files beside the weights that a new directory must carry along and that stand in
/// `directory`: (name, path).
std::vector<std::pair<std::string, Path>> find_companions(const Path& directory, Companions which);
/// Copies each (name, path) to `directory`/name. Throws FileError.
void copy_files(const std::vector<std::pair<std::string, Path>>& files, const Path& directory);
/// Writes tokenizer and chat template into `directory`. Throws FileError.
void copy_tokenizer(const TokenizerSource& source, const Path& directory);

}  // namespace heddle::ckpt
