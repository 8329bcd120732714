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
  kAdapter,  // all, and what tells how an adapter's outputs are read: names of classes, pooling
};

/// (name, content)
using Files = std::vector<std::pair<std::string, std::string>>;

/// Writes more files into a directory before it takes its final name.
using AddFiles = std::function<void(const Path&)>;

/// A file beside the weights that a new directory carries along.
struct Companion {
  std::string name;  ///< in the new directory
  Path path;
  std::string content;  ///< hash of what it held when it was found; "" if it could not be read
};

/// The files beside the weights that a new directory must carry along and that stand in
/// `directory`, with what they hold now.
std::vector<Companion> find_companions(const Path& directory, Companions which);
/// Copies each file to `directory`/name. Throws FileError, and UserError that names the file if it
/// no longer holds what it held when it was found.
void copy_files(const std::vector<Companion>& files, const Path& directory);

/// Writes each file to `directory`/name, in a folder of its own where the name has one.
void write_files(const Files& files, const Path& directory);

/// Where the tokenizer of a new directory comes from: a folder, its files as they are before the
/// tokenizer is loaded, and files of which the new directory holds another text (name, content).
struct TokenizerSource {
  TokenizerSource() = default;
  explicit TokenizerSource(Path from)
      : directory(std::move(from)), files(find_companions(directory, Companions::kTokenizer)) {}

  Path directory;
  std::vector<Companion> files;
  Files changed;
};

/// Writes tokenizer and chat template into `directory`. Throws as copy_files().
void copy_tokenizer(const TokenizerSource& source, const Path& directory);

}  // namespace heddle::ckpt
