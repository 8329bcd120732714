// The simulation's fused operators against plain formulas and their derivatives by autograd.
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/triu.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>

#include "device/sim/simulation.h"
#include "testing/message_of.h"

namespace heddle::device::sim {
namespace {

using heddle::testing::message_of;
using ::testing::HasSubstr;
using Named = std::map<std::string, c10::IValue>;

const c10::Device kNpu(c10::DeviceType::PrivateUse1, 0);

std::vector<c10::IValue> call(const std::string& name, const Named& arguments,
                              const char* overload = "") {
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(("npu::" + name).c_str(), overload);
  torch::jit::Stack stack;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const auto given = arguments.find(argument.name());
    if (given != arguments.end()) {
      stack.push_back(given->second);
    } else {
      stack.push_back(argument.default_value().value_or(c10::IValue()));
    }
  }
  op.callBoxed(stack);
  return stack;
}

at::Tensor cpu(const c10::IValue& value) { return value.toTensor().cpu(); }

void expect_close(const at::Tensor& found, const at::Tensor& expected, double tolerance = 1e-5) {
  ASSERT_EQ(found.sizes(), expected.sizes());
  const at::Tensor exact = expected.detach().to(at::kDouble);
  EXPECT_LE((found.to(at::kDouble) - exact).abs().max().item<double>(),
            tolerance * std::max(1.0, exact.abs().max().item<double>()));
}

at::Tensor leaf(at::IntArrayRef sizes) { return at::randn(sizes).set_requires_grad(true); }

class SimulatedOperators : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { start(); }
  static at::Tensor npu(const at::Tensor& x) { return x.detach().to(kNpu); }
};

TEST_F(SimulatedOperators, Swiglu) {
  const at::Tensor x = leaf({5, 14}), g = at::randn({5, 7});
  const auto halves = x.chunk(2, -1);
  const at::Tensor y = at::silu(halves[0]) * halves[1];
  y.backward(g);
  expect_close(cpu(call("npu_swiglu", {{"input", npu(x)}})[0]), y);
  expect_close(cpu(call("npu_swiglu_backward", {{"grad_output", npu(g)}, {"input", npu(x)}})[0]),
               x.grad());
}

TEST_F(SimulatedOperators, RotaryMul) {
  const at::Tensor x = leaf({1, 3, 2, 8}), r1 = leaf({1, 3, 1, 8}), r2 = leaf({1, 3, 1, 8}),
                   g = at::randn({1, 3, 2, 8});
  const at::Tensor turned = at::cat({-x.slice(-1, 4, 8), x.slice(-1, 0, 4)}, -1);
  const at::Tensor y = x * r1 + turned * r2;
  y.backward(g);
  expect_close(
      cpu(call("npu_rotary_mul", {{"input", npu(x)}, {"r1", npu(r1)}, {"r2", npu(r2)}})[0]), y);
  const auto grads = call("npu_rotary_mul_backward",
                          {{"grad", npu(g)}, {"input", npu(x)}, {"r1", npu(r1)}, {"r2", npu(r2)}});
  expect_close(cpu(grads[0]), x.grad());
  expect_close(cpu(grads[1]), r1.grad());
  expect_close(cpu(grads[2]), r2.grad());
}

TEST_F(SimulatedOperators, RmsNorms) {
  const at::Tensor x = leaf({5, 33}), w = leaf({33}), g = at::randn({5, 33});
  const at::Tensor rstd = at::rsqrt((x * x).mean({-1}, true) + 1e-6), y = x * rstd * w;
  y.backward(g);
  const auto out = call("npu_rms_norm", {{"input", npu(x)}, {"gamma", npu(w)}});
  expect_close(cpu(out[0]), y);
  expect_close(cpu(out[1]), rstd);
  const auto grads = call("npu_rms_norm_backward",
                          {{"dy", npu(g)}, {"input", npu(x)}, {"gamma", npu(w)}, {"rstd", out[1]}});
  expect_close(cpu(grads[0]), x.grad());
  expect_close(cpu(grads[1]), w.grad());
  expect_close(cpu(call("npu_gemma_rms_norm", {{"input", npu(x)}, {"gamma", npu(w)}})[0]),
               x * rstd * (w + 1));
  EXPECT_THAT(message_of([&] {
                call("npu_rms_norm", {{"input", npu(x)}, {"gamma", npu(w).to(at::kBFloat16)}});
              }),
              HasSubstr("one dtype"));
}

