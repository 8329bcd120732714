#pragma once

#include <functional>
#include <string>
#include <vector>

#include "adapters/lora.h"
#include "ckpt/adapter_directory.h"
#include "ckpt/companions.h"
#include "ckpt/model_directory.h"
#include "ckpt/model_writer.h"
#include "models/model.h"

/// Between a Hugging Face directory and the model: which file tensor fills which parameter, and
/// back.
namespace heddle::ckpt {

using models::Model;

/// The one of the model's prefixes that the directory names it with ("model."). Throws ModelError
/// if there is none.
std::string text_prefix(const ModelDirectory& directory, const models::Config& model);

struct ModelLoadReport {
  std::uint64_t bytes_read = 0;
  std::vector<std::string>
      carried;  ///< Not used by the text model; export copies them bit for bit.
  std::vector<std::string> converted;  ///< "name (F32 -> BFloat16)"
  std::vector<std::string>
      initialized;  ///< Not in the directory: a new classification head, new vocabulary rows.
};

/// Fills every parameter of an allocated model. Experts may be stored fused or one by one; a model
/// with more vocabulary rows than the file gets the mean of the read rows for the new ones. Throws
/// ModelError that lists everything missing, extra or of another shape, before anything is written.
ModelLoadReport load_model(const ModelDirectory& directory, Model& model, std::uint64_t seed);

/// Gives the whole tensor of a parameter, wherever its parts are.
using ReadWhole = std::function<at::Tensor(const nn::Parameter&)>;
/// Reads a parameter that this rank holds whole.
at::Tensor read_from_memory(const nn::Parameter& parameter);
/// As load_model would read it, on the CPU.
at::Tensor read_from_directory(const ModelDirectory& directory, const nn::Parameter& parameter);

/// Writes a model directory that transformers loads: the model's parameters under the names, the
/// expert layout and the dtypes of `source`, `adapters` (may be null) merged, every other tensor of
/// the source bit for bit but for the vision modules that `adapter` changes (null: none), with the
/// tokenizer and template of `tokenizer` and the other files of the source.
ModelWriterReport export_model(Model& model, const adapters::LoraSet* adapters,
                               const ModelDirectory& source, const TokenizerSource& tokenizer,
                               const Path& output, const ModelWriterOptions& options,
                               const ReadWhole& read = read_from_memory,
                               const AdapterDirectory* adapter = nullptr);

}  // namespace heddle::ckpt
