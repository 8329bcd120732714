#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <utility>

#include "base/errors.h"
#include "base/json.h"
#include "base/quote.h"
#include "base/rng.h"
#include "base/text.h"
#include "reward/countdown.h"
#include "reward/environment.h"
#include "reward/extract.h"
#include "reward/guess_number.h"
#include "reward/parameters.h"
#include "reward/single_turn.h"
#include "reward/verifiers.h"

namespace heddle::reward {
namespace {

std::string random_text(Draws& draws, std::int64_t length, const std::string& letters) {
  std::string text;
  for (std::int64_t k = 0; k < length; ++k) text += letters[draws.below(letters.size())];
  return text;
}

/// The first line of a completion, or what stands in its <answer> tag.
std::string short_answer(const std::string& completion) {
  if (auto tagged = extract(completion, AnswerPlace::kTag)) return *tagged;
  const std::string_view text = text::trim(looked_at(completion));
  return std::string(text::trim(text.substr(0, text.find('\n'))));
}

/// The share of places that are right, of those that either text has.
double agreement(std::string_view answer, std::string_view truth) {
  const std::size_t shorter = std::min(answer.size(), truth.size());
  const std::size_t longer = std::max(answer.size(), truth.size());
  if (longer == 0) return 1;
  std::size_t same = 0;
  for (std::size_t k = 0; k < shorter; ++k) same += answer[k] == truth[k] ? 1 : 0;
  return static_cast<double>(same) / static_cast<double>(longer);
}

/// Tasks whose answer is a text: right or wrong, or with `partial` the share of right letters.
class TextTask : public SingleTurnTask {
 public:
  explicit TextTask(Parameters& parameters)
      : letters_(parameters.text("letters", "abcdefghijklmnopqrstuvwxyz")),
        partial_(parameters.flag("partial", false)) {
    if (letters_.empty()) parameters.refuse("letters", "expected at least one");
  }
  Score judge(const Sample& sample) const override {
    if (!sample.truth.is_string())
      return {0, {}, "the truth must be text, found " + json::shown(sample.truth)};
    const std::string answer = short_answer(sample.completion);
    const auto& truth = sample.truth.get_ref<const std::string&>();
    const double right = answer == truth ? 1 : 0;
    return {partial_ ? agreement(answer, truth) : right, {{"right", right}}, {}};
  }

 protected:
  std::string letters_;
  bool partial_;
};

class ReverseString final : public TextTask {
 public:
  explicit ReverseString(Parameters& parameters)
      : TextTask(parameters),
        shortest_(parameters.integer("shortest", 3, 1, 10'000)),
        longest_(parameters.integer("longest", 8, shortest_, 10'000)) {}
  Row row(std::uint64_t seed, std::uint64_t index) const override {
    Draws draws(seed, "reverse_string", index);
    const std::string text = random_text(draws, draws.between(shortest_, longest_), letters_);
    return {"Reverse: " + text + "\n", std::string(text.rbegin(), text.rend()), {}};
  }

 private:
  std::int64_t shortest_, longest_;
};

/// Lengths follow a geometric law: most are short, and a few take as long as all others together.
class Copy final : public TextTask {
 public:
  explicit Copy(Parameters& parameters)
      : TextTask(parameters),
        mean_(parameters.number("mean", 16, 1, 1e6)),
        longest_(parameters.integer("longest", 256, 1, 1'000'000)) {}
  Row row(std::uint64_t seed, std::uint64_t index) const override {
    Draws draws(seed, "copy", index);
    const double length =
        1 + std::floor(std::log1p(-draws.uniform()) / std::log1p(-1 / (mean_ + 1e-9)));
    const auto bounded = static_cast<std::int64_t>(std::min(length, static_cast<double>(longest_)));
    const std::string text = random_text(draws, bounded, letters_);
    return {"Copy: " + text + "\n", text, {}};
  }

 private:
  double mean_;
  std::int64_t longest_;
};

/// Tasks whose answer is a number (verifier `numeric`).
class NumberTask : public SingleTurnTask {
 public:
  Score judge(const Sample& sample) const override { return verifier_->judge(sample); }

 private:
  std::unique_ptr<Verifier> verifier_ = make_verifier("numeric", nullptr, "task");
};

class Arithmetic final : public NumberTask {
 public:
  explicit Arithmetic(Parameters& parameters)
      : terms_(parameters.integer("terms", 2, 2, 16)),
        largest_(parameters.integer("largest", 99, 1, 1'000'000)),
        operations_(parameters.text("operations", "+-*")) {
    if (operations_.empty() || operations_.find_first_not_of("+-*") != std::string::npos)
      parameters.refuse("operations", "expected some of + - *, such as \"+-\"");
  }
  Row row(std::uint64_t seed, std::uint64_t index) const override {
    Draws draws(seed, "arithmetic", index);
    std::int64_t sum = 0, product = draws.between(0, largest_);
    std::string text = std::to_string(product);
    int sign = 1;
    for (std::int64_t k = 1; k < terms_; ++k) {
      // A product of three factors is the most that 64 bits hold of the largest numbers.
      const bool may_multiply = std::abs(product) <= largest_ * largest_;
      char operation = operations_[draws.below(operations_.size())];
      if (operation == '*' && !may_multiply) operation = '+';
      const std::int64_t next = draws.between(0, largest_);
      text += std::string(" ") + operation + " " + std::to_string(next);
      if (operation == '*') {
        product *= next;
        continue;
      }
      sum += sign * product;
      sign = operation == '+' ? 1 : -1;
      product = next;
    }
    return {text + " = ", sum + sign * product, {}};
  }

 private:
  std::int64_t terms_, largest_;
  std::string operations_;
};

class ModularAddition final : public NumberTask {
 public:
  explicit ModularAddition(Parameters& parameters)
      : modulus_(parameters.integer("modulus", 97, 2, 1'000'000'000)) {}
  Row row(std::uint64_t seed, std::uint64_t index) const override {
    Draws draws(seed, "modular_addition", index);
    const std::int64_t a = draws.between(0, modulus_ - 1), b = draws.between(0, modulus_ - 1);
    return {fmt::format("{} + {} mod {} = ", a, b, modulus_), (a + b) % modulus_, {}};
  }

 private:
  std::int64_t modulus_;
};

template <class T>
std::unique_ptr<Task> make(Parameters& parameters) {
  return std::make_unique<T>(parameters);
}

struct TaskEntry {
  std::string_view name;
  std::unique_ptr<Task> (*make)(Parameters&);
};
constexpr std::array<TaskEntry, 6> kTasks{{{"arithmetic", make<Arithmetic>},
                                           {"copy", make<Copy>},
                                           {"countdown", make_countdown},
                                           {"guess_number", make_guess_number},
                                           {"modular_addition", make<ModularAddition>},
                                           {"reverse_string", make<ReverseString>}}};

}  // namespace

std::vector<std::string> task_names() {
  std::vector<std::string> names;
  for (const TaskEntry& entry : kTasks) names.emplace_back(entry.name);
  return names;
}

std::unique_ptr<Task> make_task(const std::string& name, const Json& parameters,
                                const std::string& where) {
  for (const TaskEntry& entry : kTasks) {
    if (entry.name != name) continue;
    Parameters values(parameters, where);
    std::unique_ptr<Task> task = entry.make(values);
    values.finish();
    return task;
  }
  throw_error<ConfigError>("{}: there is no task '{}'; expected one of {}", where,
                           text::shown(name), text::join(task_names(), ", "));
}

}  // namespace heddle::reward
