#include "reward/answer_verifiers.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/errors.h"
#include "base/json.h"
#include "base/text.h"
#include "reward/extract.h"
#include "reward/math_answer.h"
#include "reward/number.h"
#include "reward/pattern.h"

namespace heddle::reward {
namespace {

AnswerPlace place_of(Parameters& parameters, const std::string& otherwise) {
  return *answer_place(
      parameters.choice("from", otherwise, {"whole", "boxed", "hash", "tag", "last_line", "auto"}));
}

Tolerance tolerance_of(Parameters& parameters) {
  Tolerance tolerance;
  tolerance.relative = parameters.number("tolerance", 0, 0, 1);
  tolerance.absolute = parameters.number("absolute_tolerance", 0, 0, 1e300);
  return tolerance;
}

Score right_or_wrong(bool is_right) { return {is_right ? 1.0 : 0.0, {}, {}}; }

Score unusable(std::string why) { return {0, {}, std::move(why)}; }

/// The truths of a row: text, a number or true/false as its text, or a list of such, each of which
/// is right. Empty: there is none.
std::vector<std::string> truths_of(const Json& truth) {
  if (truth.is_string()) return {truth.get<std::string>()};
  if (truth.is_number() || truth.is_boolean()) return {truth.dump()};
  std::vector<std::string> texts;
  if (!truth.is_array()) return texts;
  for (const Json& one : truth) {
    if (one.is_array()) return {};
    const auto more = truths_of(one);
    if (more.empty()) return {};
    texts.push_back(more.front());
  }
  return texts;
}

/// Compares the extracted answer with each truth; a completion without an answer is wrong.
class Comparison : public Verifier {
 public:
  explicit Comparison(AnswerPlace place) : place_(place) {}
  Score judge(const Sample& sample) const override {
    const std::vector<std::string> truths = truths_of(sample.truth);
    if (truths.empty()) {
      return unusable("the truth must be text, a number or a list of such, found " +
                      json::shown(sample.truth));
    }
    const std::optional<std::string> answer = extract(sample.completion, place_);
    Score score = right_or_wrong(
        answer && std::any_of(truths.begin(), truths.end(),
                              [&](const std::string& truth) { return is_same(*answer, truth); }));
    return score;
  }

 protected:
  virtual bool is_same(const std::string& answer, const std::string& truth) const = 0;

 private:
  AnswerPlace place_;
};

class Exact final : public Comparison {
 public:
  explicit Exact(Parameters& parameters)
      : Comparison(place_of(parameters, "whole")),
        ignore_case_(parameters.flag("ignore_case", false)) {}

 private:
  bool is_same(const std::string& answer, const std::string& truth) const override {
    return canonical(answer, ignore_case_) == canonical(truth, ignore_case_);
  }
  bool ignore_case_;
};

class Contains final : public Comparison {
 public:
  explicit Contains(Parameters& parameters)
      : Comparison(place_of(parameters, "whole")),
        ignore_case_(parameters.flag("ignore_case", false)) {}

 private:
  bool is_same(const std::string& answer, const std::string& truth) const override {
    const std::string wanted = canonical(truth, ignore_case_);
    return !wanted.empty() && canonical(answer, ignore_case_).find(wanted) != std::string::npos;
  }
  bool ignore_case_;
};

/// The number that a text stands for: the last one of free text; of a marked answer the only one,
/// so that a list of guesses is no answer.
class Numeric final : public Verifier {
 public:
  explicit Numeric(Parameters& parameters)
      : from_(parameters.choice("from", "auto",
                                {"auto", "boxed", "hash", "tag", "last_line", "last", "whole"})),
        tolerance_(tolerance_of(parameters)) {}

  Score judge(const Sample& sample) const override {
    std::vector<Number> truths;
    for (const std::string& text : truths_of(sample.truth)) {
      const auto marked = extract(text, AnswerPlace::kAuto);
      if (const auto number = only_number(marked ? *marked : text)) truths.push_back(*number);
    }
    if (truths.empty())
      return unusable("the truth must be a number, found " + json::shown(sample.truth));
    const std::optional<Number> answer = answer_of(sample.completion);
    return right_or_wrong(answer &&
                          std::any_of(truths.begin(), truths.end(), [&](const Number& truth) {
                            return equal(*answer, truth, tolerance_);
                          }));
  }

