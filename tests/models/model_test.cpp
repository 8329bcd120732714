#include "models/model.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "device/memory_meter.h"
#include "models/gradients.h"
#include "models/registry.h"
#include "models/tiny_model.h"
#include "objective/language_model.h"
#include "ops/autograd.h"
#include "parallel/block_runner.h"
#include "testing/parameter_name.h"

namespace heddle {
namespace {

using models::Model;
using parallel::Recompute;
using testing::differentiate;
using testing::Gradients;

void expect_equal(const Gradients& a, const Gradients& b, double tolerance) {
  EXPECT_NEAR(a.loss, b.loss, tolerance * std::abs(a.loss));
  for (const auto& [name, gradient] : a.by_name) {
    const at::Tensor& other = b.by_name.at(name);
    ASSERT_TRUE(gradient.defined()) << name << " got no gradient";
    const double norm = gradient.norm().item<double>();
    EXPECT_GT(norm, 0) << name;
    EXPECT_LE((gradient - other).norm().item<double>(), tolerance * norm) << name;
  }
}

class ModelTest : public ::testing::TestWithParam<bool> {};

TEST_P(ModelTest, PackedEqualsSeparate) {
  const auto model = testing::tiny_model(at::kDouble, GetParam());
  const Gradients packed = differentiate(
      *model, {testing::batch_of({{1, 70}, {2, 1}, {3, 64}, {4, 29}})}, Recompute::kOff);
  const Gradients separate =
      differentiate(*model,
                    {testing::batch_of({{1, 70}}), testing::batch_of({{2, 1}}),
                     testing::batch_of({{3, 64}}), testing::batch_of({{4, 29}})},
                    Recompute::kOff);
  expect_equal(packed, separate, 1e-9);
}

TEST_P(ModelTest, RecomputationChangesNoBit) {
  const auto model = testing::tiny_model(at::kFloat, GetParam());
  const std::vector<data::Batch> batches = {testing::batch_of({{1, 65}, {2, 40}})};
  const Gradients off = differentiate(*model, batches, Recompute::kOff, 0.01);
  for (const Recompute policy :
       {Recompute::kElementwise, Recompute::kSelective, Recompute::kFull}) {
    const Gradients other = differentiate(*model, batches, policy, 0.01);
    for (const auto& [name, gradient] : off.by_name)
      EXPECT_TRUE(at::equal(gradient, other.by_name.at(name))) << name;
  }
}

// P6: nothing grows with the square of a sequence, neither a mask nor scores.
TEST_P(ModelTest, MemoryIsLinearInTokens) {
  if (testing::device().type() != c10::kCPU) GTEST_SKIP() << "of the CPU's kernels";
  const auto model = testing::tiny_model(at::kFloat, GetParam());
  const auto peak = [&](std::int64_t length) {
    const at::Tensor tokens = at::full({2, length}, 5, at::kLong),
                     mask = at::full({2, length}, 1, at::kLong);
    mask[0].narrow(0, length - 17, 17).zero_();
    data::Batch::PaddedOptions options;
    options.labels = tokens;
    device::MemoryMeter meter(c10::Device(c10::kCPU));
    differentiate(*model, {data::Batch::from_padded(tokens, mask, options)}, Recompute::kOff);
    return meter.take_peak();
  };
  peak(256);  // what is made once
  const std::int64_t one = peak(2048), four = peak(8192);
  EXPECT_LT(static_cast<double>(four), 4.2 * static_cast<double>(one));
}

TEST_P(ModelTest, PaddedEqualsPacked) {
  const auto model = testing::tiny_model(at::kDouble, GetParam());
  const data::Batch packed = testing::batch_of({{1, 20}, {3, 33}});
  at::Tensor tokens = at::zeros({2, 40}, at::kLong), mask = at::zeros({2, 40}, at::kLong),
             labels = at::full({2, 40}, -100, at::kLong);
  // The first row is padded on the right, the second on the left.
  const auto place = [&](std::int64_t row, std::int64_t at, std::int64_t begin,
                         std::int64_t length) {
    const at::Tensor sequence = packed.tokens.narrow(0, begin, length);
    tokens[row].narrow(0, at, length).copy_(sequence);
    labels[row].narrow(0, at, length).copy_(sequence);
    mask[row].narrow(0, at, length).fill_(1);
  };
  place(0, 0, 0, 20);
  place(1, 7, 20, 33);
  data::Batch::PaddedOptions options;
  options.labels = labels;
  const data::Batch padded = data::Batch::from_padded(tokens, mask, options);
  expect_equal(differentiate(*model, {packed}, Recompute::kOff),
               differentiate(*model, {padded}, Recompute::kOff), 1e-12);
}

TEST_P(ModelTest, GenerationInPiecesEqualsOneForwardPass) {
  const auto model = testing::tiny_model(at::kDouble, GetParam());
  const data::Batch batch = testing::batch_of({{5, 80}}).to(testing::device());
  const ops::NoGradient guard;
  parallel::BlockRunner runner(assembly::block_entries(*model));
  const auto pass = model->pass({batch.cu_seqlens, batch.cu_seqlens_host, batch.max_seqlen},
                                batch.position_ids, 80, false);
  const at::Tensor whole = runner.evaluate(model->embed(batch.tokens), pass);
  auto cache = model->make_cache({.slots = 3, .pages = 7, .page_tokens = 16});
  std::vector<at::Tensor> pieces;
  std::int64_t done = 0;
  for (const std::int64_t length : {37, 1, 1, 30, 1, 10}) {
    const auto sequences =
        ops::Sequences::from_host({0, static_cast<std::int32_t>(length)}, testing::device());
    const auto rows = ops::CacheRows::from_host({2}, {done}, {{5, 0, 6, 2, 1}}, testing::device());
    pieces.push_back(
        runner.evaluate(model->embed(batch.tokens.narrow(0, done, length)),
                        model->cached_pass(sequences, {&cache, rows, {}, {}, {}, {}})));
    done += length;
  }
  EXPECT_LE((at::cat(pieces) - whole).abs().max().item<double>(), 1e-9);
}

INSTANTIATE_TEST_SUITE_P(DenseAndMoe, ModelTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "moe" : "dense"; });

TEST(Model, AFrozenTrunkKeepsNothingAndGetsNoGradient) {
  const auto model = testing::tiny_model(at::kFloat);
  model->visit_parameters(
      [](nn::Parameter& p) { p.set_trainable(p.name().find("layers.3.") != std::string::npos); });
  parallel::BlockRunner runner(assembly::block_entries(*model));
  const data::Batch batch = testing::batch_of({{1, 30}}).to(testing::device());
  const auto pass = model->pass({batch.cu_seqlens, batch.cu_seqlens_host, batch.max_seqlen},
                                batch.position_ids, 30, true);
  parallel::BlockRunner::Tape tape;
  const at::Tensor embedded = model->embed(batch.tokens);
  EXPECT_FALSE(embedded.requires_grad());
  const at::Tensor hidden = runner.forward(embedded, pass, false, tape);
  const auto head = objective::run_language_model_head(*model, hidden,
                                                       objective::LossRows(*model, batch, 1), true);
  runner.backward(head.grad_hidden, 0, tape);
  model->visit_parameters([](nn::Parameter& p) {
    EXPECT_EQ(p.gradient().defined(), p.name().find("layers.3.") != std::string::npos) << p.name();
  });
}

TEST(Model, RouterReplayTakesTheRecordedExperts) {
  const auto model = testing::tiny_model(at::kDouble, /*moe=*/true);
  parallel::BlockRunner runner(assembly::block_entries(*model), {Recompute::kFull});
  const data::Batch batch = testing::batch_of({{1, 30}, {2, 11}}).to(testing::device());
  const auto pass = model->pass({batch.cu_seqlens, batch.cu_seqlens_host, batch.max_seqlen},
                                batch.position_ids, 41, true);
  const at::Tensor embedded = model->embed(batch.tokens).detach();
  parallel::BlockRunner::Tape recorded;
  const at::Tensor before = runner.forward(embedded, pass, false, recorded);
  ASSERT_EQ(recorded.experts.size(), 4u);
  for (const at::Tensor& experts : recorded.experts)
    EXPECT_EQ(experts.sizes(), (std::vector{41L, 2L}));

  // Equal weights give equal states; others would choose other experts, but do not.
  parallel::BlockRunner::Tape same;
  same.experts = recorded.experts;
  EXPECT_TRUE(at::equal(runner.forward(embedded, pass, false, same), before));
  model->visit_parameters([](nn::Parameter& p) {
    if (p.name().ends_with(".mlp.gate.weight")) p.data().neg_();
  });
  parallel::BlockRunner::Tape free, replayed;
  const at::Tensor free_hidden = runner.forward(embedded, pass, false, free);
  EXPECT_FALSE(at::equal(free.experts[0], recorded.experts[0]));
  replayed.experts = recorded.experts;
  const at::Tensor hidden = runner.forward(embedded, pass, false, replayed);
  for (std::size_t i = 0; i < 4; ++i)
    EXPECT_TRUE(at::equal(replayed.experts[i], recorded.experts[i])) << "block " << i;
  EXPECT_FALSE(at::equal(hidden, free_hidden));
}

TEST(Model, BatchesNameTheExpertsOfTheirTokens) {
  const auto model = testing::tiny_model(at::kDouble, /*moe=*/true);
  data::Batch batch = testing::batch_of({{1, 13}, {2, 6}});
  const auto gradients = [&] { return testing::differentiate(*model, {batch}, Recompute::kFull); };
  const double own = gradients().loss;
  // Four layers, two of four experts each, none of them chosen by a router.
  batch.experts = at::empty({8, batch.size()}, at::kShort);
  for (std::int64_t t = 0; t < batch.size(); ++t) {
    for (std::int64_t layer = 0; layer < 4; ++layer) {
      batch.experts[2 * layer][t] = (t + layer) % 4;
      batch.experts[2 * layer + 1][t] = (t + layer + 1 + t % 3) % 4;
    }
  }
  const testing::Gradients given = gradients();
  EXPECT_GT(std::abs(given.loss - own), 1e-4);
  // The choice being given, the loss is smooth in everything, the router's weights too.
  model->visit_parameters([&](nn::Parameter& parameter) {
    const bool is_probed = parameter.name().ends_with("layers.1.mlp.gate.weight") ||
                           parameter.name().ends_with("layers.0.mlp.experts.gate_up_proj") ||
                           parameter.name().ends_with("layers.2.input_layernorm.weight");
    if (!is_probed) return;
    at::Tensor values = parameter.data().view(-1);
    const at::Tensor gradient = given.by_name.at(parameter.name()).view(-1);
    for (const std::int64_t place : {std::int64_t{0}, values.numel() / 3, values.numel() - 1}) {
      constexpr double kStep = 1e-5;
      const double before = values[place].item<double>();
      const auto loss_at = [&](double value) {
        values[place].fill_(value);
        return gradients().loss;
      };
      const double slope = (loss_at(before + kStep) - loss_at(before - kStep)) / (2 * kStep);
      values[place].fill_(before);
      EXPECT_NEAR(gradient[place].item<double>(), slope, 1e-7 * (1 + std::abs(slope)))
          << parameter.name() << " " << place;
    }
  });
}

TEST(Model, RecomputationTakesTheExpertsOfTheForward) {
  // Between forward and backward the router turns: only what the forward chose may be trained.
  const auto model = testing::tiny_model(at::kDouble, /*moe=*/true);
  parallel::BlockRunner runner(assembly::block_entries(*model), {Recompute::kFull});
  const data::Batch batch = testing::batch_of({{3, 1}}).to(testing::device());
  const auto pass = model->pass({batch.cu_seqlens, batch.cu_seqlens_host, batch.max_seqlen},
                                batch.position_ids, 1, true);
  parallel::BlockRunner::Tape tape;
  const at::Tensor hidden = runner.forward(model->embed(batch.tokens).detach(), pass, false, tape);
  const at::Tensor chosen = tape.experts[3];
  model->visit_parameters([](nn::Parameter& p) {
    if (p.name().ends_with(".mlp.gate.weight")) p.data().neg_();
  });
  runner.backward(at::ones_like(hidden), 0, tape);
  model->visit_parameters([&](nn::Parameter& p) {
    if (!p.name().ends_with("layers.3.mlp.experts.down_proj")) return;
    for (std::int64_t e = 0; e < 4; ++e) {
      EXPECT_EQ(p.gradient()[e].abs().sum().item<double>() > 0, (chosen == e).any().item().toBool())
          << "expert " << e;
    }
  });
}

TEST(Model, RoundedLossRowsChangeNothing) {
  const auto model = testing::tiny_model(at::kDouble);
  data::Batch batch = testing::batch_of({{1, 30}, {2, 11}});
  batch.labels.narrow(0, 3, 9).fill_(data::kIgnoredLabel);
  batch.loss_weights.narrow(0, 3, 9).zero_();
  const at::Tensor hidden = model->embed(batch.to(testing::device()).tokens).detach();
  const auto run = [&](std::int64_t multiple, std::int64_t expected_rows) {
    const objective::LossRows rows(*model, batch, 0.5, multiple);
    EXPECT_EQ(rows.labels.numel(), expected_rows);
    EXPECT_EQ(rows.index.defined(), expected_rows < 41);
    const objective::HeadResult result =
        objective::run_language_model_head(*model, hidden, rows, true);
    const at::Tensor weight = model->head_weight().gradient().clone();
    model->visit_parameters([](nn::Parameter& p) { p.clear_gradient(); });
    std::vector<at::Tensor> all = result.metric_sums;
    all.insert(all.end(), {result.loss_sum, result.grad_hidden, weight});
    return all;
  };
  const auto exact = run(1, 30);
  for (const auto& [multiple, rows] : {std::pair{16, 32}, {64, 41}}) {
    const auto rounded = run(multiple, rows);
    for (std::size_t i = 0; i < exact.size(); ++i)
      EXPECT_LT((rounded[i] - exact[i]).norm().item<double>(),
                1e-12 * exact[i].norm().item<double>());
  }
}

TEST(Model, AFamilyWithoutAClassifierInTransformersGetsNone) {
  runtime::Context context;
  context.device = at::kCPU;
  models::ModelOptions options;
  options.head = models::Head::kClassify;
  options.num_labels = 3;
  try {
    Model(testing::tiny_config(false, "qwen3_vl_text"), "model.", context, options);
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("no classifier of model_type 'qwen3_vl_text'"));
  }
}

