#include "ckpt/model_writer.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"
#include "base/text.h"
#include "ckpt/checked_tensor.h"
#include "ckpt/staging_directory.h"

namespace heddle::ckpt {
namespace {

constexpr std::size_t kPieceBytes = 8 << 20;

/// Bit for bit, without keeping the source's pages resident.
void append_stored(SafetensorsWriter& writer, const StoredTensor& stored) {
  for (std::size_t begin = 0; begin < stored.data.size(); begin += kPieceBytes) {
    const std::size_t count = std::min(kPieceBytes, stored.data.size() - begin);
    writer.append(stored.name, stored.data.subspan(begin, count));
    stored.drop(begin, count);
  }
}

}  // namespace

ModelWriter::ModelWriter(Path directory, ModelWriterOptions options)
    : directory_(output_place(std::move(directory))), options_(std::move(options)) {
  files_ = options_.files;
  check_output_directory(directory_, options_.overwrite, "config.json");
}

bool ModelWriter::has(const std::string& name) const { return index_.contains(name); }

void ModelWriter::add_item(Item item) {
  if (!index_.emplace(item.name, items_.size()).second) {
    throw_error<InternalError>("{}: tensor '{}' was added twice", directory_.string(), item.name);
  }
  items_.push_back(std::move(item));
}

void ModelWriter::add(const std::string& name, const at::Tensor& tensor, at::ScalarType dtype) {
  Item item{spec_of(name, tensor, dtype), [tensor] { return tensor; }, {}};
  add_item(std::move(item));
}

void ModelWriter::add(const NamedTensor& tensor) {
  add(tensor.name, tensor.tensor, tensor.tensor.scalar_type());
}

void ModelWriter::add(const std::string& name, std::vector<std::int64_t> shape,
                      at::ScalarType dtype, Producer produce) {
  const auto stored = from_scalar_type(dtype);
  if (!stored) {
    throw_error<InternalError>("tensor '{}' of type {} has no type in safetensors", name,
                               at::toString(dtype));
  }
  add_item({TensorSpec{name, *stored, std::move(shape)}, std::move(produce), {}});
}

void ModelWriter::carry(const StoredTensor& tensor) { add_item({tensor, nullptr, tensor}); }

std::vector<std::string> ModelWriter::carry_matching(const ModelDirectory& source,
                                                     const std::vector<std::string>& patterns) {
  std::vector<std::string> carried;
  for (const StoredTensor& tensor : source.tensors()) {
    const bool matches = std::any_of(
        patterns.begin(), patterns.end(),
        [&](const std::string& pattern) { return text::matches_glob(pattern, tensor.name); });
    if (!matches || has(tensor.name)) continue;
    carry(tensor);
    carried.push_back(tensor.name);
  }
  return carried;
}

void ModelWriter::set_config(nlohmann::ordered_json config) { config_ = std::move(config); }

void ModelWriter::copy_companions_from(const Path& source) {
  copy_companions(find_companions(source, has_tokenizer_ ? Companions::kOther : Companions::kAll));
}

void ModelWriter::copy_companions(const std::vector<Companion>& files) {
  for (const Companion& file : files) {
    const bool is_taken = std::any_of(copies_.begin(), copies_.end(), [&](const Companion& copy) {
      return copy.name == file.name;
    });
    if (!is_taken) copies_.push_back(file);
  }
}

void ModelWriter::set_tokenizer(const TokenizerSource& source) {
  has_tokenizer_ = true;
  copy_companions(source.files);
  for (const auto& [name, content] : source.changed) add_file(name, content);
}

void ModelWriter::add_file(const std::string& name, std::string content) {
  files_.emplace_back(name, std::move(content));
}

std::vector<std::vector<const ModelWriter::Item*>> ModelWriter::plan_shards() const {
  std::vector<std::vector<const Item*>> shards(1);
  std::uint64_t used = 0;
  for (const Item& item : items_) {
    const std::uint64_t bytes = item.bytes();
    if (!shards.back().empty() && used + bytes > options_.max_shard_bytes) {
      shards.emplace_back();
      used = 0;
    }
    shards.back().push_back(&item);
    used += bytes;
  }
  return shards;
}

void ModelWriter::write_shard(const Path& path, const std::vector<const Item*>& items) const {
  std::vector<TensorSpec> specs(items.size());
  std::transform(items.begin(), items.end(), specs.begin(), [](const Item* item) { return *item; });
  SafetensorsWriter writer(path, std::move(specs));
  for (const TensorSpec& spec : writer.order()) {
    const Item& item = items_[index_.at(spec.name)];
    if (!item.produce) {
      append_stored(writer, item.stored);
      continue;
    }
    const at::Tensor tensor = item.produce();
    if (tensor.sizes() != at::IntArrayRef(spec.shape)) {
      throw_error<InternalError>("tensor '{}' was announced as [{}] and came as [{}]", spec.name,
                                 fmt::join(spec.shape, ", "), fmt::join(tensor.sizes(), ", "));
    }
    append_tensor(writer, spec.name, tensor, spec.dtype);
  }
  writer.commit();
}

ModelWriterReport ModelWriter::commit() {
  if (!config_.is_object())
    throw_error<InternalError>("{}: no config.json was given", directory_.string());
  if (items_.empty()) throw_error<InternalError>("{}: no tensor was given", directory_.string());
  std::uint64_t needed = 0;
  for (const Item& item : items_) needed += item.bytes();
  StagingDirectory staging(directory_, directory_.string() + ".tmp");
  require_free_space(directory_, needed);

  ModelWriterReport report;
  // The small files first: one that was changed is named before gigabytes are written.
  copy_files(copies_, staging.path());
  for (const Companion& copy : copies_) report.copied_files.push_back(copy.name);
  const auto shards = plan_shards();
  nlohmann::json weight_map = nlohmann::json::object();
  std::uint64_t elements = 0;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const std::string name =
        shards.size() == 1 ? "model.safetensors"
                           : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    write_shard(staging.path() / name, shards[i]);
    report.weight_files.push_back(directory_ / name);
    for (const Item* item : shards[i]) {
      weight_map[item->name] = name;
      report.bytes += item->bytes();
      elements += item->numel();
    }
  }
  report.tensors = items_.size();
  if (shards.size() > 1) {
    const nlohmann::ordered_json index = {
        {"metadata", {{"total_parameters", elements}, {"total_size", report.bytes}}},
        {"weight_map", weight_map}};
    files::write_atomically(staging.path() / "model.safetensors.index.json", index.dump(2) + "\n");
  }
  files::write_atomically(staging.path() / "config.json", config_.dump(2) + "\n");
  write_files(files_, staging.path());
  for (const Item& item : items_) {
    if (!item.produce) require_unchanged({item.stored});
  }

  const ModelDirectory written_model = ModelDirectory::open(staging.path());
  for (const Item& item : items_) {
    const StoredTensor& stored = written_model.at(item.name);
    if (stored.dtype != item.dtype || stored.shape != item.shape) {
      throw_error<InternalError>("{} is not what was to be written", stored.where());
    }
  }
  staging.commit();
  return report;
}

}  // namespace heddle::ckpt
