#include "data/loader/dataset.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string_view>
#include <utility>

#include "base/chosen_directory.h"
#include "base/errors.h"
#include "base/file_hash.h"
#include "base/files.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/text.h"
#include "base/threads.h"
#include "data/cache/cache_lock.h"
#include "data/cache/token_store.h"
#include "data/tokenizer/tokenizer.h"

namespace heddle::data {
namespace {

namespace fs = std::filesystem;

/// A chunk is tokenised by all threads and then written in order.
constexpr std::size_t kChunkLines = 2048;
constexpr std::size_t kChunkBytes = std::size_t{8} << 20;
/// Another rank may have to tokenise a very large file first.
constexpr double kLockTimeoutSeconds = 6 * 3600;

struct PendingLine {
  std::string text;
  std::int64_t line = 0;
  std::vector<TokenizedRow> rows;  ///< one, but for rows that hold several sequences
  std::string error;
  bool is_config_error = false;  ///< Not the row's fault: no row is left out for it.
};

/// Part of the key of single texts since the first version: caches and cursors of earlier runs stay
/// valid.
constexpr const char* kNoGroup = "\nquery\npositive\nnegatives";

std::string reader_fingerprint(const DatasetOptions& dataset) {
  const ReaderOptions& options = dataset.reader;
  const FieldNames& f = options.fields;
  std::string all = fmt::format("{} {} {} {} {}", static_cast<int>(options.format),
                                static_cast<int>(options.task), options.max_line_bytes,
                                options.max_depth, static_cast<int>(dataset.bad_rows));
  all += fmt::format(" {}", options.classes);
  for (const std::string* name :
       {&f.messages, &f.tools, &f.weight, &f.conversations, &f.from, &f.value, &f.prompt,
        &f.completion, &f.instruction, &f.input, &f.output, &f.system, &f.history, &f.text,
        &f.input_ids, &f.labels, &f.label}) {
    all += '\n' + *name;
  }
  // Rows with classes by number keep their key.
  for (const std::string& name : options.class_names) all += "\nclass " + name;
  if (dataset.held_out > 0) all += fmt::format("\n{} {}", dataset.held_out, dataset.takes_held_out);
  if (options.task != Task::kGroup) return all + kNoGroup;
  for (const std::string& name : options.group.texts) all += '\n' + name;
  all += '\n' + options.group.more;
  // A group without a prompt keeps its key.
  if (!options.group.prompt.empty())
    all += fmt::format("\n{} {}", options.group.prompt, options.group.learns);
  return all;
}

/// Reads one file, renders and tokenises its rows into a writer.
class FileTokenizer {
 public:
  FileTokenizer(const std::string& path, const DatasetOptions& options, const Renderer& renderer,
                const ProgressCallback& progress)
      : path_(path),
        options_(options),
        renderer_(renderer),
        progress_(progress),
        records_(RecordReader::open(path, options.reader.max_line_bytes)),
        threads_(options.threads > 0 ? options.threads : available_cores()),
        file_bytes_(static_cast<double>(std::max<std::uintmax_t>(fs::file_size(path), 1))) {}

  DatasetReport run(TokenStoreWriter& writer) {
    while (read_chunk()) {
      parallel_items(static_cast<std::int64_t>(chunk_.size()), threads_,
                     [&](std::int64_t i) { tokenize(chunk_[i]); });
      for (PendingLine& pending : chunk_) settle(pending, writer);
      tell_progress(static_cast<double>(records_->bytes_consumed()) / file_bytes_);
    }
    report_.blank_lines = records_->blank_lines();
    tell_progress(1);
    return report_;
  }

 private:
  bool read_chunk() {
    chunk_.clear();
    std::size_t bytes = 0;
    while (chunk_.size() < kChunkLines && bytes < kChunkBytes) {
      PendingLine pending;
      try {
        if (!records_->next(pending.text)) break;
      } catch (const UnusableRow& error) {
        pending.error = error.what();
      }
      const bool is_of_other_part =
          options_.held_out > 0 &&
          is_held_out(pending.text, options_.held_out) != options_.takes_held_out;
      if (is_of_other_part) continue;
      pending.line = records_->line();
      bytes += pending.text.size();
      chunk_.push_back(std::move(pending));
      // No further line is needed, and the end of one that is too long may be far.
      if (options_.bad_rows == BadRowPolicy::kError && !chunk_.back().error.empty()) break;
    }
    return !chunk_.empty();
  }