// The part of the published Qwen3-VL-4B-Instruct that the text model reads.
TEST(ModelConfig, OfQwen3VlIsThatOfItsTextModel) {
  const auto json = nlohmann::ordered_json::parse(R"({
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
    "image_token_id": 151655, "tie_word_embeddings": true,
    "text_config": {
      "model_type": "qwen3_vl_text", "attention_bias": false, "head_dim": 128,
      "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728,
      "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
      "rms_norm_eps": 1e-06, "rope_theta": 5000000, "vocab_size": 151936,
      "rope_scaling": {"mrope_interleaved": true, "mrope_section": [24, 20, 20],
                       "rope_type": "default"}},
    "vision_config": {"model_type": "qwen3_vl", "depth": 24}})");
  const models::Config config = models::parse_config(json, "config.json");
  EXPECT_TRUE(config.nested);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.num_hidden_layers(), 36);
  EXPECT_EQ(config.rope_theta, 5e6);
  EXPECT_EQ(config.rotary_dim, 128);
  EXPECT_EQ(config.attention()->num_key_value_heads, 8);
  EXPECT_FALSE(config.attention()->has_output_gate);
  EXPECT_EQ(config.gated_delta_net(), nullptr);
}

TEST(Model, InitialisationDependsOnNameAndSeedOnly) {
  const auto a = testing::tiny_model(at::kDouble), b = testing::tiny_model(at::kFloat);
  auto pa = a->parameters(), pb = b->parameters();
  for (std::size_t i = 0; i < pa.size(); ++i) {
    EXPECT_TRUE(at::equal(pa[i]->data().to(at::kFloat), pb[i]->data().to(at::kFloat)))
        << pa[i]->name();
  }
}

