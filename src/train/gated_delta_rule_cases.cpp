// The gated delta rule's cases and errors.
#include <ATen/TensorOperators.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softplus.h>
#include <fmt/format.h>

#include <array>
#include <memory>
#include <utility>

#include "ops/autograd.h"
#include "ops/gated_delta_net/gated_delta_net.h"
#include "train/operator_case_parts.h"

namespace heddle::train {
namespace {

using models::qwen3_5::Config;

struct DeltaHeads {
  std::int64_t keys, values, dim;
};

/// The data kinds of docs/gdn.md, "Numerics".
enum class DeltaData {
  kPublished,   ///< Decay logsigmoid(normal) / 16, a quarter of the heads at 0: published figures.
  kNoDecay,     ///< 0.
  kStrongGate,  ///< The decay of the random initialisation.
  kCorrelatedKeys,  ///< A common key and half as much noise, beta 0.9.
};

constexpr std::array<std::pair<DeltaData, const char*>, 4> kDeltaData = {
    {{DeltaData::kPublished, "logsigmoid/16"},
     {DeltaData::kNoDecay, "no decay"},
     {DeltaData::kStrongGate, "strong gate"},
     {DeltaData::kCorrelatedKeys, "correlated keys"}}};

ops::GatedDeltaRule::Inputs delta_inputs(const OperatorPlace& place, const DeltaHeads& heads,
                                         const std::vector<std::int32_t>& boundaries,
                                         DeltaData data = DeltaData::kPublished) {
  const std::int64_t tokens = boundaries.back();
  ops::GatedDeltaRule::Inputs in;
  in.q = random(place, {tokens, heads.keys, heads.dim});
  in.k = random(place, {tokens, heads.keys, heads.dim});
  in.v = random(place, {tokens, heads.values, heads.dim});
  const auto wide = at::TensorOptions().device(place.device).dtype(at::kFloat);
  in.g = at::log_sigmoid(at::randn({tokens, heads.values}, wide)) / 16;
  in.beta = at::sigmoid(at::randn({tokens, heads.values}, wide));
  switch (data) {
    case DeltaData::kPublished:
      in.g.narrow(1, 0, heads.values / 4).zero_();
      break;
    case DeltaData::kNoDecay:
      in.g.zero_();
      break;
    case DeltaData::kStrongGate:
      in.g = at::rand({heads.values}, wide) * -16 *
             at::softplus(at::randn({tokens, heads.values}, wide) + 1);
      break;
    case DeltaData::kCorrelatedKeys:
      in.k = random(place, {heads.keys, heads.dim}) + in.k / 2;
      in.beta.fill_(0.9);
      break;
  }
  in.sequences = ops::Sequences::from_host(boundaries, place.device);
  return in;
}

ops::Dims delta_dims(const DeltaHeads& heads) {
  return {{"num_k_heads", heads.keys},
          {"num_v_heads", heads.values},
          {"head_k_dim", heads.dim},
          {"head_v_dim", heads.dim}};
}

/// Least work and bytes of docs/gdn.md, section 1.6, for a bf16 chunked form of 64 tokens.
OperatorCase delta_case(const OperatorPlace& place, const DeltaHeads& heads,
                        const OperatorTokens& tokens) {
  const ops::KernelTable kernels = table_of(place, "gated_delta_rule", delta_dims(heads));
  const ops::GatedDeltaRule::Functions functions = kernels.get<ops::GatedDeltaRule>();
  const auto in = std::make_shared<ops::GatedDeltaRule::Inputs>(
      delta_inputs(place, heads, tokens.boundaries()));
  const auto saved =
      std::make_shared<ops::GatedDeltaRuleForward>(functions.forward(*in, /*keep=*/true));
  const at::Tensor d_o = random(place, in->v.sizes());
  const double token_heads = as_double(tokens.total() * heads.values),
               work = token_heads * as_double(heads.dim * heads.dim),
               groups = as_double(heads.keys) / as_double(heads.values),
               size = as_double(heads.dim) / 128;
  OperatorCase one;
  one.name =
      fmt::format("{}/{} heads of {}, {}", heads.keys, heads.values, heads.dim, tokens.describe());
  one.kernel = kernels.choices()[0].kernel;
  one.calls = {
      {"forward", [=] { functions.forward(*in, true); }, 10 * work,
       token_heads * size * (512 * groups + 900)},
      {"backward", [=] { functions.backward(*in, *saved, d_o, {}); }, 23 * work,
       token_heads * size * (1280 * groups + 2200)},
      {"inference", [=] { functions.forward(*in, false); }, 10 * work,
       token_heads * size * (512 * groups + 520)},
  };
  return one;
}

}  // namespace

std::vector<CaseMaker> published_gated_delta_rule_cases(const OperatorPlace& place) {
  std::vector<CaseMaker> cases;
  for (const auto& [keys, values] :
       {std::pair{16, 32}, {16, 16}, {16, 48}, {16, 64}, {32, 32}, {8, 24}, {4, 16}, {2, 8}}) {
    for (const auto& [batch, length] :
         {std::pair{4, 8192}, {1, 32768}, {8, 4096}, {1, 8192}, {4, 2048}, {8, 1024}, {1, 2048}}) {
      cases.push_back([=, keys = keys, values = values, batch = batch, length = length] {
        return delta_case(place, {keys, values, 128}, {batch, length, 0});
      });
    }
  }
  return cases;
}

std::vector<CaseMaker> gated_delta_rule_cases(const OperatorPlace& place, const Config& config,
                                              const OperatorTokens& tokens) {
  const DeltaHeads heads = {config.linear_num_key_heads, config.linear_num_value_heads,
                            config.linear_key_head_dim};
  return {[=] { return delta_case(place, heads, tokens); }};
}

namespace {

DeltaErrors errors_of(const OperatorPlace& place, std::int64_t length, DeltaData data,
                      const char* name) {
  const DeltaHeads heads = {2, 4, 128};
  const auto end = static_cast<std::int32_t>(length);
  ops::GatedDeltaRule::Inputs in = delta_inputs(place, heads, {0, end}, data);
  const at::Tensor d_o = random(place, in.v.sizes());
  const auto run = [&](const ops::GatedDeltaRule::Functions& functions,
                       const ops::GatedDeltaRule::Inputs& inputs, const at::Tensor& gradient) {
    const ops::GatedDeltaRuleForward forward = functions.forward(inputs, true);
    const ops::GatedDeltaRuleGradients g = functions.backward(inputs, forward, gradient, {});
    return std::array<at::Tensor, 6>{forward.o, g.q, g.k, g.v, g.g, g.beta};
  };
  const ops::NoGradient guard;
  const auto actual = run(
      table_of(place, "gated_delta_rule", delta_dims(heads)).get<ops::GatedDeltaRule>(), in, d_o);
  const OperatorPlace exact_place = {c10::Device(at::kCPU), at::kDouble, {true, {}, 0}};
  ops::GatedDeltaRule::Inputs exact = in;
  for (at::Tensor* x : {&exact.q, &exact.k, &exact.v, &exact.g, &exact.beta})
    *x = x->to(exact_place.device, at::kDouble);
  exact.sequences = ops::Sequences::from_host({0, end}, exact_place.device);
  const auto expected =
      run(table_of(exact_place, "gated_delta_rule", delta_dims(heads)).get<ops::GatedDeltaRule>(),
          exact, d_o.to(exact_place.device, at::kDouble));
  DeltaErrors errors = {name, {}};
  const char* const names[] = {"o", "dq", "dk", "dv", "dg", "dbeta"};
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const at::Tensor difference = actual[i].to(exact_place.device, at::kDouble) - expected[i];
    errors.of.emplace_back(names[i],
                           difference.norm().item<double>() / expected[i].norm().item<double>());
  }
  return errors;
}

}  // namespace

std::vector<DeltaErrors> gated_delta_rule_errors(const OperatorPlace& place, std::int64_t length) {
  std::vector<DeltaErrors> errors;
  for (const auto& [data, name] : kDeltaData)
    errors.push_back(errors_of(place, length, data, name));
  return errors;
}

}  // namespace heddle::train