TEST_F(SimulatedOperators, CrossEntropy) {
  const at::Tensor x = leaf({4, 9});
  const at::Tensor target = at::tensor({3, -100, 0, 8}, at::kLong);
  for (const char* reduction : {"none", "sum", "mean"}) {
    const int kind = std::string(reduction) == "none"   ? 0
                     : std::string(reduction) == "mean" ? 1
                                                        : 2;
    if (x.grad().defined()) x.mutable_grad() = at::Tensor();
    const at::Tensor loss = at::cross_entropy_loss(x, target, {}, kind);
    const at::Tensor g = kind == 0 ? at::randn({4}) : at::ones({1});
    loss.backward(g.view(loss.sizes()));
    const Named shared = {{"target", npu(target)}, {"reduction", std::string(reduction)}};
    Named forward = shared, backward = shared;
    forward["input"] = npu(x);
    const auto out = call("npu_cross_entropy_loss", forward);
    expect_close(cpu(out[0]), loss.view({-1}));
    backward["grad_loss"] = npu(g);
    backward["log_prob"] = out[1];
    expect_close(cpu(call("npu_cross_entropy_loss_backward", backward)[0]), x.grad());
  }
}

TEST_F(SimulatedOperators, ApplyAdamWTakesTheStepOfItsFormula) {
  const at::Tensor p = npu(at::full({3}, 2.0)), m = npu(at::full({3}, 0.1)),
                   v = npu(at::full({3}, 0.04)), g = npu(at::full({3}, 0.5));
  const double lr = 0.1, b1 = 0.9, b2 = 0.99, eps = 1e-8, decay = 0.01;
  call("npu_apply_adam_w",
       {{"beta1_power", b1 * b1},
        {"beta2_power", b2 * b2},
        {"lr", lr},
        {"weight_decay", decay},
        {"beta1", b1},
        {"beta2", b2},
        {"epsilon", eps},
        {"grad", g},
        {"out", std::vector<at::Tensor>{p, m, v}}},
       "out");
  const double m1 = b1 * 0.1 + (1 - b1) * 0.5, v1 = b2 * 0.04 + (1 - b2) * 0.25;
  const double step = m1 / (1 - b1 * b1 * b1) / (std::sqrt(v1 / (1 - b2 * b2 * b2)) + eps);
  EXPECT_NEAR(p.cpu()[2].item<double>(), 2 - lr * step - lr * decay * 2, 1e-6);
  EXPECT_NEAR(m.cpu()[0].item<double>(), m1, 1e-7);
  EXPECT_NEAR(v.cpu()[0].item<double>(), v1, 1e-7);
}

TEST_F(SimulatedOperators, TokensAreSortedByExpertAndBack) {
  const at::Tensor experts = at::tensor({2, 0, 1, 2, 0, 1}, at::kLong).view({3, 2});
  const at::Tensor x = at::arange(6, at::kBFloat16).view({3, 2}).clone().set_requires_grad(true);
  const at::Tensor p = at::tensor({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}).to(at::kBFloat16).view({3, 2});
  const auto out = call("npu_moe_token_permute", {{"tokens", npu(x)}, {"indices", npu(experts)}});
  expect_close(cpu(out[0]), x.index_select(0, at::tensor({0, 2, 1, 2, 0, 1}, at::kLong)));
  expect_close(cpu(out[1]), at::tensor({4, 0, 2, 5, 1, 3}, at::kInt));
  const at::Tensor y = x * p.sum({1}, true);
  y.backward(at::ones({3, 2}, at::kBFloat16));
  expect_close(
      cpu(call("npu_moe_token_unpermute",
               {{"permuted_tokens", out[0]}, {"sorted_indices", out[1]}, {"probs", npu(p)}})[0]),
      y);
  const auto grads = call("npu_moe_token_unpermute_grad",
                          {{"permuted_tokens", out[0]},
                           {"grad_unpermuted_tokens", npu(at::ones({3, 2}, at::kBFloat16))},
                           {"sorted_indices", out[1]},
                           {"probs", npu(p)}});
  expect_close(cpu(grads[1]), x.sum({1}, true).expand({3, 2}));
  expect_close(cpu(call("npu_moe_token_permute_grad", {{"tokens", npu(x)},
                                                       {"grad_permuted_tokens", grads[0]},
                                                       {"indices", npu(experts)},
                                                       {"sorted_indices", out[1]}})[0]),
               x.grad());
}

TEST_F(SimulatedOperators, GroupedMatmulOfRowsAndOfTheInnerDimension) {
  const at::Tensor x = at::randn({7, 5}), w = at::randn({3, 5, 4}), g = at::randn({7, 4});
  const at::Tensor ends = at::tensor({3, 3, 7}, at::kLong);
  const auto run = [&](const at::Tensor& a, const at::Tensor& b, std::int64_t type) {
    return call("npu_grouped_matmul", {{"x", std::vector<at::Tensor>{npu(a)}},
                                       {"weight", std::vector<at::Tensor>{npu(b)}},
                                       {"group_list", npu(ends)},
                                       {"split_item", std::int64_t{3}},
                                       {"group_type", type}})[0]
        .toTensorVector()[0]
        .cpu();
  };
  expect_close(run(x, w, 0), at::cat({x.slice(0, 0, 3).matmul(w[0]), x.slice(0, 3).matmul(w[2])}));
  const at::Tensor outer = run(x.t(), g, 2);
  expect_close(outer[0], x.slice(0, 0, 3).t().matmul(g.slice(0, 0, 3)));
  EXPECT_EQ(outer[1].abs().max().item<float>(), 0);
}