  void tokenize(PendingLine& pending) const {
    if (!pending.error.empty()) return;
    try {
      const Place place{path_, pending.line};
      Row row = parse_line(pending.text, place, options_.reader);
      try {
        for (const Row& part : sequences(std::move(row)))
          pending.rows.push_back(renderer_.tokenize(part));
      } catch (const DataError& error) {
        throw_error<DataError>("{}:{}: {}", place.file, place.line, error.what());
      } catch (const ConfigError& error) {
        pending.error = fmt::format("{}:{}: {}", place.file, place.line, error.what());
        pending.is_config_error = true;
      }
    } catch (const DataError& error) {
      pending.error = error.what();
    }
  }

  /// In the order of the file, so that the first bad line is the one that is named.
  void settle(PendingLine& pending, TokenStoreWriter& writer) {
    ++report_.lines;
    if (pending.is_config_error) throw ConfigError(pending.error);
    if (!pending.error.empty()) {
      if (options_.bad_rows == BadRowPolicy::kError) throw DataError(pending.error);
      ++report_.bad_rows;
      DatasetReport one;
      one.bad_examples.push_back(std::move(pending.error));
      report_.add(one);
      return;
    }
    for (const TokenizedRow& row : pending.rows) settle(row, pending.line, writer);
  }

  void settle(const TokenizedRow& row, std::int64_t line, TokenStoreWriter& writer) {
    if (row.fate == TokenizedRow::Fate::kDroppedLong) {
      ++report_.dropped_long;
      return;
    }
    if (row.fate == TokenizedRow::Fate::kDroppedNoLoss) {
      ++report_.dropped_no_loss;
      return;
    }
    if (row.fate == TokenizedRow::Fate::kSplit) {
      ++report_.split;
      for (const TokenizedRow& piece : split(row, options_.rendering.max_length))
        keep(piece, line, writer);
      return;
    }
    if (row.fate == TokenizedRow::Fate::kTruncated) {
      ++report_.truncated;
      report_.cut_tokens += row.full_length - std::ssize(row.tokens);
    }
    keep(row, line, writer);
  }

  void keep(const TokenizedRow& row, std::int64_t line, TokenStoreWriter& writer) {
    ++report_.rows;
    report_.tokens += std::ssize(row.tokens);
    report_.loss_tokens += row.loss_rows;
    report_.longest_row = std::max<std::int64_t>(report_.longest_row, std::ssize(row.tokens));
    writer.add(row, line);
  }

  void tell_progress(double fraction) const {
    if (progress_) progress_({path_, report_.rows, report_.tokens, std::min(fraction, 1.0)});
  }

