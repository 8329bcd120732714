#include "reward/countdown.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "base/json.h"
#include "base/text.h"
#include "reward/expression.h"
#include "reward/extract.h"
#include "reward/single_turn.h"

namespace heddle::reward {
namespace {

constexpr std::size_t kLongestExpression = 500;

class Countdown final : public SingleTurnTask {
 public:
  explicit Countdown(Parameters& parameters)
      : numbers_(parameters.integer("numbers", 3, 2, 8)),
        largest_(parameters.integer("largest", 99, 1, 10'000)) {}

  Row row(std::uint64_t seed, std::uint64_t index) const override {
    Draws draws(seed, "countdown", index);
    std::vector<std::int64_t> numbers;
    for (std::int64_t k = 0; k < numbers_; ++k) numbers.push_back(draws.between(1, largest_));
    // From the left, so there is a solution; a quotient only where it is whole.
    std::int64_t target = numbers[0];
    for (std::size_t k = 1; k < numbers.size(); ++k) {
      const std::int64_t next = numbers[k];
      constexpr std::int64_t kLargestTarget = 1000;
      const bool may_multiply = target * next <= kLargestTarget && target > 0;
      switch (draws.below(4)) {
        case 0:
          target -= next;
          break;
        case 1:
          target = may_multiply ? target * next : target + next;
          break;
        case 2:
          target = target % next == 0 ? target / next : target + next;
          break;
        default:
          target += next;
      }
    }
    std::vector<std::string> texts;
    for (const std::int64_t number : numbers) texts.push_back(std::to_string(number));
    return {fmt::format("Make {} from the numbers {}, each once, with + - * / and brackets: ",
                        target, text::join(texts, ", ")),
            target,
            {{"numbers", numbers}}};
  }

  Score judge(const Sample& sample) const override {
    const bool has_row = sample.truth.is_number_integer() && sample.meta.is_object() &&
                         sample.meta.contains("numbers") && sample.meta["numbers"].is_array();
    if (!has_row)
      return {0, {}, "expected a target and meta.numbers, found " + json::shown(sample.meta)};
    const std::string text = answer_of(sample.completion);
    auto wanted = sample.meta["numbers"].get<std::vector<std::int64_t>>();
    const std::optional<Rational> value = value_of(text, std::move(wanted));
    const bool is_right = value && *value == Rational{sample.truth.get<std::int64_t>(), 1};
    return {is_right ? 1.0 : 0.0, {{"fits", value ? 1.0 : 0.0}}, {}};
  }

 private:
  static std::string answer_of(const std::string& completion) {
    std::string text;
    if (auto marked = extract(completion, AnswerPlace::kAuto)) {
      text = *marked;
    } else {
      const std::string_view all = text::trim(looked_at(completion));
      text = all.substr(0, all.find('\n'));
    }
    return text.substr(0, text.find('='));
  }

  /// Nothing unless the text is an expression with just these numbers.
  static std::optional<Rational> value_of(const std::string& text,
                                          std::vector<std::int64_t> wanted) {
    if (text.size() > kLongestExpression ||
        text.find_first_not_of("0123456789+-*/() ") != std::string::npos) {
      return {};
    }
    std::vector<std::int64_t> used;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = std::min(text.find_first_not_of("0123456789", at), text.size());
      if (end == at) {
        ++at;
        continue;
      }
      constexpr std::size_t kMostDigits = 9;
      if (end - at > kMostDigits) return {};
      used.push_back(std::stoll(text.substr(at, end - at)));
      at = end;
    }
    std::sort(used.begin(), used.end());
    std::sort(wanted.begin(), wanted.end());
    const auto expression = used == wanted ? Expression::parse(text) : std::nullopt;
    return expression ? expression->exact() : std::nullopt;
  }

  std::int64_t numbers_, largest_;
};

}  // namespace

std::unique_ptr<Task> make_countdown(Parameters& parameters) {
  return std::make_unique<Countdown>(parameters);
}

}  // namespace heddle::reward