struct BadConfig {
  const char* name;
  nlohmann::ordered_json change;
  const char* message;
};

void PrintTo(const BadConfig& c, std::ostream* out) { *out << c.name; }

class ModelConfigTest : public ::testing::TestWithParam<BadConfig> {};

TEST_P(ModelConfigTest, IsRefusedWithTheKey) {
  nlohmann::ordered_json json = {{"model_type", "qwen3_5_text"}, {"num_hidden_layers", 4}};
  json.update(GetParam().change);
  try {
    models::parse_config(json, "config.json");
    FAIL() << "accepted";
  } catch (const ModelError& e) {
    EXPECT_THAT(e.what(), ::testing::HasSubstr(GetParam().message));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Configs, ModelConfigTest,
    ::testing::Values(
        BadConfig{"type", {{"model_type", "llama"}}, "model_type 'llama' is not one of"},
        BadConfig{"no_text",
                  {{"model_type", "qwen3_vl"}},
                  "model_type 'qwen3_vl' needs an object 'text_config'"},
        BadConfig{"layers",
                  {{"layer_types", {"full_attention"}}},
                  "layer_types has 1 entries, num_hidden_layers is 4"},
        BadConfig{"kind",
                  {{"layer_types", {"full_attention", "mamba", "mamba", "mamba"}}},
                  "layer_types[1] is 'mamba'"},
        BadConfig{
            "interval",
            {{"full_attention_interval", 2},
             {"layer_types",
              {"linear_attention", "linear_attention", "linear_attention", "full_attention"}}},
            "contradicts full_attention_interval 2"},
        BadConfig{
            "heads", {{"num_attention_heads", 6}, {"num_key_value_heads", 4}}, "does not divide"},
        BadConfig{
            "hidden", {{"hidden_size", "big"}}, "'hidden_size' is \"big\": expected an integer"},
        BadConfig{
            "zero", {{"head_dim", 0}}, "'head_dim' is 0: expected an integer from 1 to 65536"},
        BadConfig{"dtype", {{"dtype", "float13"}}, "'dtype' is \"float13\": expected float32"},
        BadConfig{"old_dtype", {{"torch_dtype", 7}}, "'torch_dtype' is 7: expected float32"},
        BadConfig{"eos", {{"eos_token_id", "</s>"}}, "'eos_token_id' is \"</s>\""},
        BadConfig{"eos_list", {{"eos_token_id", {1, -3}}}, "'eos_token_id' is [1,-3]"},
        BadConfig{"bos", {{"bos_token_id", -2}}, "'bos_token_id' is -2"},
        BadConfig{"positions", {{"max_position_embeddings", -1}}, "'max_position_embeddings'"},
        BadConfig{"range", {{"initializer_range", -0.02}}, "'initializer_range' is -0.02"},
        BadConfig{"bias", {{"attention_bias", true}}, "'attention_bias' is true: expected false"},
        BadConfig{"act", {{"hidden_act", "gelu"}}, "'hidden_act' is \"gelu\""},
        BadConfig{"rope", {{"rope_parameters", {{"rope_type", "yarn"}}}}, "rope_type is 'yarn'"},
        BadConfig{"rope_kind", {{"rope_parameters", {{"rope_type", {1}}}}}, "rope_type is '[1]'"},
        BadConfig{"section",
                  {{"rope_parameters", {{"mrope_section", {11, "11", 10}}}}},
                  "'mrope_section' is [11,\"11\",10]: expected a whole number"},
        BadConfig{"sections",
                  {{"mrope_section", {{"a", 1}}}},
                  "'mrope_section' is {\"a\":1}: expected a whole number"},
        BadConfig{"section_sign", {{"mrope_section", {-11, 11}}}, "'mrope_section' is [-11,11]"},
        BadConfig{"rotated",
                  {{"rope_parameters", {{"partial_rotary_factor", 1e14}}}},
                  "'partial_rotary_factor' is 100000000000000.0: expected a number above 0, at "
                  "most 1"},
        BadConfig{"aux_loss",
                  {{"model_type", "qwen3_5_moe_text"}, {"router_aux_loss_coef", 1e308}},
                  "'router_aux_loss_coef' is 1e+308: expected a number of at most"}),
    testing::ParameterName());

}  // namespace
}  // namespace heddle
