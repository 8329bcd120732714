#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "adapters/lora.h"
#include "ckpt/adapter_directory.h"
#include "ckpt/adapter_names.h"
#include "ckpt/companions.h"
#include "ckpt/model_directory.h"
#include "ckpt/model_writer.h"
#include "models/qwen3_5/model.h"

/// Between a Hugging Face directory and the model: which file tensor fills which parameter, and
/// back.
namespace heddle::ckpt {

using models::qwen3_5::Model;

/// How the directory names the text model: "model.language_model." or "model.". Throws ModelError
/// if it holds neither.
std::string text_prefix(const ModelDirectory& directory);

struct ModelLoadReport {
  std::uint64_t bytes_read = 0;
  std::vector<std::string>
      carried;  ///< Not used by the text model; export copies them bit for bit.
  std::vector<std::string> converted;  ///< "name (F32 -> BFloat16)"
  std::vector<std::string>
      initialized;  ///< Not in the directory: a new classification head, new vocabulary rows.
};

/// Fills every parameter of an allocated model. Experts may be stored fused or one by one; a model
/// with more vocabulary rows than the file gets the mean of the read rows for the new ones, which
/// is the centre of the narrow normal distribution (1e-9 of the rows' covariance) from which
/// transformers' resize_token_embeddings draws. Throws ModelError that lists everything missing,
/// extra or of another shape, before anything is written.
ModelLoadReport load_model(const ModelDirectory& directory, Model& model, std::uint64_t seed);

/// Rows of the embedding that an adapter brings along (modules_to_save); 0 if it brings none. The
/// model it is put on needs as many.
std::int64_t vocabulary_rows(const AdapterDirectory& directory);

/// Puts the adapter of a PEFT directory on the model and fills it (and parameters of
/// modules_to_save).
std::unique_ptr<adapters::LoraSet> load_adapter(const AdapterDirectory& directory, Model& model);

/// Writes a model directory that transformers loads: the model's parameters under the names, the
/// expert layout and the dtypes of `source`, adapters merged, every other tensor of the source bit
/// for bit, with the tokenizer and template of `tokenizer` and the other files of the source.
ModelWriterReport export_model(Model& model, const ModelDirectory& source,
                               const TokenizerSource& tokenizer, const Path& output,
                               const ModelWriterOptions& options);

/// Writes a PEFT adapter directory. `saved`: parameters trained whole beside the adapter; a tied
/// embedding is written as lm_head too, because PEFT unties the two.
void export_adapter(Model& model, const adapters::LoraSet& adapters,
                    const std::vector<nn::Parameter*>& saved, const ModelDirectory& source,
                    const std::string& base_model, const TokenizerSource& tokenizer,
                    const Path& output, bool overwrite);

}  // namespace heddle::ckpt
