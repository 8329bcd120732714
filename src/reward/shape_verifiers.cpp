#include "reward/shape_verifiers.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>
#include <utility>

#include "base/hash.h"
#include "base/text.h"
#include "reward/extract.h"

namespace heddle::reward {
namespace {

/// In tokens, or in bytes for a sample that has none.
double length_of(const Sample& sample) {
  return static_cast<double>(sample.tokens.empty() ? sample.completion.size()
                                                   : sample.tokens.size());
}

/// Tags that stand there once, in order, each closed before the next opens.
class Format final : public Verifier {
 public:
  explicit Format(Parameters& parameters)
      : tags_(parameters.texts("tags", {"think", "answer"})),
        opened_by_prompt_(parameters.flag("opened_by_prompt", false)),
        allows_text_outside_(parameters.flag("text_outside", false)) {
    if (tags_.empty()) parameters.refuse("tags", "expected at least one tag");
    for (const std::string& tag : tags_) {
      const bool is_name = !tag.empty() && tag.find_first_of("<>/ \n") == std::string::npos;
      if (!is_name) parameters.refuse("tags", "expected names without < and >, such as think");
    }
  }

  Score judge(const Sample& sample) const override {
    const std::string_view text = looked_at(sample.completion);
    std::size_t at = 0;
    for (std::size_t k = 0; k < tags_.size(); ++k) {
      const std::string open = "<" + tags_[k] + ">", close = "</" + tags_[k] + ">";
      const bool is_open = k == 0 && opened_by_prompt_;
      if (count(text, open) != (is_open ? 0u : 1u) || count(text, close) != 1) return {};
      const std::size_t begin = is_open ? 0 : text.find(open);
      const std::size_t end = text.find(close);
      if (begin < at || end < begin || !may_stand_outside(text.substr(at, begin - at))) return {};
      at = end + close.size();
    }
    return {may_stand_outside(text.substr(at)) ? 1.0 : 0.0, {}, {}};
  }

 private:
  bool may_stand_outside(std::string_view text) const {
    return allows_text_outside_ || text::trim(text).empty();
  }
  /// Up to two.
  static std::size_t count(std::string_view text, std::string_view word) {
    const std::size_t first = text.find(word);
    if (first == std::string_view::npos) return 0;
    return text.find(word, first + 1) == std::string_view::npos ? 1 : 2;
  }

  std::vector<std::string> tags_;
  bool opened_by_prompt_, allows_text_outside_;
};

/// 1 up to `target`, from there down to 0 at `max`; below `min` in proportion.
class Length final : public Verifier {
 public:
  explicit Length(Parameters& parameters)
      : min_(parameters.number("min", 0, 0, kMost)),
        target_(parameters.number("target", 0, 0, kMost)),
        max_(parameters.number("max", 0, 0, kMost)) {
    if (max_ <= target_ || min_ > target_)
      parameters.refuse("max", "expected min <= target < max, in tokens");
  }

  Score judge(const Sample& sample) const override {
    const double length = length_of(sample);
    if (length < min_) return {length / min_, {}, {}};
    return {std::clamp((max_ - length) / (max_ - target_), 0.0, 1.0), {}, {}};
  }

 private:
  static constexpr double kMost = 1e9;
  double min_, target_, max_;
};

/// The share of different runs of n words among all of them: 1 where nothing is repeated.
class Repetition final : public Verifier {
 public:
  explicit Repetition(Parameters& parameters)
      : n_(static_cast<std::size_t>(parameters.integer("n", 4, 1, 64))) {}

  Score judge(const Sample& sample) const override {
    std::vector<std::string_view> words;
    const std::string_view text = looked_at(sample.completion);
    constexpr std::string_view kSpace = " \t\r\n";
    for (std::size_t at = text.find_first_not_of(kSpace); at < text.size();) {
      const std::size_t end = std::min(text.find_first_of(kSpace, at), text.size());
      words.push_back(text.substr(at, end - at));
      at = text.find_first_not_of(kSpace, end);
    }
    if (words.size() < n_) return {1, {}, {}};
    std::unordered_set<std::uint64_t> runs;
    const std::size_t count = words.size() - n_ + 1;
    for (std::size_t first = 0; first < count; ++first) {
      std::uint64_t mark = 0;
      for (std::size_t k = 0; k < n_; ++k) mark = hash::of(words[first + k], mark);
      runs.insert(mark);
    }
    return {static_cast<double>(runs.size()) / static_cast<double>(count), {}, {}};
  }

 private:
  std::size_t n_;
};

/// min(0, -(length - (max - buffer)) / buffer x penalty), at least -penalty: the soft overlong
/// punishment of "DAPO" (arXiv 2503.14476), eq. 13.
class Overlong final : public Verifier {
 public:
  explicit Overlong(Parameters& parameters)
      : max_(parameters.number("max", 0, 0, 1e9)),
        buffer_(parameters.number("buffer", 0, 0, 1e9)),
        penalty_(parameters.number("penalty", 1, 0, 1e9)) {
    if (buffer_ <= 0 || buffer_ > max_)
      parameters.refuse("buffer", "expected 0 < buffer <= max, in tokens");
  }

  Score judge(const Sample& sample) const override {
    const double over = (length_of(sample) - (max_ - buffer_)) / buffer_;
    return {-penalty_ * std::clamp(over, 0.0, 1.0), {}, {}};
  }

 private:
  double max_, buffer_, penalty_;
};

}  // namespace

std::unique_ptr<Verifier> make_format(Parameters& parameters) {
  return std::make_unique<Format>(parameters);
}
std::unique_ptr<Verifier> make_length(Parameters& parameters) {
  return std::make_unique<Length>(parameters);
}
std::unique_ptr<Verifier> make_repetition(Parameters& parameters) {
  return std::make_unique<Repetition>(parameters);
}
std::unique_ptr<Verifier> make_overlong(Parameters& parameters) {
  return std::make_unique<Overlong>(parameters);
}

}  // namespace heddle::reward
