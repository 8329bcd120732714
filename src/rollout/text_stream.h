#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/tokenizer/tokenizer.h"

namespace heddle::rollout {

/// Text of a growing token sequence: gives out what is certain, holding back incomplete UTF-8 and a
/// tail that could become a stop string; ends where the first stop string begins. Without a
/// tokenizer (null) there is no text, and nothing stops.
class TextStream {
 public:
  TextStream(std::shared_ptr<const data::Tokenizer> tokenizer,
             std::vector<std::string> stop_strings, bool skip_special_tokens = true);

  /// The text that became certain with this token. A stop string that ends with a token that
  /// `may_stop` not is text.
  std::string push(std::int32_t id, bool may_stop = true);
  /// The text that was held back.
  std::string finish();
  bool stopped() const { return stopped_; }

 private:
  std::string release(bool all, bool may_stop);

  std::int64_t known_ids_;
  std::optional<data::StreamDecoder> decoder_;
  std::vector<std::string> stop_strings_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace heddle::rollout
