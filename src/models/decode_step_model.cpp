#include "models/decode_step_model.h"

#include <initializer_list>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/errors.h"

namespace heddle::models {
namespace {

/// The parameters of one layer by their published names.
class LayerWeights {
 public:
  explicit LayerWeights(DecoderLayer& layer) {
    layer.visit_parameters([&](nn::Parameter& parameter) { all_.push_back(&parameter); });
  }
  /// `name` ends the parameter's: "mlp.up_proj".
  at::Tensor of(std::string_view name, std::string_view suffix = ".weight") const {
    for (const nn::Parameter* parameter : all_) {
      std::string_view whole = parameter->name();
      if (!whole.ends_with(suffix)) continue;
      whole.remove_suffix(suffix.size());
      if (whole.ends_with(name) && whole.at(whole.size() - name.size() - 1) == '.')
        return parameter->data();
    }
    throw_error<InternalError>("decode_step: a layer has no {}{}", name, suffix);
  }
  std::vector<at::Tensor> of(std::initializer_list<std::string_view> names) const {
    std::vector<at::Tensor> found;
    for (const std::string_view name : names) found.push_back(of(name));
    return found;
  }

 private:
  std::vector<const nn::Parameter*> all_;
};

/// The slots of a layer's matrices, found by their weights.
class LayerSlots {
 public:
  LayerSlots(DecoderLayer& layer, const nn::RowAdapters& adapters) {
    layer.visit_linears([&](nn::Linear& linear) {
      const auto found = adapters.layers.find(&linear);
      if (found != adapters.layers.end())
        slots_.emplace(linear.weight().data().const_data_ptr(), found->second);
    });
  }
  /// Undefined where nothing changes it.
  at::Tensor of(const at::Tensor& weight) {
    const auto found = slots_.find(weight.const_data_ptr());
    if (found == slots_.end()) return {};
    ++found_;
    return found->second;
  }
  std::size_t found() const { return found_; }

 private:
  std::unordered_map<const void*, at::Tensor> slots_;
  std::size_t found_ = 0;
};

}  // namespace

std::optional<ops::DecodeStep::Model> decode_step_model(Model& model, const nn::Cache& cache,
                                                        const nn::RowAdapters* adapters) {
  ops::DecodeStep::Model step;
  std::size_t changed = 0;
  for (std::size_t i = 0; i < model.layers().size(); ++i) {
    const LayerWeights weights(*model.layers()[i]);
    const nn::LayerCache& own = cache.at(i);
    ops::DecodeStep::Layer layer;
    layer.norm_mixer = weights.of("input_layernorm");
    layer.norm_mlp = weights.of("post_attention_layernorm");
    layer.gate = weights.of("mlp.gate_proj");
    layer.up = weights.of("mlp.up_proj");
    layer.down = weights.of("mlp.down_proj");
    if (own.keys.defined()) {
      layer.inputs = weights.of({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"});
      layer.out = weights.of("self_attn.o_proj");
      layer.q_norm = weights.of("self_attn.q_norm");
      layer.k_norm = weights.of("self_attn.k_norm");
      layer.keys = own.keys;
      layer.values = own.values;
    } else {
      layer.inputs = weights.of({"linear_attn.in_proj_qkv", "linear_attn.in_proj_z",
                                 "linear_attn.in_proj_b", "linear_attn.in_proj_a"});
      layer.out = weights.of("linear_attn.out_proj");
      layer.conv = weights.of("linear_attn.conv1d").squeeze(1);
      layer.a_log = weights.of("linear_attn.A_log", "");
      layer.dt_bias = weights.of("linear_attn.dt_bias", "");
      layer.norm = weights.of("linear_attn.norm");
      layer.conv_states = own.conv;
      layer.states = own.state;
    }
    if (adapters != nullptr) {
      LayerSlots slots(*model.layers()[i], *adapters);
      for (const at::Tensor& weight : layer.inputs) layer.slots.push_back(slots.of(weight));
      for (const at::Tensor& weight : {layer.out, layer.gate, layer.up, layer.down})
        layer.slots.push_back(slots.of(weight));
      changed += slots.found();
    }
    step.layers.push_back(std::move(layer));
  }
  if (adapters != nullptr) {
    if (changed != adapters->layers.size()) return std::nullopt;
    step.runs = adapters->runs;
    step.rank = adapters->rank;
  }
  for (const Unit& unit : model.units()) {
    if (unit.name == "head") step.norm = unit.parameters.at(0)->data();
  }
  step.embedding = model.embedding_weight().data();
  step.head = model.head_weight().data();
  step.norm_offset = model.config().norm_offset;
  step.eps = model.config().rms_norm_eps;
  return step;
}

}  // namespace heddle::models