at::Tensor compressed_mask() { return at::ones({2048, 2048}, at::kBool).triu(1); }

/// Sequences of 5 and 1 tokens with 4 query heads on 2 key heads.
Named attention_arguments(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& mask) {
  return {{"query", q.detach().to(kNpu)},
          {"key", k.detach().to(kNpu)},
          {"value", v.detach().to(kNpu)},
          {"head_num", q.size(1)},
          {"input_layout", std::string("TND")},
          {"atten_mask", mask.to(kNpu)},
          {"actual_seq_qlen", std::vector<std::int64_t>{5, 6}},
          {"actual_seq_kvlen", std::vector<std::int64_t>{5, 6}},
          {"sparse_mode", std::int64_t{3}}};
}

TEST_F(SimulatedOperators, FusionAttentionIsCausalWithinEachSequence) {
  const at::Tensor q = leaf({6, 4, 8}), k = leaf({6, 2, 8}), v = leaf({6, 2, 8}),
                   g = at::randn({6, 4, 8});
  std::vector<at::Tensor> parts;
  for (const auto& [begin, end] : {std::pair{0, 5}, {5, 6}}) {
    const auto heads = [&, begin = begin, end = end](const at::Tensor& x) {
      return x.slice(0, begin, end).transpose(0, 1);
    };
    const at::Tensor scores =
        heads(q).matmul(heads(k).repeat_interleave(2, 0).transpose(1, 2)) * 0.3;
    const at::Tensor above = at::ones({end - begin, end - begin}, at::kBool).triu(1);
    parts.push_back(at::softmax(scores.masked_fill(above, -1e30), -1)
                        .matmul(heads(v).repeat_interleave(2, 0))
                        .transpose(0, 1));
  }
  const at::Tensor o = at::cat(parts);
  o.backward(g);
  Named arguments = attention_arguments(q, k, v, compressed_mask());
  arguments["scale"] = 0.3;
  const auto out = call("npu_fusion_attention", arguments);
  expect_close(cpu(out[0]), o);
  EXPECT_EQ(out[1].toTensor().sizes(), (std::vector<std::int64_t>{6, 4, 8}));
  arguments.erase("scale");
  arguments["scale_value"] = 0.3;
  arguments["dy"] = npu(g);
  arguments["softmax_max"] = out[1];
  arguments["softmax_sum"] = out[2];
  arguments["softmax_in"] = out[3];
  arguments["attention_in"] = out[0];
  const auto grads = call("npu_fusion_attention_grad", arguments);
  expect_close(cpu(grads[0]), q.grad());
  expect_close(cpu(grads[1]), k.grad());
  expect_close(cpu(grads[2]), v.grad());
}

TEST_F(SimulatedOperators, ChunkGatedDeltaRuleFollowsTheRecurrence) {
  const std::int64_t T = 5, K = 128;
  const auto half = [](const at::Tensor& x) { return x.to(at::kBFloat16); };
  const at::Tensor q = half(at::randn({T, 1, K})), k = half(at::randn({T, 1, K}) / 11),
                   v = half(at::randn({T, 2, K})), beta = half(at::full({T, 2}, 0.5)),
                   g = at::full({T, 2}, -0.25), state = half(at::zeros({2, 2, K, K}));
  const at::Tensor on_device = npu(state);
  const auto out =
      call("npu_chunk_gated_delta_rule", {{"query", npu(q)},
                                          {"key", npu(k)},
                                          {"value", npu(v)},
                                          {"beta", npu(beta)},
                                          {"initial_state", on_device},
                                          {"actual_seq_lengths", npu(at::tensor({3, 2}, at::kInt))},
                                          {"scale", 0.1},
                                          {"g", npu(g)}});
  // The second head of the second sequence, in float64: S [K, V].
  at::Tensor S = at::zeros({K, K}, at::kDouble);
  for (std::int64_t t = 3; t < T; ++t) {
    const at::Tensor key = k[t][0].to(at::kDouble), query = q[t][0].to(at::kDouble) * 0.1;
    S = S * std::exp(-0.25);
    const at::Tensor error = (v[t][1].to(at::kDouble) - key.matmul(S)) * 0.5;
    S = S + key.unsqueeze(1) * error.unsqueeze(0);
    expect_close(cpu(out[0])[t][1], query.matmul(S), 1e-2);
  }
  expect_close(cpu(out[1])[1][1], S.t(), 1e-2);
  expect_close(on_device.cpu()[1][1], S.t(), 1e-2);  // the state is input and output
}