  const std::string& path_;
  const DatasetOptions& options_;
  const Renderer& renderer_;
  const ProgressCallback& progress_;
  std::unique_ptr<RecordReader> records_;
  int threads_;
  double file_bytes_;
  std::vector<PendingLine> chunk_;
  DatasetReport report_;
};

/// Throws the error of the first record, if it has one: to hash a large file of no rows takes
/// minutes.
void require_first_record(const std::string& path, const DatasetOptions& options) {
  if (options.bad_rows != BadRowPolicy::kError) return;
  std::string record;
  RecordReader::open(path, options.reader.max_line_bytes)->next(record);
}

/// The cached store, or null when there is none that is whole; says so when there is a damaged one.
std::shared_ptr<const TokenStore> open_cached(const fs::path& path) {
  if (!fs::exists(path)) return nullptr;
  try {
    auto store = TokenStore::open(path);
    DatasetReport::from_json(store->meta().at("report"));
    return store;
  } catch (const DataError& error) {
    log::warning("{}; tokenising again", error.what());
  } catch (const nlohmann::json::exception& error) {
    log::warning("{} has no report ({}); tokenising again", path.string(), error.what());
  }
  return nullptr;
}

/// "data.eval: ", what a message about the files begins with.
std::string key_of(const DatasetOptions& options) {
  return options.files_key.empty() ? "" : options.files_key + ": ";
}

void check_totals(const DatasetReport& report, const DatasetOptions& options) {
  if (report.rows > 0) return;
  std::vector<std::string> names;
  for (const DataFile& file : options.files) names.push_back(file.path);
  const std::string where = key_of(options) + text::list_some(names, 3);
  if (report.lines == 0) throw_error<DataError>("{}: no row; the data set is empty", where);
  std::string detail = report.summary();
  if (!report.bad_examples.empty()) detail += "; first: " + report.bad_examples.front();
  if (report.dropped_no_loss > 0) {
    throw_error<DataError>(
        "{}: no token of the data set carries loss: {} (check roles, message weights, "
        "data.loss_on and data.max_length)",
        where, detail);
  }
  throw_error<DataError>("{}: no row of the data set is left: {}", where, detail);
}

}  // namespace

bool is_held_out(const std::string& row, double share) {
  return std::ldexp(static_cast<double>(hash::of(row)), -64) < share;
}

void require_files(const DatasetOptions& options) {
  const std::string place = key_of(options);
  if (options.files.empty()) throw_error<ConfigError>("{}no data file is given", place);
  for (const DataFile& file : options.files) {
    if (!std::isfinite(file.weight) || file.weight < 0) {
      throw_error<ConfigError>("{}the weight of {} is {}, expected a number >= 0", place, file.path,
                               file.weight);
    }
    if (file.weight == 0) continue;
    if (file.path == ByteSource::kStandardInput) {
      throw_error<DataError>(
          "{}standard input can be read once only, a run reads its data again: put it into a file",
          place);
    }
    if (!fs::exists(file.path))
      throw_error<DataError>("{}cannot open {}: No such file or directory", place, file.path);
    if (fs::is_directory(file.path))
      throw_error<DataError>("{}{} is a folder, expected a file of rows", place, file.path);
  }
}

Dataset::~Dataset() = default;

std::shared_ptr<const Dataset> Dataset::open(const DatasetOptions& options,
                                             const Tokenizer& tokenizer,
                                             const ProgressCallback& progress) {
  require_files(options);
  const Renderer renderer(tokenizer, options.rendering);
  const fs::path cache = options.cache_directory;
  if (!cache.empty()) files::make_chosen_directory(cache, "data.cache_dir");
  std::shared_ptr<Dataset> dataset(new Dataset());
  dataset->task_ = options.reader.task;
  hash::Hasher whole_key;
  for (const DataFile& file : options.files) {
    if (file.weight == 0) continue;
    require_first_record(file.path, options);
    hash::Hasher hasher;
    hasher.add(hash::of_file(file.path))
        .add(renderer.fingerprint())
        .add(reader_fingerprint(options));
    // The ending decides how a file is read.
    if (const std::string form = RecordReader::form_of(file.path); !form.empty()) hasher.add(form);
    const std::string key = hasher.hex();
    whole_key.add(key);
    const auto tokenize = [&](TokenStoreWriter& writer) {
      const DatasetReport report =
          FileTokenizer(file.path, options, renderer, progress).run(writer);
      return writer.finish({{"key", key}, {"source", file.path}, {"report", report.to_json()}});
    };
    std::shared_ptr<const TokenStore> store;
    bool from_cache = false;
    if (cache.empty()) {
      TokenStoreWriter writer;
      store = TokenStore::from_bytes(tokenize(writer), file.path);
    } else {
      const fs::path path = cache / (key + TokenStore::kExtension);
      const CacheLock lock(cache / (key + ".lock"), kLockTimeoutSeconds);
      store = open_cached(path);
      from_cache = store != nullptr;
      if (!from_cache) {
        TokenStoreWriter writer(path);
        tokenize(writer);
        store = TokenStore::open(path);
      }
    }
    File entry;
    entry.path = file.path;
    entry.weight = file.weight;
    entry.first_row = dataset->rows();
    entry.rows = store->rows();
    entry.report = DatasetReport::from_json(store->meta().at("report"));
    entry.from_cache = from_cache;
    dataset->report_.add(entry.report);
    for (std::int64_t row = 0; row < store->rows(); ++row) {
      dataset->lengths_.push_back(store->length(row));
    }
    dataset->files_.push_back(std::move(entry));
    dataset->stores_.push_back(std::move(store));
  }
  dataset->key_ = whole_key.hex();
  check_totals(dataset->report_, options);
  return dataset;
}

std::pair<std::size_t, std::int64_t> Dataset::locate(std::int64_t row) const {
  const auto after =
      std::upper_bound(files_.begin(), files_.end(), row,
                       [](std::int64_t index, const File& file) { return index < file.first_row; });
  if (row < 0 || row >= rows() || after == files_.begin()) {
    throw_error<InternalError>("row {} is outside the data set's {} rows", row, rows());
  }
  // Files without rows share their first row with the next one; upper_bound passes all of them.
  const auto file = static_cast<std::size_t>(after - files_.begin()) - 1;
  return {file, row - files_[file].first_row};
}

SequenceView Dataset::row(std::int64_t index) const {
  const auto [file, row] = locate(index);
  SequenceView view = stores_[file]->row(row);
  view.row = index;
  return view;
}

double Dataset::loss_weight(std::int64_t index) const {
  const auto [file, row] = locate(index);
  return stores_[file]->loss_weight(row);
}

std::int64_t Dataset::loss_rows(std::int64_t index) const {
  const auto [file, row] = locate(index);
  return stores_[file]->loss_rows(row);
}

Place Dataset::place(std::int64_t index) const {
  const auto [file, row] = locate(index);
  return {files_[file].path, stores_[file]->line(row)};
}

}  // namespace heddle::data
