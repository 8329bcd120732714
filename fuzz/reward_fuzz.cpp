// The first byte names a verifier, and what follows up to a zero byte is a completion, the rest the
// row's answer. A score is finite, or there is a reason why there is none. The same bytes as JSON
// are the answer of a user's reward program.
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/errors.h"
#include "base/json.h"
#include "reward/verifiers.h"
#include "reward/wire.h"

namespace {

using namespace heddle::reward;

const std::vector<std::unique_ptr<Verifier>>& verifiers() {
  static const auto all = [] {
    std::vector<std::unique_ptr<Verifier>> made;
    for (const char* name :
         {"exact", "numeric", "math", "choice", "json", "length", "repetition"}) {
      const Json parameters =
          std::string_view(name) == "length" ? Json{{"target", 10}, {"max", 40}} : Json::object();
      made.push_back(make_verifier(name, parameters, "fuzz"));
    }
    return made;
  }();
  return all;
}

void require_finite(const Score& score) {
  if (!std::isfinite(score.reward)) std::abort();
  for (const auto& [name, value] : score.parts)
    if (!std::isfinite(value)) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const unsigned char* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::size_t zero = input.find('\0');
  Sample sample;
  sample.completion = input.substr(0, zero);
  sample.truth = std::string(zero == std::string_view::npos ? "42" : input.substr(zero + 1));
  require_finite(verifiers()[data[0] % verifiers().size()]->judge(sample));
  try {
    require_finite(from_wire(heddle::json::parse(input)));
  } catch (const heddle::DataError&) {
  }
  return 0;
}
