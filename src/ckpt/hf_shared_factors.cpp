#include "ckpt/hf_shared_factors.h"

#include <ATen/Parallel.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <span>

namespace heddle::ckpt {
namespace {

/// Whether the data is one part of so many bytes again and again.
bool repeats(std::span<const std::byte> data, std::size_t part) {
  return data.size() <= part ||
         std::memcmp(data.data(), data.data() + part, data.size() - part) == 0;
}

/// Whether A [E * rank, in] has the same [rank, in] for each of `experts`.
bool has_one_a(const StoredTensor& a, std::size_t experts) {
  return repeats(a.data, a.data.size() / experts);
}

/// Whether B [out, rank * E] has one number for all of `experts`, which are inner.
bool has_one_b(const StoredTensor& b, std::size_t experts) {
  const std::size_t element = b.data.size() / static_cast<std::size_t>(b.numel()),
                    number = element * experts;
  for (std::size_t first = 0; first < b.data.size(); first += number)
    if (!repeats(b.data.subspan(first, number), element)) return false;
  return true;
}

bool is_shared(const LoraPair& pair, nn::ExpertWeights& weights) {
  // Whoever fills the factors names shapes that do not fit.
  if (pair.a.shape[0] != pair.rank * weights.experts() || pair.b.numel() == 0) return false;
  const bool is_input = weights.hidden_side() == nn::ExpertWeights::HiddenSide::kInput;
  const StoredTensor& outer = is_input ? pair.a : pair.b;
  const auto experts = static_cast<std::size_t>(weights.experts());
  const bool is_one = is_input ? has_one_a(outer, experts) : has_one_b(outer, experts);
  outer.drop(0, outer.data.size());
  return is_one;
}

}  // namespace

nn::ExpertFactors expert_factors_of(const AdapterDirectory& directory,
                                    const std::vector<ExpertPair>& pairs) {
  if (directory.form() == AdapterForm::kCompact) return nn::ExpertFactors::kSharedOuter;
  std::atomic<bool> are_shared = !pairs.empty();
  at::parallel_for(0, std::ssize(pairs), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last && are_shared; ++i) {
      const auto& [pair, weights] = pairs[static_cast<std::size_t>(i)];
      if (!is_shared(*pair, *weights)) are_shared = false;
    }
  });
  return are_shared ? nn::ExpertFactors::kSharedOuter : nn::ExpertFactors::kPairs;
}

}  // namespace heddle::ckpt