 private:
  static std::optional<Number> only_number(std::string_view text) {
    if (auto number = parse_number(text)) return number;
    const std::vector<Number> numbers = numbers_in(normalised_math(text));
    return numbers.size() == 1 ? std::optional(numbers.front()) : std::nullopt;
  }

  std::optional<Number> answer_of(std::string_view completion) const {
    if (const auto place = answer_place(from_)) {
      const auto marked = extract(completion, *place);
      if (marked) return only_number(*marked);
      if (place != AnswerPlace::kAuto) return {};
    }
    const std::vector<Number> numbers = numbers_in(looked_at(completion));
    return numbers.empty() ? std::nullopt : std::optional(numbers.back());
  }

  std::string from_;  ///< "auto" and "last" end with the last number of the text.
  Tolerance tolerance_;
};

class Math final : public Comparison {
 public:
  explicit Math(Parameters& parameters)
      : Comparison(place_of(parameters, "boxed")), tolerance_(tolerance_of(parameters)) {}

 private:
  bool is_same(const std::string& answer, const std::string& truth) const override {
    const auto boxed = extract(truth, AnswerPlace::kBoxed);
    return same_math(answer, boxed ? *boxed : truth, tolerance_);
  }
  Tolerance tolerance_;
};

/// Letters of a multiple choice.
class Choice final : public Verifier {
 public:
  explicit Choice(Parameters& parameters) : choices_(parameters.text("choices", "ABCDEFGHIJ")) {
    for (const char c : choices_) {
      if (c < 'A' || c > 'Z')
        parameters.refuse("choices", "expected capital letters, such as ABCD");
    }
  }

  Score judge(const Sample& sample) const override {
    char truth = 0;
    if (sample.truth.is_number_integer()) {
      const auto index = sample.truth.get<std::int64_t>();
      if (index >= 0 && index < static_cast<std::int64_t>(choices_.size()))
        truth = choices_[static_cast<std::size_t>(index)];
    } else if (sample.truth.is_string()) {
      truth = only_letter(sample.truth.get<std::string>());
    }
    if (truth == 0) {
      return unusable(fmt::format("the truth must be one of {} or its number from 0, found {}",
                                  choices_, json::shown(sample.truth)));
    }
    return right_or_wrong(answer_of(looked_at(sample.completion)) == truth);
  }

 private:
  static bool is_word(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           c == '\'' || (static_cast<unsigned char>(c) & 0x80) != 0;
  }

  /// Choices that stand as words of their own.
  std::string letters_of(std::string_view text) const {
    std::string letters;
    for (std::size_t at = 0; at < text.size(); ++at) {
      const bool begins = at == 0 || !is_word(text[at - 1]);
      const bool ends = at + 1 == text.size() || !is_word(text[at + 1]);
      if (begins && ends && choices_.find(text[at]) != std::string::npos) letters += text[at];
    }
    return letters;
  }

  /// The one choice that a short text names: "C", "(C)", "C. the third", "\text{C}". Nothing if it
  /// names none, or several.
  char only_letter(std::string_view text) const {
    text = text::trim(text);
    std::string_view bare = text;
    while (!bare.empty() && (bare.front() == '(' || bare.front() == '[' || bare.front() == '*'))
      bare.remove_prefix(1);
    // "A" alone begins a sentence too, so words may follow only after a mark: "A) a dog".
    if (bare.size() > 1 && choices_.find(bare[0]) != std::string::npos &&
        (bare[1] == '.' || bare[1] == ')' || bare[1] == ':' || bare[1] == ']') &&
        letters_of(bare.substr(1)).empty()) {
      return bare[0];
    }
    const std::string letters = letters_of(text);
    return letters.size() == 1 ? letters[0] : '\0';
  }

  /// After the last "answer", "answer is" or "answer:", up to the end of the sentence.
  std::optional<std::string_view> after_answer(std::string_view text) const {
    std::size_t at = std::string_view::npos;
    for (const std::string_view word : {"answer", "Answer", "ANSWER"}) {
      const std::size_t found = text.rfind(word);
      if (found != std::string_view::npos && (at == std::string_view::npos || found > at))
        at = found;
    }
    if (at == std::string_view::npos) return {};
    std::string_view rest = text.substr(at + 6);
    return rest.substr(0, rest.find('\n'));
  }

