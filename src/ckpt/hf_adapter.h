#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "adapters/lora.h"
#include "ckpt/adapter_directory.h"
#include "ckpt/companions.h"
#include "ckpt/hf_model.h"
#include "ckpt/model_directory.h"
#include "models/model.h"

/// Between a PEFT adapter directory and the adapters of the model.
namespace heddle::ckpt {

/// Where adapters can sit on a model.
adapters::Adaptable adaptable(Model& model);

/// Rows of the embedding that an adapter brings along (modules_to_save); 0 if it brings none. The
/// model it is put on needs as many.
std::int64_t vocabulary_rows(const AdapterDirectory& directory);

/// Outputs of the classification head that an adapter brings along; 0 if it brings none.
std::int64_t label_rows(const AdapterDirectory& directory);

/// Whether the model that PEFT makes of a model with a tied head has a head of its own: the adapter
/// changes one of embedding and head, or both in different ways. The model that it is put on must
/// then be made untied. Throws ModelError where ensure_weight_tying contradicts the tables.
bool unties_head(const AdapterDirectory& directory);

/// Puts the adapter of a PEFT directory on the model and fills what this rank owns of it (and of
/// parameters of modules_to_save); an adapter on embedding or language-model head is added to the
/// table itself, unless `keeps_head` says that the head's stays one. Says what of the adapter does
/// not act on text, and if it names another base model than `base`. `divide`, unless empty, gives
/// the adapter its storage among several ranks before it is filled. `expert_factors`: those that
/// the experts get, by default one that they share once where the files say so or have the same
/// bits for each of them; throws ModelError where they are to share what differs in the files.
std::unique_ptr<adapters::LoraSet> load_adapter(
    const AdapterDirectory& directory, Model& model, const std::string& base,
    const std::function<void(adapters::LoraSet&)>& divide = {}, bool keeps_head = false,
    std::optional<nn::ExpertFactors> expert_factors = {});

/// Fills adapters of the model with the factors of a PEFT directory, as far as this rank owns them,
/// and parameters with those of modules_to_save. Adapters of which the directory has no factors
/// stay as they are, and are named. Throws ModelError for factors on modules without an adapter and
/// for other shapes.
void fill_adapter(const AdapterDirectory& directory, Model& model, const std::string& base,
                  adapters::LoraSet& set);

/// Writes an adapter directory. `saved`: parameters trained whole beside the adapter; a tied
/// embedding is written as lm_head too, because PEFT unties the two, and so is what else PEFT's
/// rule of endings makes of their modules. The compact form is for Heddle's own use, and PEFT's
/// all the same where no experts share a factor.
void export_adapter(Model& model, const adapters::LoraSet& adapters,
                    const std::vector<nn::Parameter*>& saved, const ModelDirectory& source,
                    const std::string& base_model, const TokenizerSource& tokenizer,
                    const Path& output, bool overwrite, const ReadWhole& read = read_from_memory,
                    const Files& files = {}, const AddFiles& add_files = {},
                    AdapterForm form = AdapterForm::kPeft);

}  // namespace heddle::ckpt
