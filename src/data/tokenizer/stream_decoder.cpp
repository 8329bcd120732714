#include "data/tokenizer/tokenizer.h"
#include "data/tokenizer/utf8.h"

namespace heddle::data {

StreamDecoder::StreamDecoder(std::shared_ptr<const Tokenizer> tokenizer, bool skip_special_tokens)
    : tokenizer_(std::move(tokenizer)), skip_special_tokens_(skip_special_tokens) {}

std::string StreamDecoder::push(std::int32_t id) {
  const std::string_view bytes = tokenizer_->bytes_of(id);
  if (skip_special_tokens_ && tokenizer_->is_special(id)) return {};
  pending_ += bytes;
  const std::size_t held = utf8::incomplete_suffix(pending_);
  const std::string_view ready = std::string_view(pending_).substr(0, pending_.size() - held);
  std::string out = utf8::replace_invalid(ready);
  pending_.erase(0, ready.size());
  return out;
}

std::string StreamDecoder::finish() {
  std::string out = utf8::replace_invalid(pending_);
  pending_.clear();
  return out;
}

}  // namespace heddle::data
