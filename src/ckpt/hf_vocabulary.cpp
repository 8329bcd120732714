#include "ckpt/hf_vocabulary.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <cstring>

#include "base/log.h"
#include "ckpt/hf_model.h"
#include "ckpt/tensor_io.h"
#include "models/registry.h"

namespace heddle::ckpt {
namespace {

constexpr const char* kHead = "lm_head.weight";
constexpr std::string_view kEmbedding = "embed_tokens.weight";

models::Config parsed(const ModelDirectory& directory) {
  return models::parse_config(directory.config(), (directory.path() / "config.json").string());
}

bool is_same(const StoredTensor& a, const StoredTensor& b) {
  if (a.shape != b.shape) return false;
  if (a.dtype != b.dtype)
    return at::equal(read_tensor(a, at::kDouble), read_tensor(b, at::kDouble));
  const bool same = std::memcmp(a.data.data(), b.data.data(), a.data.size()) == 0;
  a.drop(0, a.data.size());
  b.drop(0, b.data.size());
  return same;
}

}  // namespace

models::Config read_model_config(const ModelDirectory& directory) {
  models::Config config = parsed(directory);
  if (!config.tie_word_embeddings) return config;
  const StoredTensor* const head = directory.find(kHead);
  const StoredTensor* const embedding =
      directory.find(text_prefix(directory, config) + std::string(kEmbedding));
  if (head == nullptr || embedding == nullptr || is_same(*head, *embedding)) return config;
  log::warning(
      "{}: config.json ties the head to the embedding, but {} and {} differ: both are used as they "
      "are; set tie_word_embeddings to false",
      directory.path().string(), kHead, embedding->name);
  config.tie_word_embeddings = false;
  return config;
}

bool is_embedding(const std::string& parameter) { return parameter.ends_with(kEmbedding); }
bool is_head(const std::string& parameter) { return parameter == kHead; }

const StoredTensor* stored_table(const ModelDirectory& directory, const std::string& parameter) {
  if (!is_embedding(parameter) && !is_head(parameter)) return nullptr;
  const StoredTensor* const own = directory.find(parameter);
  if (own != nullptr) return own;
  const models::Config config = parsed(directory);
  if (!config.tie_word_embeddings) return nullptr;
  return directory.find(
      is_head(parameter) ? text_prefix(directory, config) + std::string(kEmbedding) : kHead);
}

const StoredTensor* smaller_table(const nn::Parameter& parameter, const ModelDirectory& directory) {
  const StoredTensor* const stored = stored_table(directory, parameter.name());
  if (stored == nullptr || stored->shape.size() != 2) return nullptr;
  const std::int64_t rows = stored->shape[0];
  const bool is_smaller = rows < parameter.global_shape()[0];
  return is_smaller && rows == parsed(directory).vocab_size ? stored : nullptr;
}

void fill_new_rows(const std::vector<nn::Box>& table, const StoredTensor& stored) {
  if (table.empty()) return;
  const std::int64_t read_rows = stored.shape[0];
  const auto dtype = table.front().tensor.scalar_type();
  const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor mean = read_tensor(stored, dtype).to(wide).mean(0);
  for (const nn::Box& box : table) {
    const std::int64_t first = std::max<std::int64_t>(0, read_rows - box.global.offset[0]);
    if (first >= box.tensor.size(0)) continue;
    box.tensor.narrow(0, first, box.tensor.size(0) - first)
        .copy_(mean.narrow(0, box.global.offset[1], box.tensor.size(1)));
  }
}

}  // namespace heddle::ckpt
