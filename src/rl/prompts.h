#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/hash.h"
#include "config/run_config.h"
#include "data/loader/dataset.h"
#include "data/loader/plan.h"
#include "data/rendering/renderer.h"
#include "data/tokenizer/tokenizer.h"
#include "reward/reward.h"
#include "rl/group.h"
#include "train/setup.h"

namespace heddle::rl {

using Json = nlohmann::ordered_json;

/// A row of data.train or data.eval that waits for completions.
struct Prompt {
  std::vector<std::int32_t> tokens;
  std::string text;         ///< Decoded without special tokens.
  Json truth, meta, tools;  ///< Null where the row has none.
  Json messages;            ///< The conversation that waits for an answer; with rl.history render.
  std::string place;        ///< File and line, for messages.
};

/// Rows with `prompt` (a text, or a list of messages) or `messages`, and what rewards compare with.
/// They come in an order of their own in each epoch, each file's as often as its weight says.
class Prompts {
 public:
  /// Reads the files of one part, or its share of data.train; none for data.eval if it is empty.
  /// Rows that cannot be read or that the verifiers could not judge, whatever the completion, stop
  /// it or are left out (data.on_bad_line), as are prompts beyond the limit (data.truncation).
  /// Throws DataError with file, line and field.
  Prompts(const config::RunConfig& config, train::DataPart part, const data::Tokenizer& tokenizer);

  /// Rows; row() takes their numbers.
  std::int64_t size() const { return static_cast<std::int64_t>(rows_.size()); }
  const Prompt& row(std::int64_t index) const { return rows_[static_cast<std::size_t>(index)]; }
  /// The tokens and the text that a group's trajectories follow: its episodes' or its row's.
  const std::vector<std::int32_t>& tokens_of(const Group& group) const {
    return group.opening ? group.opening->tokens : row(group.row).tokens;
  }
  const std::string& text_of(const Group& group) const {
    return group.opening ? group.opening->text : row(group.row).text;
  }
  /// A prompt in place of a row's, as the row could have it: a text or a list of messages, with the
  /// row's tools. Throws DataError.
  Opening opening(std::int64_t row, const Json& prompt) const;
  /// The conversation of a group's prompt and of these messages after it, up to where the policy's
  /// next turn begins, as the template renders it; with rl.history render. Of any length. Throws
  /// DataError.
  std::vector<std::int32_t> history(const Group& group, const Json& messages) const;
  /// Prompts of an epoch: the rows, times the weights of their files.
  std::int64_t per_epoch() const { return per_epoch_; }
  /// The row at a place in the stream of all epochs.
  std::int64_t index_of(std::int64_t cursor) const;
  /// File and line of the first row that names a verifier, where rl.reward.verifiers does not look
  /// for one (verifier row); empty: none does.
  const std::string& unread_verifier() const { return unread_verifier_; }
  /// File and line of the first row that has messages, which are read, and a prompt; empty: none.
  const std::string& prompt_and_messages() const { return prompt_and_messages_; }
  /// Fates of all rows that were read.
  const data::DatasetReport& report() const { return report_; }
  /// Hash of rows and order: a run that goes on must find the same.
  const std::string& key() const { return key_; }
  /// Hash of what the rows became: their tokens, answers, and what rewards are handed besides.
  const std::string& content() const { return content_; }
  /// Hash of rows, order and content: ranks that work together have the same. A chat template may
  /// differ in its file.
  std::string identity() const;
  /// Tokens of an epoch's prompts, in the mean over epochs.
  std::int64_t tokens() const;

 private:
  /// Appends the rows of a file, whose lines the hash takes. `judge`: verifiers that must be able
  /// to judge each; may be null.
  void read(const std::string& path, const config::RunConfig& config,
            const data::DatasetOptions& options, reward::Reward* judge, hash::Hasher& hasher);
  Prompt prompt_of(const Json& row, const config::RunConfig& config) const;
  /// Cuts a prompt to the limit as data.truncation says. False: it is to be left out.
  bool fit(std::vector<std::int32_t>& tokens);
  /// Throws DataError for a prompt beyond the limit.
  void require_fit(std::int64_t tokens) const;
  std::vector<std::int32_t> tokenize(const Json& row) const;
  /// Messages of a row or prompt; null unless histories are rendered. Throws DataError.
  Json conversation_of(const Json& row) const;

  const data::Tokenizer& tokenizer_;
  data::RowOptions reader_;
  std::int64_t max_length_, max_new_tokens_;
  std::unique_ptr<data::Renderer> renderer_;  ///< Null without rows.
  bool has_template_ = false, renders_history_;
  data::Truncation truncation_;
  std::vector<Prompt> rows_;
  std::vector<data::FileRows> files_;
  std::int64_t per_epoch_ = 0;
  data::DatasetReport report_;
  std::string unread_verifier_, prompt_and_messages_;
  std::string key_, content_;
  std::uint64_t seed_;
  bool shuffles_;
  mutable std::int64_t epoch_ = -1;
  mutable std::vector<std::int64_t> order_;  ///< Rows in that epoch.
};

}  // namespace heddle::rl
