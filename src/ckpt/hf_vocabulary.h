#pragma once

#include <string>
#include <vector>

#include "ckpt/model_directory.h"
#include "models/model.h"

/// The two tables of the vocabulary, embedding and language-model head, which files and
/// configurations tie to each other, repeat, or leave smaller than the model needs.
namespace heddle::ckpt {

/// config.json of the directory. Where it ties the head to the embedding and the files hold two
/// different tables, the configuration that is returned does not tie them, as transformers reads
/// it, with a warning.
models::Config read_model_config(const ModelDirectory& directory);

bool is_embedding(const std::string& parameter);
bool is_head(const std::string& parameter);

/// The file's table for embedding or head: under its own name, or the other one if config.json ties
/// the two. Null for any other parameter, and if there is none.
const StoredTensor* stored_table(const ModelDirectory& directory, const std::string& parameter);

/// stored_table() if the model has more rows than it because tokens were added: the file's rows are
/// those of its own config.json. Else null.
const StoredTensor* smaller_table(const nn::Parameter& parameter, const ModelDirectory& directory);

/// Rows beyond those of the file: the mean of the file's rows, so that a new token starts neither
/// loud nor confident (the centre of the narrow normal distribution, 1e-9 of the rows' covariance,
/// from which transformers' resize_token_embeddings draws).
void fill_new_rows(const std::vector<nn::Box>& table, const StoredTensor& stored);

}  // namespace heddle::ckpt