  char answer_of(std::string_view text) const {
    if (const auto marked = extract(text, AnswerPlace::kAuto)) return only_letter(*marked);
    if (const auto named = after_answer(text)) {
      if (!letters_of(*named).empty()) return only_letter(*named);
    }
    const auto line = extract(text, AnswerPlace::kLastLine);
    return only_letter(*line);
  }

  std::string choices_;
};

class Regex final : public Verifier {
 public:
  explicit Regex(Parameters& parameters)
      : compares_(parameters.flag("compare_group", false)),
        pattern_(required(parameters),
                 parameters.choice("match", "search", {"search", "full"}) == "full"
                     ? Pattern::Match::kFull
                     : Pattern::Match::kSearch,
                 parameters.flag("ignore_case", false), parameters.where()) {}

  Score judge(const Sample& sample) const override {
    const auto found = pattern_.find(looked_at(sample.completion));
    if (!compares_) return right_or_wrong(found.has_value());
    const std::vector<std::string> truths = truths_of(sample.truth);
    if (truths.empty())
      return unusable("the truth must be text or a number, found " + json::shown(sample.truth));
    if (!found || !found->first_group) return right_or_wrong(false);
    const std::string answer = canonical(*found->first_group, false);
    return right_or_wrong(std::any_of(truths.begin(), truths.end(), [&](const std::string& truth) {
      return canonical(truth, false) == answer;
    }));
  }

 private:
  static std::string required(Parameters& parameters) {
    const std::string pattern = parameters.text("pattern", "");
    if (pattern.empty()) parameters.refuse("pattern", "expected a regular expression");
    return pattern;
  }
  bool compares_;
  Pattern pattern_;
};

/// JSON that is well-formed, has the keys that are asked for, and equals the truth if there is one.
class JsonAnswer final : public Verifier {
 public:
  explicit JsonAnswer(Parameters& parameters)
      : keys_(parameters.texts("keys", {})), compares_(parameters.flag("compare", true)) {}

  Score judge(const Sample& sample) const override {
    const std::optional<nlohmann::json> value = value_of(looked_at(sample.completion));
    if (!value) return right_or_wrong(false);
    for (const std::string& key : keys_) {
      if (!value->is_object() || !value->contains(key)) return right_or_wrong(false);
    }
    if (!compares_ || sample.truth.is_null()) return right_or_wrong(true);
    // A data file may hold the truth as the text of an object.
    nlohmann::json truth(sample.truth);
    if (truth.is_string()) {
      if (const auto parsed = parsed_json(truth.get<std::string>())) truth = *parsed;
    }
    return right_or_wrong(*value == truth);
  }

 private:
  static std::optional<nlohmann::json> parsed_json(std::string_view text) {
    try {
      return json::parse<nlohmann::json>(text);
    } catch (const DataError&) {
      return {};
    }
  }

  /// The whole text, or else its last fenced block.
  static std::optional<nlohmann::json> value_of(std::string_view text) {
    if (auto value = parsed_json(text::trim(text))) return value;
    constexpr std::string_view kFence = "```";
    const std::size_t end = text.rfind(kFence);
    if (end == std::string_view::npos || end == 0) return {};
    const std::size_t begin = text.rfind(kFence, end - 1);
    if (begin == std::string_view::npos) return {};
    std::string_view block = text.substr(begin + kFence.size(), end - begin - kFence.size());
    if (block.starts_with("json")) block.remove_prefix(4);
    return parsed_json(text::trim(block));
  }

  std::vector<std::string> keys_;
  bool compares_;
};

}  // namespace

std::unique_ptr<Verifier> make_exact(Parameters& parameters) {
  return std::make_unique<Exact>(parameters);
}
std::unique_ptr<Verifier> make_contains(Parameters& parameters) {
  return std::make_unique<Contains>(parameters);
}
std::unique_ptr<Verifier> make_numeric(Parameters& parameters) {
  return std::make_unique<Numeric>(parameters);
}
std::unique_ptr<Verifier> make_math(Parameters& parameters) {
  return std::make_unique<Math>(parameters);
}
std::unique_ptr<Verifier> make_choice(Parameters& parameters) {
  return std::make_unique<Choice>(parameters);
}
std::unique_ptr<Verifier> make_regex(Parameters& parameters) {
  return std::make_unique<Regex>(parameters);
}
std::unique_ptr<Verifier> make_json(Parameters& parameters) {
  return std::make_unique<JsonAnswer>(parameters);
}

}  // namespace heddle::reward
