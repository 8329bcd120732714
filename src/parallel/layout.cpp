#include "parallel/layout.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.h"

namespace heddle::parallel {
namespace {

using comm::Dim;
using Counts = std::vector<std::pair<std::string, std::int64_t>>;

void add(Counts& counts, const std::string& name, std::int64_t count) {
  const auto known = std::pair(name, count);
  if (std::find(counts.begin(), counts.end(), known) == counts.end()) counts.push_back(known);
}

/// Counts that the ranks along tp must divide. Key/value heads that divide them are repeated.
Counts divided_by_tp(const models::Config& model, std::int64_t tp) {
  Counts counts;
  for (const models::LayerShape& layer : model.layers) {
    for (const models::Product& product : layer.products()) {
      const models::Cut& cut = product.cut;
      const bool is_shared = cut.is_repeated && tp % cut.pieces == 0;
      if (cut.along != models::Cut::Along::kNothing && !is_shared)
        add(counts, cut.counts, cut.pieces);
    }
  }
  return counts;
}

/// Counts that the ranks along tp and cp together must divide when heads move to ranks; key/value
/// heads are repeated where they are too few.
Counts divided_by_ulysses(const models::Config& model) {
  Counts counts;
  for (const models::LayerShape& layer : model.layers) {
    const auto [name, heads] = layer.mixer_heads();
    add(counts, name, heads);
  }
  return counts;
}

/// "num_key_value_heads 4 and ..." of what the degree does not divide; empty if it divides all.
std::string not_divided(std::int64_t degree, const Counts& counts) {
  std::vector<std::string> wrong;
  for (const auto& [name, count] : counts) {
    if (count % degree != 0) wrong.push_back(fmt::format("{} {}", name, count));
  }
  return fmt::format("{}", fmt::join(wrong, " and "));
}

std::int64_t nearest_degree(std::int64_t wanted, const Counts& counts) {
  std::vector<std::int64_t> numbers;
  for (const auto& [name, count] : counts) numbers.push_back(count);
  return comm::nearest_divisor(wanted, numbers);
}

[[noreturn]] void refuse(Dim dim, std::int64_t degree, const std::string& wrong,
                         std::int64_t nearest) {
  throw_error<ConfigError>(
      "parallel.{} is {}: it must divide {}; the nearest degree that does is {}", comm::name(dim),
      degree, wrong, nearest);
}

void check_tensor_ranks(std::int64_t tp, const models::Config& model) {
  const auto wrong_with = [&](std::int64_t degree) {
    return not_divided(degree, divided_by_tp(model, degree));
  };
  const std::string wrong = wrong_with(tp);
  if (wrong.empty()) return;
  std::int64_t nearest = 1;
  for (std::int64_t degree = 1; degree < 2 * tp; ++degree) {
    if (std::abs(degree - tp) < std::abs(nearest - tp) && wrong_with(degree).empty())
      nearest = degree;
  }
  refuse(Dim::kTp, tp, wrong, nearest);
}

void check_ulysses(const comm::Mesh& mesh, const models::Config& model) {
  const std::int64_t tp = mesh.size(Dim::kTp), cp = mesh.size(Dim::kCp);
  Counts counts = divided_by_ulysses(model);
  const std::string wrong = not_divided(tp * cp, counts);
  if (wrong.empty()) return;
  for (auto& [name, count] : counts) count /= tp;
  throw_error<ConfigError>(
      "parallel.cp is {} with parallel.cp_method ulysses: tp x cp, {}, must divide {}; the nearest "
      "degree that does is {}, and cp_method state takes any",
      cp, tp * cp, wrong, nearest_degree(cp, counts));
}

void check_experts(const comm::Mesh& mesh, const models::Config& model) {
  const std::int64_t ep = mesh.size(Dim::kEp);
  if (ep == 1) return;
  const nn::MoeDims* moe = model.moe();
  if (moe == nullptr)
    throw_error<ConfigError>("parallel.ep is {}: this model has no experts, so it must be 1", ep);
  if (moe->num_experts % ep == 0) return;  // that it divides the ranks is the mesh's own rule
  const std::int64_t stage = ep * mesh.size(Dim::kEfsdp) * mesh.size(Dim::kEdp);
  std::vector<std::int64_t> elsewhere;
  for (std::int64_t degree = 2; degree <= moe->num_experts; ++degree) {
    if (moe->num_experts % degree == 0 && stage % degree != 0) elsewhere.push_back(degree);
  }
  const std::string hint =
      elsewhere.empty() ? ""
                        : fmt::format("; {} divide the experts but need another number of ranks",
                                      fmt::join(elsewhere, ", "));
  throw_error<ConfigError>(
      "parallel.ep is {}: it must divide num_experts {} and tp x cp x fsdp x dp {}; the nearest "
      "degree that does is {}{}",
      ep, moe->num_experts, stage, comm::nearest_divisor(ep, {moe->num_experts, stage}), hint);
}

/// Every stage of the pipeline has a layer at least.
void check_stages(const comm::Mesh& mesh, const models::Config& model, std::int64_t chunks) {
  const std::int64_t pp = mesh.size(Dim::kPp), layers = model.num_hidden_layers();
  if (pp * chunks <= layers) return;
  const std::string interleaved =
      chunks == 1 ? "" : fmt::format(" with {} chunks of layers on each (pp_chunks)", chunks);
  throw_error<ConfigError>(
      "parallel.pp is {}{}: {} stages need as many layers, and the model has {}; the nearest "
      "degree "
      "that works is {}",
      pp, interleaved, pp * chunks, layers, std::max<std::int64_t>(1, layers / chunks));
}

}  // namespace

void check_layout(const comm::Mesh& mesh, const models::Config& model,
                  ops::ContextMethod context_method, std::int64_t stage_chunks) {
  check_tensor_ranks(mesh.size(Dim::kTp), model);
  if (mesh.size(Dim::kCp) > 1 && context_method == ops::ContextMethod::kUlysses)
    check_ulysses(mesh, model);
  check_experts(mesh, model);
  check_stages(mesh, model, stage_chunks);
}

}  // namespace heddle::parallel
