#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "data/batch.h"
#include "data/readers/jsonl_reader.h"
#include "data/rendering/renderer.h"

namespace heddle::data {

class Tokenizer;
class TokenStore;

/// A file and how often its rows are seen in an epoch: 1 once, 2.5 twice and a seeded half of them
/// a third time, 0 never.
struct DataFile {
  std::string path;
  double weight = 1;
};

struct DatasetOptions {
  std::vector<DataFile> files;
  std::string files_key;  ///< the configuration's key of `files`, for messages; "" names none
  ReaderOptions reader;
  BadRowPolicy bad_rows = BadRowPolicy::kError;
  RenderOptions rendering;
  /// A share of the rows, chosen by the hash of their text, that another part of the data has: this
  /// one takes them or leaves them. A row that comes twice is in one part only.
  double held_out = 0;
  bool takes_held_out = false;
  std::string cache_directory;  ///< "" keeps the tokens in memory and nothing on disk
  int threads = 0;              ///< 0: the cores this process may use
};

/// The row, by the hash of its text, is of the share that is held out.
bool is_held_out(const std::string& row, double share);

/// Checks that `files` are given, are there and have weights, without reading one: what the
/// configuration names is the user's to put there. Throws ConfigError and DataError.
void require_files(const DatasetOptions& options);

/// Fates of the lines of a file or of a whole data set; nothing is dropped without being
/// counted here.
struct DatasetReport {
  std::int64_t lines = 0;  ///< without blank ones
  std::int64_t blank_lines = 0;
  std::int64_t rows = 0;  ///< kept
  std::int64_t tokens = 0;
  std::int64_t loss_tokens = 0;
  std::int64_t longest_row = 0;           ///< tokens, after truncation
  std::int64_t bad_rows = 0;              ///< skipped by policy
  std::int64_t dropped_long = 0;          ///< longer than max_length, policy drop
  std::int64_t truncated = 0;             ///< cut to max_length
  std::int64_t split = 0;                 ///< made into several rows of at most max_length
  std::int64_t dropped_no_loss = 0;       ///< no loss token (left after truncation)
  std::int64_t cut_tokens = 0;            ///< tokens lost to truncation, of rows that were kept
  std::vector<std::string> bad_examples;  ///< the first few messages of skipped rows

  void add(const DatasetReport& other);
  nlohmann::json to_json() const;
  static DatasetReport from_json(const nlohmann::json& value);
  /// ", 2 bad rows skipped, ...": what became of lines that are no whole row; empty if all are.
  std::string left_out() const;
  /// "4000 rows, 512 k tokens (31 % with loss); skipped: 2 bad rows, ..." in one line.
  std::string summary() const;
};

/// Lines done of a file so far; `fraction` is by bytes read, 1 at the end; called from the thread
/// that called open.
struct TokenizeProgress {
  std::string file;
  std::int64_t rows = 0;
  std::int64_t tokens = 0;
  double fraction = 0;
};
using ProgressCallback = std::function<void(const TokenizeProgress&)>;

/// Tokenised rows of one or more files, random access. Rows are numbered through all files in the
/// order given.
class Dataset {
 public:
  /// Reads, renders and tokenises what the cache does not hold yet. Throws DataError for bad rows
  /// (policy kError), for a data set without any row, and, for language models, without any loss
  /// token.
  static std::shared_ptr<const Dataset> open(const DatasetOptions& options,
                                             const Tokenizer& tokenizer,
                                             const ProgressCallback& progress = {});
  ~Dataset();

  std::int64_t rows() const { return static_cast<std::int64_t>(lengths_.size()); }
  SequenceView row(std::int64_t index) const;
  /// Tokens of every row.
  std::span<const std::int64_t> lengths() const { return lengths_; }
  double loss_weight(std::int64_t row) const;      ///< sum over the row
  std::int64_t loss_rows(std::int64_t row) const;  ///< positions with loss
  /// The file and line that a row came from, for messages.
  Place place(std::int64_t row) const;
  Task task() const { return task_; }

  struct File {
    std::string path;
    double weight = 1;
    std::int64_t first_row = 0;
    std::int64_t rows = 0;
    DatasetReport report;
    bool from_cache = false;
  };
  const std::vector<File>& files() const { return files_; }
  /// The sum over all files.
  const DatasetReport& report() const { return report_; }
  /// Key of content, tokenizer, template and options; changes when any row would.
  const std::string& key() const { return key_; }

 private:
  Dataset() = default;
  /// The file and the row in it.
  std::pair<std::size_t, std::int64_t> locate(std::int64_t row) const;

  std::vector<std::shared_ptr<const TokenStore>> stores_;
  std::vector<File> files_;
  std::vector<std::int64_t> lengths_;
  DatasetReport report_;
  Task task_ = Task::kLanguageModel;
  std::string key_;
};

}  // namespace heddle::data
