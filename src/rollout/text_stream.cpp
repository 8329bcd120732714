#include "rollout/text_stream.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace heddle::rollout {

TextStream::TextStream(std::shared_ptr<const data::Tokenizer> tokenizer,
                       std::vector<std::string> stop_strings, bool skip_special_tokens)
    : known_ids_(tokenizer ? tokenizer->vocab_size() : 0), stop_strings_(std::move(stop_strings)) {
  if (tokenizer) decoder_.emplace(std::move(tokenizer), skip_special_tokens);
  std::erase(stop_strings_, "");
}

std::string TextStream::push(std::int32_t id, bool may_stop) {
  if (stopped_) return {};
  // Embedding rows beyond the tokenizer are padding: they stand for no text.
  if (id < known_ids_) held_ += decoder_->push(id);
  return release(false, may_stop);
}

std::string TextStream::finish() {
  if (!stopped_ && decoder_) held_ += decoder_->finish();
  return release(true, true);
}

std::string TextStream::release(bool all, bool may_stop) {
  std::size_t stop = std::string::npos;
  for (const std::string& word : stop_strings_)
    if (may_stop) stop = std::min(stop, held_.find(word));
  if (stop != std::string::npos) {
    stopped_ = true;
    held_.resize(stop);
    return std::exchange(held_, {});
  }
  std::size_t certain = held_.size();
  if (!all) {
    // The longest tail that begins a stop string may still become one.
    for (const std::string& word : stop_strings_) {
      for (std::size_t n = std::min(word.size() - 1, held_.size()); n > 0; --n) {
        if (std::string_view(held_).ends_with(std::string_view(word).substr(0, n))) {
          certain = std::min(certain, held_.size() - n);
          break;
        }
      }
    }
  }
  std::string out = held_.substr(0, certain);
  held_.erase(0, certain);
  return out;
}

}  // namespace heddle::rollout
