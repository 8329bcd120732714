#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "ckpt/companions.h"
#include "ckpt/model_directory.h"
#include "ckpt/tensor_io.h"

namespace heddle::ckpt {

struct ModelWriterOptions {
  std::uint64_t max_shard_bytes =
      5'000'000'000;       // transformers' own default; larger tensors get a shard of their own
  bool overwrite = false;  // replace a model directory that stands at the final name
  Files files = {};        // further ones, before those that are copied
  // Names of a classifier's classes; empty: those of the source, else LABEL_0 and so on.
  std::vector<std::string> label_names = {};
};

struct ModelWriterReport {
  std::vector<Path> weight_files;
  std::vector<std::string> copied_files;
  std::uint64_t bytes = 0;
  std::size_t tensors = 0;
};

/// Collects what a Hugging Face model directory shall hold and writes it at commit(), one tensor in
/// memory at a time.
class ModelWriter {
 public:
  using Producer = std::function<at::Tensor()>;

  /// Throws ConfigError if something stands at `directory` that must not be replaced.
  explicit ModelWriter(Path directory, ModelWriterOptions options = {});

  /// A tensor to store as `dtype`; its values are read at commit().
  void add(const std::string& name, const at::Tensor& tensor, at::ScalarType dtype);
  /// In the tensor's own type.
  void add(const NamedTensor& tensor);
  /// A tensor that `produce` makes when its turn comes. The turns inside a shard follow the file's
  /// layout, not the order of the calls. commit() throws InternalError if what it makes has another
  /// shape.
  void add(const std::string& name, std::vector<std::int64_t> shape, at::ScalarType dtype,
           Producer produce);
  /// A tensor of another checkpoint, bit for bit, under its own name.
  void carry(const StoredTensor& tensor);
  /// Every tensor of `source` that matches one of the shell-like patterns and has not been added;
  /// returns their names.
  std::vector<std::string> carry_matching(const ModelDirectory& source,
                                          const std::vector<std::string>& patterns);

  /// config.json. Required.
  void set_config(nlohmann::ordered_json config);
  /// Tokenizer, template, processor and generation files, licence and README that stand in `source`
  /// are copied as they are. May be called with several folders: the first that has a file gives
  /// it.
  void copy_companions_from(const Path& source);
  /// Takes those of `files` that no earlier call gave.
  void copy_companions(const std::vector<Companion>& files);
  /// Takes the tokenizer from there alone; copy_companions_from() then gives the other files.
  void set_tokenizer(const TokenizerSource& source);
  /// A further file with this content; takes precedence over a copied one.
  void add_file(const std::string& name, std::string content);

  bool has(const std::string& name) const;

  /// Writes into "<directory>.tmp", opens that as a check that every tensor is there, and renames
  /// it. Throws FileError (disk full, no permission) and UserError (a source was changed since it
  /// was opened or found), and then nothing new stands at the final name.
  ModelWriterReport commit();

 private:
  struct Item : TensorSpec {
    Producer produce;     // or, when empty,
    StoredTensor stored;  // carried through
  };
  void add_item(Item item);
  std::vector<std::vector<const Item*>> plan_shards() const;
  void write_shard(const Path& path, const std::vector<const Item*>& items) const;

  Path directory_;
  ModelWriterOptions options_;
  std::vector<Item> items_;
  std::unordered_map<std::string, std::size_t> index_;
  nlohmann::ordered_json config_;
  bool has_tokenizer_ = false;
  std::vector<Companion> copies_;
  std::vector<std::pair<std::string, std::string>> files_;
};

}  // namespace heddle::ckpt
