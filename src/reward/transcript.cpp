#include "reward/transcript.h"

#include <algorithm>

namespace heddle::reward {

void Transcript::append(std::span<const std::int64_t> tokens, bool is_sampled) {
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  mask_.resize(tokens_.size(), is_sampled ? 1 : 0);
}

bool Transcript::extend_to(std::span<const std::int64_t> rendered) {
  if (rendered.size() < tokens_.size() ||
      !std::equal(tokens_.begin(), tokens_.end(), rendered.begin())) {
    return false;
  }
  observe(rendered.subspan(tokens_.size()));
  return true;
}

}  // namespace heddle::reward
