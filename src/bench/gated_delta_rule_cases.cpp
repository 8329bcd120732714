// The gated delta rule's cases and errors.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/log_sigmoid.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softplus.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <memory>
#include <utility>

#include "base/errors.h"
#include "base/text.h"
#include "bench/operator_case_parts.h"
#include "ops/autograd.h"
#include "ops/gated_delta_net/gated_delta_net.h"

namespace heddle::bench {
namespace {

using models::Config;

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

ops::OpRequest delta_request(const DeltaHeads& heads) {
  return ops::OpRequest::of<ops::GatedDeltaRule>({.num_k_heads = heads.keys,
                                                  .num_v_heads = heads.values,
                                                  .head_k_dim = heads.dim,
                                                  .head_v_dim = heads.dim});
}

std::string text_of(const DeltaHeads& heads) {
  return fmt::format("{}/{}", heads.keys, heads.values);
}

/// Least work and bytes of docs/gdn.md, section 10, for a bf16 chunked form of 64 tokens.
OperatorCase delta_case(const OperatorPlace& place, const DeltaHeads& heads,
                        const std::vector<std::int32_t>& boundaries, const std::string& layout) {
  const ops::KernelTable kernels = table_of(place, {delta_request(heads)});
  const ops::GatedDeltaRule::Functions functions = kernels.get<ops::GatedDeltaRule>();
  const auto in =
      std::make_shared<ops::GatedDeltaRule::Inputs>(delta_inputs(place, heads, boundaries));
  const auto saved =
      std::make_shared<ops::GatedDeltaRuleForward>(functions.forward(*in, /*keep=*/true));
  const at::Tensor d_o = random(place, in->v.sizes());
  const double token_heads = as_double(boundaries.back() * heads.values),
               work = token_heads * as_double(heads.dim * heads.dim),
               groups = as_double(heads.keys) / as_double(heads.values),
               size = as_double(heads.dim) / 128;
  OperatorCase one;
  one.name = fmt::format("{} heads of {}, {}", text_of(heads), heads.dim, layout);
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

using Lengths = std::vector<std::int32_t>;

/// "4 x 8192", "28672+4096".
std::string text_of(const Lengths& lengths) {
  const bool equal =
      std::adjacent_find(lengths.begin(), lengths.end(), std::not_equal_to<>()) == lengths.end();
  if (equal) return fmt::format("{} x {}", lengths.size(), lengths[0]);
  return fmt::format("{}", fmt::join(lengths, "+"));
}

struct PublishedShapes {
  std::vector<DeltaHeads> heads;
  std::vector<Lengths> layouts;
};

/// FlashQLA's forward and backward benchmarks. The backward's sequences are cut at random points,
/// torch.randperm with seed 42. What fills a GPU comes first: a peer may tune itself to the first
/// shape of some heads.
std::vector<PublishedShapes> published_shapes() {
  const auto equal = [](std::size_t count, std::int32_t length) { return Lengths(count, length); };
  return {{{{16, 32}, {16, 16}, {16, 48}, {16, 64}, {32, 32}, {8, 24}, {4, 16}, {2, 8}},
           {equal(4, 8192),
            equal(1, 32768),
            equal(8, 4096),
            equal(2, 16384),
            equal(1, 16384),
            equal(1, 8192),
            equal(4, 2048),
            equal(8, 1024),
            equal(2, 4096),
            equal(1, 4096),
            equal(1, 2048),
            {28672, 4096},
            {24576, 8192},
            {8192, 24576},
            {4096, 28672},
            {12288, 4096},
            {6144, 2048},
            {2048, 6144},
            {1024, 7168}}},
          {{{16, 32}, {8, 16}, {4, 8}, {2, 4}},
           {{3274, 1029, 2909, 5061, 2011, 3793, 9932, 4759},
            {7212, 7072, 13725, 4759},
            {7212, 25556},
            equal(1, 32768),
            {161, 1928, 3157, 563, 1244, 229, 177, 733},
            {5809, 1244, 406, 733},
            {7053, 1139},
            equal(1, 8192)}}};
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Throws unless each of `wanted` is one of `known`.
void expect_known(const char* option, const std::vector<std::string>& wanted,
                  const std::vector<std::string>& known) {
  for (const std::string& name : wanted) {
    if (!contains(known, name)) {
      throw_error<ConfigError>("bench gdn: {}: no published shape has '{}'; known: {}", option,
                               name, text::join(known, ", "));
    }
  }
}

}  // namespace

std::vector<CaseMaker> published_gated_delta_rule_cases(const OperatorPlace& place,
                                                        const DeltaSelection& selection) {
  std::vector<std::string> wanted_heads, known_heads, known_layouts, shapes;
  for (const DeltaHeads& heads : selection.heads) wanted_heads.push_back(text_of(heads));
  std::vector<CaseMaker> cases;
  for (const PublishedShapes& table : published_shapes()) {
    for (const DeltaHeads& heads : table.heads) {
      for (const Lengths& lengths : table.layouts) {
        const std::string head_text = text_of(heads), layout = text_of(lengths);
        if (!contains(known_heads, head_text)) known_heads.push_back(head_text);
        if (!contains(known_layouts, layout)) known_layouts.push_back(layout);
        if (contains(shapes, head_text + layout)) continue;
        shapes.push_back(head_text + layout);
        if (!wanted_heads.empty() && !contains(wanted_heads, head_text)) continue;
        if (!selection.layouts.empty() && !contains(selection.layouts, layout)) continue;
        Lengths boundaries = {0};
        for (const std::int32_t length : lengths) boundaries.push_back(boundaries.back() + length);
        cases.push_back([=] { return delta_case(place, heads, boundaries, layout); });
      }
    }
  }
  expect_known("--heads", wanted_heads, known_heads);
  expect_known("--layout", selection.layouts, known_layouts);
  if (cases.empty()) {
    throw_error<ConfigError>("bench gdn: no published shape has both --heads {} and --layout {}",
                             text::join(wanted_heads, ", "), text::join(selection.layouts, ", "));
  }
  return cases;
}

DeltaHeads delta_heads(const Config& config) {
  const nn::GatedDeltaNetDims* dims = config.gated_delta_net();
  if (dims == nullptr) throw_error<ConfigError>("bench gdn: the preset has no Gated DeltaNet");
  return {dims->num_key_heads, dims->num_value_heads, dims->key_head_dim};
}

std::vector<CaseMaker> gated_delta_rule_cases(const OperatorPlace& place, const Config& config,
                                              const OperatorTokens& tokens) {
  const DeltaHeads heads = delta_heads(config);
  return {[=] { return delta_case(place, heads, tokens.boundaries(), tokens.describe()); }};
}

namespace {

constexpr const char* kErrorNames[] = {"o", "dq", "dk", "dv", "dg", "dbeta", "dS0"};
using Results = std::array<at::Tensor, std::size(kErrorNames)>;

Results run(const ops::GatedDeltaRule::Functions& functions,
            const ops::GatedDeltaRule::Inputs& inputs, const at::Tensor& d_o) {
  const ops::GatedDeltaRuleForward forward = functions.forward(inputs, true);
  const ops::GatedDeltaRuleGradients d = functions.backward(inputs, forward, d_o, {});
  return {forward.o, d.q, d.k, d.v, d.g, d.beta, d.initial_state};
}

/// The kernel of this name in double.
ops::GatedDeltaRule::Functions exact_functions(const char* kernel, c10::Device device,
                                               const DeltaHeads& heads) {
  const OperatorPlace place = {device, at::kDouble, {true, {{"gated_delta_rule", kernel}}}};
  return table_of(place, {delta_request(heads)}).get<ops::GatedDeltaRule>();
}

/// By this kernel in double, one key head and its value heads at a time: of all at once the tensors
/// of a long sequence would not fit.
Results exact_results(const char* kernel, c10::Device device,
                      const ops::GatedDeltaRule::Inputs& inputs, const at::Tensor& d_o) {
  const std::int64_t keys = inputs.q.size(1), group = inputs.v.size(1) / keys;
  const auto functions = exact_functions(kernel, device, {1, group, inputs.q.size(2)});
  std::array<ops::Tensors, std::size(kErrorNames)> parts;
  for (std::int64_t h = 0; h < keys; ++h) {
    const auto of_key = [&](const at::Tensor& x) {
      return x.narrow(1, h, 1).to(device, at::kDouble).contiguous();
    };
    const auto of_values = [&](const at::Tensor& x) {
      return x.narrow(1, h * group, group).to(device, at::kDouble).contiguous();
    };
    ops::GatedDeltaRule::Inputs in;
    in.q = of_key(inputs.q);
    in.k = of_key(inputs.k);
    in.v = of_values(inputs.v);
    in.g = of_values(inputs.g);
    in.beta = of_values(inputs.beta);
    in.initial_state = of_values(inputs.initial_state);
    in.sequences = ops::Sequences::from_host(inputs.sequences.cu_seqlens_host, device);
    const Results results = run(functions, in, of_values(d_o));
    for (std::size_t i = 0; i < parts.size(); ++i) parts[i].push_back(results[i]);
  }
  Results all;
  for (std::size_t i = 0; i < parts.size(); ++i) all[i] = at::cat(parts[i], 1);
  return all;
}

std::vector<std::pair<std::string, double>> errors_between(const Results& found,
                                                           const Results& expected) {
  std::vector<std::pair<std::string, double>> errors;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const at::Tensor difference = found[i].to(expected[i].device(), at::kDouble) - expected[i];
    errors.emplace_back(kErrorNames[i],
                        difference.norm().item<double>() / expected[i].norm().item<double>());
  }
  return errors;
}

ops::GatedDeltaRule::Inputs error_inputs(const OperatorPlace& place, const DeltaHeads& heads,
                                         std::int64_t length, DeltaData data) {
  auto in = delta_inputs(place, heads, {0, static_cast<std::int32_t>(length)}, data);
  in.initial_state = at::randn({1, heads.values, heads.dim, heads.dim}, in.g.options());
  return in;
}

/// Throws unless the reference in double is the recurrence.
void check_reference(const OperatorPlace& place, c10::Device exact_device, DeltaHeads heads) {
  constexpr std::int64_t kTokens = 200;
  heads = {1, heads.values / heads.keys, heads.dim};
  for (const auto& [data, data_name] : kDeltaData) {
    const auto in = error_inputs(place, heads, kTokens, data);
    const at::Tensor d_o = random(place, in.v.sizes());
    const Results expected = exact_results("cpu.sequential", c10::Device(at::kCPU), in, d_o);
    for (const auto& [name, error] :
         errors_between(exact_results("reference", exact_device, in, d_o), expected)) {
      if (error > 1e-9) {
        throw_error<Error>(
            "gated_delta_rule: {} of the reference in double differs from the "
            "recurrence by {:.1e} on data '{}'",
            name, error, data_name);
      }
    }
  }
}

}  // namespace

std::vector<DeltaErrors> gated_delta_rule_errors(const OperatorPlace& place,
                                                 const DeltaHeads& heads, std::int64_t length) {
  const ops::NoGradient guard;
  const c10::Device exact_device = place.device.is_cuda() ? place.device : c10::Device(at::kCPU);
  check_reference(place, exact_device, heads);
  const ops::KernelTable kernels = table_of(place, {delta_request(heads)});
  std::vector<DeltaErrors> errors;
  for (const auto& [data, name] : kDeltaData) {
    const auto in = error_inputs(place, heads, length, data);
    const at::Tensor d_o = random(place, in.v.sizes());
    const Results found = run(kernels.get<ops::GatedDeltaRule>(), in, d_o);
    errors.push_back({name, kernels.choices()[0].kernel,
                      errors_between(found, exact_results("reference", exact_device, in, d_o))});
  }
  return errors;
}

}  // namespace heddle::bench
