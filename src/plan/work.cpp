#include "plan/work.h"

#include <algorithm>

#include "models/qwen3_5/flops.h"
#include "models/qwen3_5/model.h"
#include "ops/optimizer_step/eight_bit.h"
#include "runtime/context.h"

namespace heddle::plan {
namespace {

using models::qwen3_5::Config;

struct Widths {
  double H, q, kv, k, v, Hv, F;  ///< F: of the dense MLP or the shared expert.

  Widths(const Config& model, std::int64_t layer)
      : H(as_double(model.hidden_size)),
        q(as_double(model.num_attention_heads * model.head_dim)),
        kv(as_double(model.num_key_value_heads * model.head_dim)),
        k(as_double(model.linear_num_key_heads * model.linear_key_head_dim)),
        v(as_double(model.linear_num_value_heads * model.linear_value_head_dim)),
        Hv(as_double(model.linear_num_value_heads)),
        F(as_double(model.sparse_mlp[layer] ? model.shared_expert_intermediate_size
                                            : model.intermediate_size)) {}
};

void add_mixer(LayerWork& work, const Config& model, std::int64_t layer, const Widths& w) {
  if (model.full_attention[layer]) {
    work.attention = 6 * w.q;
    // Norm and rotation of q and k: in and out, backward the input besides. Output gate: o and gate
    // in, y out; o, gate and dy in, two gradients out.
    work.forward += 2 * (w.q + w.kv) + 3 * w.q;
    work.backward += 3 * (w.q + w.kv) + 5 * w.q;
    work.again += w.q;
    work.adapters_whole += w.H + w.H + w.H;
    work.adapters += 2 * w.q + 2 * w.kv + 2 * w.q;
    return;
  }
  work.delta_rule = 12 * w.v * as_double(model.linear_key_head_dim);
  const double conv = 2 * w.k + w.v;
  // Convolution: x in, y out; backward x and dy in, dx out. Gated norm: as the output gate.
  work.forward += 2 * conv + 3 * w.v;
  work.backward += 3 * conv + 5 * w.v;
  work.again += 2 * conv + 3 * w.v;
  work.adapters_whole += 2 * w.H + w.H;
  work.adapters += 2 * w.k + 2 * w.v + 2 * w.Hv + 2 * w.v;
}

void add_mlp(LayerWork& work, const Config& model, std::int64_t layer, const Widths& w) {
  // SwiGLU: gate and up in, y out; gate, up and dy in, two gradients out.
  work.forward += 3 * w.F;
  work.backward += 5 * w.F;
  work.again += w.F;
  work.adapters_whole += 2 * w.H + w.H;
  work.adapters += 2 * w.F + 2 * w.F;
  if (!model.sparse_mlp[layer]) return;
  const double copies = as_double(model.num_experts_per_tok);
  const double width = copies * as_double(model.moe_intermediate_size);
  work.experts = 3 * w.H * width;
  work.products -= work.experts;
  // Rows to experts and back, weighted.
  work.forward += 3 * width + (2 * copies + copies + 1) * w.H;
  work.backward += 5 * width + 2 * (2 * copies + copies + 1) * w.H;
}

}  // namespace

LayerWork layer_work(const Config& model, std::int64_t layer) {
  const Widths w(model, layer);
  LayerWork work;
  work.products = as_double(models::qwen3_5::layer_matmul_weights(model, layer));
  // Two norms with the residual sum: h and the branch in, h and the normalised out; backward three
  // in, one out.
  work.forward = 8 * w.H;
  work.backward = 8 * w.H;
  // What the backward of a norm, SwiGLU or output gate makes on its way is written; convolution and
  // gated norm run again.
  work.again = 2 * w.H;
  add_mixer(work, model, layer, w);
  add_mlp(work, model, layer, w);
  return work;
}

namespace {

/// From the parameters of the model itself.
void count_parameters(Step& step, double lora_rank) {
  models::qwen3_5::ModelOptions options;
  options.kernel_policy.allow_fallback = true;
  models::qwen3_5::Model model(step.model, "model.", runtime::Context(), options);
  for (const auto& layer : model.layers()) {
    ParameterCount count;
    layer->visit_parameters([&](nn::Parameter& parameter) {
      const double numel = as_double(parameter.numel());
      const auto& placement = parameter.placement();
      const auto names = [&](comm::Dim dim) {
        return std::any_of(placement.begin(), placement.end(),
                           [&](const nn::Shard& s) { return s.mesh_dim == dim; });
      };
      (parameter.is_expert()   ? count.experts
       : names(comm::Dim::kTp) ? count.divided
                               : count.replicated) += numel;
      const auto& shape = parameter.global_shape();
      if (shape.size() == 2) count.adapters += lora_rank * as_double(shape[0] + shape[1]);
    });
    step.parameters.push_back(count);
  }
  step.embedding = step.vocabulary_elements();
  step.head = step.model.tie_word_embeddings ? 0 : step.embedding;
}

double state_bytes(config::StateDtype dtype, const Step& step) {
  switch (dtype) {
    case config::StateDtype::kFloat32:
      return 2 * step.wide + (step.element < 4 ? 4 : 0);
    case config::StateDtype::kBFloat16:
      return 4;
    case config::StateDtype::kInt8:
      return 2 * (1 + 4 / as_double(ops::eight_bit::kBlock));
  }
  return 0;
}

}  // namespace

Step describe_step(const config::RunConfig& config, const Config& model) {
  Step step;
  step.model = model;
  for (std::int64_t i = 0; i < model.num_hidden_layers; ++i)
    step.layers.push_back(layer_work(model, i));
  step.is_lora = config.train.method == config::Method::kLora;
  count_parameters(step, step.is_lora ? as_double(config.adapter.rank) : 0);
  step.length = as_double(config.data.max_length);
  step.rows = as_double(config.train.global_batch_size);
  step.micro_batch_tokens =
      as_double(std::max(config.train.micro_batch_tokens, config.data.max_length));
  const auto type =
      runtime::parse_dtype(std::string(config::to_string(config.model.dtype)), "model.dtype");
  step.element = as_double(static_cast<std::int64_t>(c10::elementSize(type)));
  step.wide = type == c10::ScalarType::Double ? 8 : 4;
  step.gradient = config.optim.grad_dtype == config::Dtype::kBFloat16 ? 2 : step.wide;
  step.state = state_bytes(config.optim.state_dtype, step);
  step.offloads_state = config.optim.offload;
  step.offloads_inputs = config.train.offload_activations;
  return step;
}

}  // namespace heddle::plan
