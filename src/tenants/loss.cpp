#include "tenants/loss.h"

#include <algorithm>
#include <cmath>

#include "base/errors.h"
#include "base/text.h"

namespace heddle::tenants {
namespace {

struct Input {
  const char* name;
  bool required;
};

/// One loss of the API.
struct LossKind {
  const char* name;
  std::vector<Input> inputs;         ///< Besides target_tokens.
  std::vector<const char*> numbers;  ///< From its configuration.
  LossValues (*values)(const Work&, std::span<const Datum>, std::span<const double>);
};

/// An input of a datum at all positions; `missing` where the datum has none.
void append(std::vector<double>& all, const Datum& datum, const char* name, double missing) {
  const auto it = datum.inputs.find(name);
  if (it == datum.inputs.end()) {
    all.insert(all.end(), datum.tokens.size(), missing);
  } else {
    all.insert(all.end(), it->second.begin(), it->second.end());
  }
}

std::vector<double> input_of(std::span<const Datum> data, const char* name, double missing = 0) {
  std::vector<double> all;
  for (const Datum& datum : data) append(all, datum, name, missing);
  return all;
}

/// -sum of w l.
LossValues cross_entropy(const Work&, std::span<const Datum> data,
                         std::span<const double> logprobs) {
  LossValues values;
  values.d_logprobs = input_of(data, "weights", 1);
  for (double& weight : values.d_logprobs) weight = -weight;
  for (std::size_t t = 0; t < logprobs.size(); ++t) {
    // A weight of 0 leaves the token out, even where it is impossible.
    const double d = values.d_logprobs[t];
    values.elementwise.push_back(d == 0 ? 0 : d * logprobs[t]);
    values.sum += values.elementwise.back();
  }
  return values;
}

const std::vector<LossKind>& kinds() {
  static const std::vector<LossKind> all = {
      {"cross_entropy", {{"weights", false}}, {}, cross_entropy},
  };
  return all;
}

const LossKind& kind_of(const std::string& name) {
  std::vector<std::string> names;
  for (const LossKind& kind : kinds()) {
    if (name == kind.name) return kind;
    names.emplace_back(kind.name);
  }
  throw_error<DataError>("loss_fn '{}' is not one of {}", name, fmt::join(names, ", "));
}

void check_inputs(const LossKind& kind, const Datum& datum, std::size_t i) {
  for (const Input& input : kind.inputs) {
    if (input.required && !datum.inputs.contains(input.name))
      throw_error<DataError>("datum {}: loss_fn {} needs the input '{}'", i, kind.name, input.name);
  }
  for (const auto& [name, values] : datum.inputs) {
    const auto is_it = [&](const Input& input) { return name == input.name; };
    if (std::none_of(kind.inputs.begin(), kind.inputs.end(), is_it))
      throw_error<DataError>("datum {}: loss_fn {} has no input '{}'", i, kind.name, name);
    if (values.size() != datum.tokens.size()) {
      throw_error<DataError>("datum {}: '{}' has {} values for {} tokens", i, name, values.size(),
                             datum.tokens.size());
    }
  }
}

}  // namespace

void check_loss(const Work& work) {
  const LossKind& kind = kind_of(work.loss_fn);
  for (const auto& [name, number] : work.config) {
    const auto is_it = [&, &key = name](const char* known) { return key == known; };
    if (std::none_of(kind.numbers.begin(), kind.numbers.end(), is_it))
      throw_error<DataError>("loss_fn_config: loss_fn {} has no '{}'", kind.name, name);
    if (std::isnan(number)) throw_error<DataError>("loss_fn_config: '{}' is not a number", name);
  }
  for (std::size_t i = 0; i < work.data.size(); ++i) check_inputs(kind, work.data[i], i);
}

LossValues loss_of(const Work& work, std::span<const Datum> data,
                   std::span<const double> logprobs) {
  return kind_of(work.loss_fn).values(work, data, logprobs);
}

}  // namespace heddle::tenants
