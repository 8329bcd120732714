// Joins the CUDA kernel of decode_step with ATen.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <fmt/format.h>

#include <algorithm>

#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/decode_step/cuda/decode_step.h"
#include "ops/decode_step/decode_step.h"
#include "ops/kernel_choice.h"

namespace heddle::ops::decode_step_cuda {
namespace {

using Shape = cuda::DecodeStepShape;

/// Kernels whose work the step does, with their roundings or finer ones: where others were chosen,
/// these run.
constexpr std::pair<const char*, const char*> kReplaced[] = {
    {"linear", "cuda.sm90_or_cublas"},
    {"rms_norm", "cuda.fused"},
    {"swiglu", "cuda.fused"},
    {"conv_decode", "cuda.fused"},
    {"gdn_gates", "cuda.fused"},
    {"gated_delta_rule_decode", "cuda.fused"},
    {"gated_rms_norm", "cuda.fused"},
    {"qk_norm_rope", "cuda.fused"},
    {"attention_decode", "cuda.split_keys"},
    {"output_gate", "cuda.fused"},
};

bool is(const at::Tensor& tensor, c10::ScalarType type) {
  return tensor.defined() && tensor.scalar_type() == type && tensor.is_contiguous() &&
         reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}
bool is_bf16(const at::Tensor& tensor) { return is(tensor, at::kBFloat16); }

bool takes(const DecodeStep::Layer& layer) {
  const auto all_bf16 = [](std::initializer_list<at::Tensor> tensors) {
    return std::all_of(tensors.begin(), tensors.end(), is_bf16);
  };
  if (!std::all_of(layer.inputs.begin(), layer.inputs.end(), is_bf16) ||
      !all_bf16({layer.norm_mixer, layer.norm_mlp, layer.out, layer.gate, layer.up, layer.down}))
    return false;
  if (layer.keys.defined()) return all_bf16({layer.q_norm, layer.k_norm, layer.keys, layer.values});
  return all_bf16({layer.conv, layer.norm, layer.conv_states}) && is(layer.a_log, at::kFloat) &&
         is(layer.dt_bias, at::kFloat) && is(layer.states, at::kFloat);
}

bool takes_changes(const KernelTable& kernels, const DecodeStep::Model& model, std::int64_t rows) {
  return !model.runs.defined() ||
         (chose(kernels, "grouped_low_rank", "cuda.sm90_grouped") &&
          model.rank <= cuda::DecodeStepChanges::kMostRank && model.runs.size(0) <= rows);
}

at::Tensor exchange(const KernelTable& kernels, const DecodeStep::Model& model, std::int64_t rows) {
  const bool has_rows = rows == 1 || rows == 2 || rows == 4 || rows == Shape::kMostRows;
  const bool replaces =
      std::all_of(std::begin(kReplaced), std::end(kReplaced),
                  [&](const auto& own) { return chose(kernels, own.first, own.second); });
  if (!has_rows || !replaces || !takes_changes(kernels, model, rows) || !is_bf16(model.embedding) ||
      !is_bf16(model.norm) || !is_bf16(model.head) ||
      !std::all_of(model.layers.begin(), model.layers.end(), takes))
    return {};
  at::Tensor words =
      at::full({cuda::decode_step_words()}, -1, model.norm.options().dtype(at::kInt));
  words.narrow(0, 0, cuda::kDecodeStepHead).zero_();
  return words;
}

cuda::DecodeStepLayer layer_of(const DecodeStep::Layer& from) {
  const auto at = [](const at::Tensor& tensor) { return tensor.const_data_ptr(); };
  cuda::DecodeStepLayer to;
  to.is_attention = from.keys.defined();
  to.norm_mixer = at(from.norm_mixer), to.norm_mlp = at(from.norm_mlp);
  for (std::size_t i = 0; i < from.inputs.size(); ++i) to.inputs[i] = at(from.inputs[i]);
  to.out = at(from.out), to.gate = at(from.gate), to.up = at(from.up), to.down = at(from.down);
  if (to.is_attention) {
    to.q_norm = at(from.q_norm), to.k_norm = at(from.k_norm);
    to.keys = from.keys.mutable_data_ptr(), to.values = from.values.mutable_data_ptr();
    return to;
  }
  to.conv = at(from.conv), to.norm = at(from.norm);
  to.a_log = from.a_log.const_data_ptr<float>();
  to.dt_bias = from.dt_bias.const_data_ptr<float>();
  to.conv_states = from.conv_states.mutable_data_ptr();
  to.states = from.states.mutable_data_ptr<float>();
  return to;
}

/// The slots of a layer's matrices in the order of cuda::DecodeStepChanges.
void add_slots(const DecodeStep::Layer& layer, const cuda::SlotFactors* (&to)[8]) {
  const std::size_t inputs = layer.inputs.size();
  for (std::size_t i = 0; i < layer.slots.size(); ++i) {
    if (layer.slots[i].defined())
      to[i < inputs ? i : 4 + i - inputs] =
          static_cast<const cuda::SlotFactors*>(layer.slots[i].const_data_ptr());
  }
}

at::Tensor forward(const DecodeStep::Model& model, const at::Tensor& tokens, const CacheRows& rows,
                   const std::pair<at::Tensor, at::Tensor>& rotary, const at::Tensor& exchange) {
  const cuda::OnDevice on(tokens);
  TORCH_CHECK(is(tokens, at::kLong) && rows.slots.is_contiguous() && rows.lengths.is_contiguous() &&
                  rows.pages.is_contiguous() && is(rotary.first, at::kFloat) &&
                  is(rotary.second, at::kFloat) && exchange.numel() == cuda::decode_step_words(),
              "decode_step: int64 tokens, fp32 cos and sin, and contiguous tables of sequences");
  at::Tensor logits =
      at::empty({tokens.size(0), model.head.size(0)}, tokens.options().dtype(at::kFloat));
  cuda::DecodeStepModel step;
  for (const DecodeStep::Layer& layer : model.layers) step.layer[step.layers++] = layer_of(layer);
  step.vocabulary = static_cast<int>(model.head.size(0));
  step.norm_offset = static_cast<float>(model.norm_offset);
  step.eps = static_cast<float>(model.eps);
  step.embedding = model.embedding.const_data_ptr();
  step.norm = model.norm.const_data_ptr(), step.head = model.head.const_data_ptr();
  cuda::DecodeStepRows work;
  work.rows = static_cast<int>(tokens.size(0));
  work.tokens = tokens.const_data_ptr<std::int64_t>();
  work.slots = rows.slots.const_data_ptr<std::int64_t>();
  work.lengths = rows.lengths.const_data_ptr<std::int64_t>();
  work.pages = rows.pages.const_data_ptr<std::int32_t>();
  work.table_pages = static_cast<int>(rows.pages.size(1));
  for (const DecodeStep::Layer& layer : model.layers) {
    if (layer.keys.defined()) work.page_tokens = static_cast<int>(layer.keys.size(1));
  }
  work.cos = rotary.first.const_data_ptr<float>();
  work.sin = rotary.second.const_data_ptr<float>();
  work.logits = logits.mutable_data_ptr<float>();
  cuda::DecodeStepChanges changes;
  if (model.runs.defined()) {
    TORCH_CHECK(is(model.runs, at::kInt), "decode_step: runs of changes are int32");
    changes.runs = static_cast<const cuda::SlotRun*>(model.runs.const_data_ptr());
    changes.count = static_cast<int>(model.runs.size(0));
    changes.rank = static_cast<int>(model.rank);
    for (std::size_t l = 0; l < model.layers.size(); ++l)
      add_slots(model.layers[l], changes.slots[l]);
  }
  cuda::decode_step(step, work, static_cast<std::uint32_t*>(exchange.mutable_data_ptr()),
                    on.stream(), &changes);
  return logits;
}

std::optional<std::string> refuse(const DecodeStep::Dims& dims) {
  const std::tuple<const char*, std::int64_t, std::int64_t> fixed[] = {
      {"hidden_size", dims.hidden_size, Shape::kWidth},
      {"intermediate_size", dims.intermediate_size, Shape::kInner},
      {"linear_num_key_heads", dims.num_key_heads, Shape::kDeltaHeads},
      {"linear_num_value_heads", dims.num_value_heads, Shape::kDeltaHeads},
      {"linear_key_head_dim", dims.key_head_dim, Shape::kDeltaHeadDim},
      {"linear_value_head_dim", dims.value_head_dim, Shape::kDeltaHeadDim},
      {"linear_conv_kernel_dim", dims.conv_kernel, Shape::kConvWidth},
      {"num_attention_heads", dims.num_attention_heads, Shape::kHeads},
      {"num_key_value_heads", dims.num_key_value_heads, Shape::kKeyHeads},
      {"head_dim", dims.head_dim, Shape::kHeadDim},
      {"the rotated part of a head", dims.rotary_dim, Shape::kRotaryDim},
  };
  for (const auto& [name, value, wanted] : fixed) {
    if (value != wanted)
      return fmt::format("{} is {}, the kernel is compiled for {}", name, value, wanted);
  }
  if (dims.layers > Shape::kMostLayers)
    return fmt::format("{} layers, the kernel takes {}", dims.layers, Shape::kMostLayers);
  if (dims.vocab_size % 2 != 0) return fmt::format("the vocabulary of {} is odd", dims.vocab_size);
  if (dims.vocab_size < 2 * Shape::kCtas)
    return fmt::format("the vocabulary has {} tokens, fewer than two for each of {} CTAs",
                       dims.vocab_size, Shape::kCtas);
  if (!dims.has_output_gate) return "attention has no output gate";
  return std::nullopt;
}

std::optional<std::string> refuse_device(const Target&) {
  if (cuda::decode_step_available()) return std::nullopt;
  return "needs a device of compute capability 9.0 with 132 multiprocessors and a build for sm_90a";
}

}  // namespace

}  // namespace heddle::ops::decode_step_cuda

namespace heddle::ops::cuda {

void add_decode_step(Registry& registry) {
  using namespace decode_step_cuda;
  KernelInfo info = KernelInfo::cuda("cuda.sm90.one_kernel", {c10::ScalarType::BFloat16});
  info.for_some_shapes = true;
  info.falls_back =
      "the layers' own kernels for shapes that it is not compiled for, more than 8 sequences, sets "
      "of adapters with a rank above 64, on the head or that tables do not take, steps that are "
      "not "
      "recorded, and where another kernel was chosen for one of its parts";
  info.refuse_device = refuse_device;
  registry.add<DecodeStep>(info, {exchange, forward}, {.refuse = refuse});
}

}  // namespace heddle::ops::cuda
