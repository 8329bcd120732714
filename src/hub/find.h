#pragma once

#include <functional>
#include <string>
#include <vector>

#include "hub/download.h"

/// Models and data by the names that users write.
namespace heddle::hub {

/// Parts of a model that must be there: tokenizer and config.json without weights, or config.json
/// alone.
enum class Need { kAll, kTokenizer, kShape };

/// The folder that a user means by `name`: the folder of that name; "~/x" below the home folder; a
/// folder "models--org--model" of a Hugging Face cache: its snapshot; "org/model", "hf://..." and
/// "ms://...": the snapshot in the cache, downloaded into it where it is not whole. Returns `name`
/// if it is nothing of that kind. Throws ModelError that says what to do where the hub does not
/// give it, and as download().
files::Path find_model(const std::string& name, const ProgressCallback& progress = {},
                       Need need = Need::kAll);

/// Rows of a data set, by the names of its files.
enum class Part { kTrain, kEvaluation };

/// The files that a user means by "owner/name", "hf://datasets/owner/name/path" or ms://: of the
/// data set on the hub those that `is_data` takes for data, below `path` or matching it, and of
/// `part` where the name gives no path; downloaded where the cache lacks them. Only `name` where it
/// is a path. Throws DataError that says what to do, and as download().
std::vector<std::string> find_data(const std::string& name, Part part,
                                   const std::function<bool(const std::string&)>& is_data,
                                   const ProgressCallback& progress = {});

/// A suggestion for a name that is no folder, as "; ...", or "".
std::string advice_on_model_name(const std::string& name);

}  // namespace heddle::hub