using SimulatedOperatorRule = SimulatedOperators;

TEST_F(SimulatedOperatorRule, DenseMask) {
  const at::Tensor x = at::randn({6, 2, 8});
  Named arguments = attention_arguments(x, x, x, at::ones({1, 1, 6, 6}, at::kBool).triu(1));
  EXPECT_THAT(message_of([&] { call("npu_fusion_attention", arguments); }),
              HasSubstr("rule dense-mask"));
  arguments["atten_mask"] = npu(at::ones({6, 6}, at::kBool).triu(1));
  arguments["sparse_mode"] = std::int64_t{0};
  EXPECT_THAT(message_of([&] { call("npu_fusion_attention", arguments); }),
              HasSubstr("rule dense-mask"));
  EXPECT_EQ(message_of([&] {
              call("npu_fusion_attention", attention_arguments(x, x, x, compressed_mask()));
            }),
            "(no error)");
}

TEST_F(SimulatedOperatorRule, MaskShape) {
  const at::Tensor x = at::randn({6, 2, 8});
  const at::Tensor right = compressed_mask();
  for (const at::Tensor& wrong : {at::ones({1024, 1024}, at::kBool).triu(1), right.to(at::kFloat),
                                  right.logical_not(), at::ones({2048, 2048}, at::kBool).triu(0)}) {
    EXPECT_THAT(
        message_of([&] { call("npu_fusion_attention", attention_arguments(x, x, x, wrong)); }),
        HasSubstr("rule mask-shape"));
  }
  EXPECT_EQ(message_of([&] { call("npu_fusion_attention", attention_arguments(x, x, x, right)); }),
            "(no error)");
}

TEST_F(SimulatedOperatorRule, Lengths) {
  const at::Tensor x = at::randn({6, 2, 8});
  for (const std::vector<std::int64_t>& wrong :
       {std::vector<std::int64_t>{5, 1}, {5}, {0, 5, 6}, {}}) {
    Named arguments = attention_arguments(x, x, x, compressed_mask());
    arguments["actual_seq_qlen"] = wrong;
    EXPECT_THAT(message_of([&] { call("npu_fusion_attention", arguments); }),
                HasSubstr("rule lengths"));
  }
  Named right = attention_arguments(x, x, x, compressed_mask());
  EXPECT_EQ(message_of([&] { call("npu_fusion_attention", right); }), "(no error)");
}

TEST_F(SimulatedOperatorRule, Experts) {
  const auto product = [&](std::int64_t experts) {
    return message_of([&] {
      call("npu_grouped_matmul",
           {{"x", std::vector<at::Tensor>{npu(at::ones({experts, 2}))}},
            {"weight", std::vector<at::Tensor>{npu(at::ones({experts, 2, 2}))}},
            {"group_list", npu(at::arange(1, experts + 1, at::kLong))},
            {"split_item", std::int64_t{3}},
            {"group_type", std::int64_t{0}}});
    });
  };
  EXPECT_THAT(product(129), HasSubstr("rule experts"));
  EXPECT_EQ(product(128), "(no error)");
}

TEST_F(SimulatedOperatorRule, GdnLimits) {
  const auto run = [&](std::int64_t head, c10::ScalarType dtype) {
    const auto zeros = [&](at::IntArrayRef sizes) { return npu(at::zeros(sizes, dtype)); };
    return message_of([&] {
      call("npu_chunk_gated_delta_rule", {{"query", zeros({2, 1, head})},
                                          {"key", zeros({2, 1, head})},
                                          {"value", zeros({2, 1, head})},
                                          {"beta", zeros({2, 1})},
                                          {"g", npu(at::zeros({2, 1}))},
                                          {"initial_state", zeros({1, 1, head, head})},
                                          {"actual_seq_lengths", npu(at::tensor({2}, at::kInt))},
                                          {"scale", 1.0}});
    });
  };
  EXPECT_THAT(run(64, at::kBFloat16), HasSubstr("rule gdn-limits"));
  EXPECT_THAT(run(128, at::kFloat), HasSubstr("rule gdn-limits"));
  EXPECT_EQ(run(128, at::kBFloat16), "(no error)");
}

TEST_F(SimulatedOperatorRule, PermutationTakesBfloat16) {
  const auto permute = [&](c10::ScalarType dtype) {
    return message_of([&] {
      call("npu_moe_token_permute", {{"tokens", npu(at::ones({2, 2}, dtype))},
                                     {"indices", npu(at::zeros({2, 1}, at::kLong))}});
    });
  };
  EXPECT_THAT(permute(at::kFloat), HasSubstr("rule dtype"));
  EXPECT_EQ(permute(at::kBFloat16), "(no error)");
}

}  // namespace
}  // namespace heddle::device::sim
