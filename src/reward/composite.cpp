#include "reward/composite.h"

#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "base/errors.h"
#include "base/json.h"
#include "reward/verifiers.h"

namespace heddle::reward {
namespace {

/// The verifier that a row names, made when first met.
class OfRow final : public Verifier {
 public:
  OfRow(Json parameters, std::string where)
      : parameters_(std::move(parameters)), where_(std::move(where)) {}

  Score judge(const Sample& sample) const override {
    const bool is_named = sample.meta.is_object() && sample.meta.contains("verifier") &&
                          sample.meta["verifier"].is_string();
    if (!is_named) return {0, {}, "the row has no column 'verifier' with a verifier's name"};
    const auto name = sample.meta["verifier"].get<std::string>();
    auto& verifier = made_[name];
    try {
      if (!verifier) verifier = make_verifier(name, parameters_, where_);
    } catch (const ConfigError& error) {
      return {0, {}, error.what()};
    }
    return verifier->judge(sample);
  }

 private:
  Json parameters_;
  std::string where_;
  mutable std::map<std::string, std::unique_ptr<Verifier>> made_;
};

class Composite final : public Reward {
 public:
  Composite(const std::vector<Part>& parts, Combine combine) : combine_(combine) {
    std::set<std::string> names;
    for (const Part& part : parts) {
      const std::string where = "reward part '" + part.verifier + "'";
      if (!std::isfinite(part.weight))
        throw_error<ConfigError>("{}: weight must be a finite number", where);
      const std::string name = part.name.empty() ? part.verifier : part.name;
      if (name == "mean" || name == "std") {
        throw_error<ConfigError>("{}: '{}' is the reward's own figure: give it another `name`",
                                 where, name);
      }
      if (!names.insert(name).second) {
        throw_error<ConfigError>("{}: two parts have the name '{}': give one of them a `name`",
                                 where, name);
      }
      auto verifier = part.verifier == "row" ? std::make_unique<OfRow>(part.parameters, where)
                                             : make_verifier(part.verifier, part.parameters, where);
      parts_.push_back({name, part.weight, std::move(verifier)});
    }
  }

  std::vector<Score> score(std::span<const Sample> samples) override {
    std::vector<Score> scores;
    scores.reserve(samples.size());
    for (const Sample& sample : samples) scores.push_back(judge(sample));
    return scores;
  }

 private:
  struct Weighted {
    std::string name;
    double weight;
    std::unique_ptr<Verifier> verifier;
  };

  Score judge(const Sample& sample) const {
    Score total;
    total.reward = combine_ == Combine::kSum ? 0 : 1;
    for (const Weighted& part : parts_) {
      const Score score = part.verifier->judge(sample);
      if (score.error) return {0, {}, part.name + ": " + *score.error};
      total.parts[part.name] = score.reward;
      if (score.observation) total.observation = score.observation;
      if (combine_ == Combine::kSum) {
        total.reward += part.weight * score.reward;
      } else {
        total.reward *= std::pow(score.reward, part.weight);
      }
    }
    if (!std::isfinite(total.reward))
      return {
          0, {}, "the product of parts is not finite: a part is negative or 0 under its weight"};
    return total;
  }

  Combine combine_;
  std::vector<Weighted> parts_;
};

}  // namespace

std::unique_ptr<Reward> make_composite(const std::vector<Part>& parts, Combine combine) {
  return std::make_unique<Composite>(parts, combine);
}

}  // namespace heddle::reward
