#include "ckpt/gguf_model.h"

#include <algorithm>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include <ATen/ops/cat.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/stack.h>
#include <c10/util/Exception.h>

#include "base/errors.h"
#include "base/text.h"
#include "ckpt/checked_tensor.h"
#include "ckpt/dtype.h"
#include "ckpt/gguf_file.h"
#include "ckpt/gguf_vocabulary.h"
#include "ckpt/tensor_io.h"
#include "models/registry.h"

namespace heddle::ckpt {
namespace {

using Json = nlohmann::ordered_json;

/// Parts of names within a layer. Those of in_proj_qkvz, of experts and of vectors without
/// ".weight" are made by hand.
const std::map<std::string, std::string>& layer_names() {
  static const std::map<std::string, std::string> names = {
      {"input_layernorm.weight", "attn_norm.weight"},
      {"self_attn.q_proj.weight", "attn_q.weight"},
      {"self_attn.k_proj.weight", "attn_k.weight"},
      {"self_attn.v_proj.weight", "attn_v.weight"},
      {"self_attn.o_proj.weight", "attn_output.weight"},
      {"self_attn.q_norm.weight", "attn_q_norm.weight"},
      {"self_attn.k_norm.weight", "attn_k_norm.weight"},
      {"mlp.gate_proj.weight", "ffn_gate.weight"},
      {"mlp.up_proj.weight", "ffn_up.weight"},
      {"mlp.down_proj.weight", "ffn_down.weight"},
      {"mlp.gate.weight", "ffn_gate_inp.weight"},
      {"mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"},
      {"mlp.shared_expert.gate_proj.weight", "ffn_gate_shexp.weight"},
      {"mlp.shared_expert.up_proj.weight", "ffn_up_shexp.weight"},
      {"mlp.shared_expert.down_proj.weight", "ffn_down_shexp.weight"},
      {"linear_attn.in_proj_qkv.weight", "attn_qkv.weight"},
      {"linear_attn.in_proj_z.weight", "attn_gate.weight"},
      {"linear_attn.in_proj_b.weight", "ssm_beta.weight"},
      {"linear_attn.in_proj_a.weight", "ssm_alpha.weight"},
      {"linear_attn.in_proj_ba.weight", "ssm_ba.weight"},
      {"linear_attn.conv1d.weight", "ssm_conv1d.weight"},
      {"linear_attn.A_log", "ssm_a"},
      {"linear_attn.dt_bias", "ssm_dt.bias"},
      {"linear_attn.norm.weight", "ssm_norm.weight"},
      {"linear_attn.out_proj.weight", "ssm_out.weight"},
  };
  return names;
}

class GgufModel {
 public:
  explicit GgufModel(const ModelDirectory& source)
      : source_(source),
        text_(source.config().contains("text_config") ? source.config()["text_config"]
                                                      : source.config()) {
    const std::string type = text_.value("model_type", source.config().value("model_type", ""));
    const std::optional<models::GgufForm> found = models::gguf_form(type);
    if (!found)
      throw_error<ModelError>("{}: llama.cpp's layout of model_type '{}' is not known",
                              source.path().string(), type);
    form_ = *found;
    // Every number below is in its range, and what divides another divides it.
    require_shapes(models::parse_config(source.config(), (source.path() / "config.json").string()));
  }

  GgufReport write(const Path& output) {
    add_values();
    for (const StoredTensor& tensor : source_.tensors()) add(tensor);
    add_experts();
    GgufReport report;
    report.tensors = file_.tensors();
    report.bytes = file_.write(output, [&] { require_unchanged(source_.tensors()); });
    return report;
  }

 private:
  /// Throws ModelError unless the matrices of every layer are there with the shapes that
  /// config.json gives: the file says these sizes too.
  void require_shapes(const models::Config& config) const {
    std::map<std::string, const StoredTensor*> tensors;
    for (const StoredTensor& tensor : source_.tensors()) tensors[name_of(tensor)] = &tensor;
    for (std::int64_t i = 0; i < config.num_hidden_layers(); ++i) {
      for (const models::Product& product : config.layers[i].products()) {
        if (product.name.starts_with("mlp.experts.")) continue;
        const auto found = tensors.find(fmt::format("layers.{}.{}.weight", i, product.name));
        if (found == tensors.end()) {
          throw_error<ModelError>("{}: layer {} has no {}.weight, which config.json needs",
                                  source_.path().string(), i, product.name);
        }
        require_shape(*found->second, product.out, product.in);
      }
    }
    const std::string beyond = fmt::format("layers.{}.", config.num_hidden_layers());
    const auto next = tensors.lower_bound(beyond);
    if (next == tensors.end() || !next->first.starts_with(beyond)) return;
    throw_error<ModelError>("{}: there is a {}, and config.json has {} layers",
                            source_.path().string(), next->first, config.num_hidden_layers());
  }

  static void require_shape(const StoredTensor& tensor, std::int64_t out, std::int64_t in) {
    if (tensor.shape == std::vector<std::int64_t>{out, in}) return;
    throw_error<ModelError>("{} is [{}], config.json needs [{}, {}]", tensor.where(),
                            fmt::join(tensor.shape, ", "), out, in);
  }

  std::int64_t number(const char* key) const {
    const auto found = text_.find(key);
    if (found == text_.end() || !found->is_number_integer() || found->get<std::int64_t>() < 0)
      throw_error<ModelError>("{}: config.json has no number '{}', which a GGUF file states",
                              source_.path().string(), key);
    return found->get<std::int64_t>();
  }
  std::int64_t number_or(const char* key, std::int64_t otherwise) const {
    return text_.contains(key) && text_[key].is_number_integer() ? number(key) : otherwise;
  }
  void count(const std::string& key, std::int64_t value) {
    file_.add(form_.architecture + "." + key, static_cast<std::uint32_t>(value));
  }

  void add_values() {
    const std::string& name = form_.architecture;
    file_.add("general.architecture", name);
    file_.add("general.type", std::string("model"));
    file_.add("general.name", source_.path().filename().string());
    count("block_count", number("num_hidden_layers"));
    count("context_length", number("max_position_embeddings"));
    count("embedding_length", number("hidden_size"));
    count("feed_forward_length",
          number_or("intermediate_size", number_or("moe_intermediate_size", 0)));
    const std::int64_t heads = number("num_attention_heads");
    const std::int64_t head_dim = number_or("head_dim", number("hidden_size") / heads);
    count("attention.head_count", heads);
    count("attention.head_count_kv", number("num_key_value_heads"));
    count("attention.key_length", head_dim);
    count("attention.value_length", head_dim);
    file_.add(name + ".attention.layer_norm_rms_epsilon",
              static_cast<float>(text_.value("rms_norm_eps", 1e-6)));
    add_rope(name, head_dim);
    if (const std::int64_t experts = expert_count(); experts > 0) {
      count("expert_count", experts);
      count("expert_used_count", number("num_experts_per_tok"));
      count("expert_feed_forward_length", number("moe_intermediate_size"));
      if (const auto shared = number_or("shared_expert_intermediate_size", 0); shared > 0)
        count("expert_shared_feed_forward_length", shared);
    }
    if (form_.is_hybrid) {
      count("ssm.conv_kernel", number("linear_conv_kernel_dim"));
      count("ssm.state_size", number("linear_key_head_dim"));
      count("ssm.group_count", number("linear_num_key_heads"));
      count("ssm.time_step_rank", number("linear_num_value_heads"));
      count("ssm.inner_size", number("linear_value_head_dim") * number("linear_num_value_heads"));
      count("full_attention_interval", full_attention_interval());
    }
    add_gguf_vocabulary(file_, source_, embedding().shape.at(0));
  }

  /// transformers writes Qwen3-MoE's number under either name.
  std::int64_t expert_count() const {
    return number_or("num_experts", number_or("num_local_experts", 0));
  }

  void add_rope(const std::string& name, std::int64_t head_dim) {
    const Json rope = text_.value("rope_parameters", Json::object());
    const auto of = [&](const char* key, double otherwise) {
      return rope.contains(key) ? rope.value(key, otherwise) : text_.value(key, otherwise);
    };
    if (rope.value("rope_type", "default") != "default" ||
        (text_.contains("rope_scaling") && !text_["rope_scaling"].is_null())) {
      throw_error<ModelError>("{}: scaled rotary embeddings have no place in this export",
                              source_.path().string());
    }
    file_.add(name + ".rope.freq_base", static_cast<float>(of("rope_theta", 10000)));
    if (!form_.is_hybrid) return;
    const double share = of("partial_rotary_factor", 0.25);
    count("rope.dimension_count", static_cast<std::int64_t>(static_cast<double>(head_dim) * share));
    if (!form_.orders_v_heads) return;
    std::vector<std::int32_t> sections = {11, 11, 10};
    if (rope.contains("mrope_section"))
      sections = rope["mrope_section"].get<std::vector<std::int32_t>>();
    sections.resize(4, 0);
    file_.add(name + ".rope.dimension_sections", sections);
  }

  /// Every so many layers one has full attention, the last of them. Throws ModelError for layers in
  /// another order, which the layout cannot say.
  std::int64_t full_attention_interval() const {
    const std::int64_t layers = number("num_hidden_layers");
    const Json types = text_.value("layer_types", Json::array());
    std::int64_t interval = number_or("full_attention_interval", 4);
    if (!types.empty()) {
      const auto first = std::find(types.begin(), types.end(), "full_attention");
      interval = first == types.end() ? layers + 1 : first - types.begin() + 1;
    }
    for (std::int64_t i = 0; i < std::ssize(types); ++i) {
      if ((types[static_cast<std::size_t>(i)] == "full_attention") != ((i + 1) % interval == 0))
        throw_error<ModelError>(
            "{}: layer_types: full attention does not come every {} layers, "
            "which the GGUF layout cannot say",
            source_.path().string(), interval);
    }
    return interval;
  }

  const StoredTensor& embedding() const {
    for (const StoredTensor& tensor : source_.tensors()) {
      if (name_of(tensor) != "embed_tokens.weight") continue;
      // Each row becomes a token's text in the file, also one without weights.
      if (tensor.shape.size() != 2) throw_error<ModelError>("{} is no matrix", tensor.where());
      require_shape(tensor, tensor.shape[0], number("hidden_size"));
      return tensor;
    }
    throw_error<ModelError>("{}: no embed_tokens.weight", source_.path().string());
  }

  /// The name in the text model without its prefixes; "" for other parts.
  static std::string name_of(const StoredTensor& tensor) {
    std::string name = tensor.name;
    for (const char* prefix : {"model.", "language_model.", "model."}) {
      if (name.starts_with(prefix)) name.erase(0, std::string_view(prefix).size());
    }
    return name.starts_with("visual.") || name.starts_with("mtp.") ? "" : name;
  }

  void add(const StoredTensor& tensor) {
    const std::string name = name_of(tensor);
    if (name.empty()) return;
    if (name == "embed_tokens.weight") return put("token_embd.weight", tensor, false);
    if (name == "norm.weight") return put("output_norm.weight", tensor, true);
    if (name == "lm_head.weight") return put("output.weight", tensor, false);
    const std::size_t dot = name.find('.', 7);
    if (!name.starts_with("layers.") || dot == std::string::npos) unknown(tensor);
    const std::string block = "blk." + name.substr(7, dot - 7) + ".", part = name.substr(dot + 1);
    if (part.starts_with("mlp.experts.")) {
      experts_[block].emplace(part.substr(12), &tensor);
    } else if (part.starts_with("mlp.gate_proj.") && expert_count() > 0) {
      throw_error<ModelError>(
          "{}: a dense layer among layers with experts has no place in "
          "llama.cpp's layout of {}",
          tensor.where(), form_.architecture);
    } else if (part == "linear_attn.in_proj_qkvz.weight") {
      put_qkvz(block, tensor);
    } else if (part == "post_attention_layernorm.weight") {
      put(block + (form_.is_hybrid ? "post_attention_norm" : "ffn_norm") + ".weight", tensor, true);
    } else if (const auto known = layer_names().find(part); known != layer_names().end()) {
      const bool is_norm = part.ends_with("norm.weight") && !part.starts_with("linear_attn.");
      put(block + known->second, tensor, is_norm);
    } else {
      unknown(tensor);
    }
  }

  [[noreturn]] void unknown(const StoredTensor& tensor) const {
    throw_error<ModelError>("{} has no place in llama.cpp's layout of {}", tensor.where(),
                            form_.architecture);
  }

  /// Matrices keep their type.
  at::ScalarType type_of(const StoredTensor& tensor, bool is_matrix) const {
    const at::ScalarType type = to_scalar_type(tensor.dtype).value_or(at::kFloat);
    return is_matrix && type != at::kDouble ? type : at::kFloat;
  }

  void put(const std::string& name, const StoredTensor& tensor, bool is_norm) {
    std::vector<std::int64_t> shape = tensor.shape;
    const bool is_convolution = name.ends_with("ssm_conv1d.weight");
    if (is_convolution) shape = {shape.at(0), shape.back()};
    const bool is_matrix =
        shape.size() > 1 && !is_convolution && name.find("ffn_gate_inp") == std::string::npos;
    const at::ScalarType type = type_of(tensor, is_matrix);
    file_.add(name, shape, type, [this, &tensor, name, is_norm, shape, type] {
      at::Tensor value = read_tensor(tensor, type).reshape(shape);
      if (name.ends_with("ssm_a")) value = at::exp(value).neg();
      if (is_norm && form_.is_hybrid) value = value + 1;
      return form_.orders_v_heads ? with_tiled_heads(name, value) : value;
    });
  }

  /// Value heads stand grouped by their key head, [k0v0, k0v1, k1v0, ...]; llama.cpp repeats keys
  /// over [k0v0, k1v0, ..., k0v1, ...].
  at::Tensor with_tiled_heads(const std::string& name, const at::Tensor& value) const {
    const std::int64_t keys = number("linear_num_key_heads"),
                       each = number("linear_num_value_heads") / keys,
                       head = number("linear_value_head_dim");
    if (each == 1) return value;
    const auto tiled = [&](const at::Tensor& rows, std::int64_t width) {
      std::vector<std::int64_t> shape = rows.sizes().vec();
      shape.erase(shape.begin());
      shape.insert(shape.begin(), {keys, each, width});
      return rows.reshape(shape).transpose(0, 1).contiguous().view(rows.sizes());
    };
    const std::int64_t qk = 2 * keys * number("linear_key_head_dim");
    const std::string part = name.substr(name.rfind("blk.") == 0 ? name.find('.', 4) + 1 : 0);
    if (part == "attn_qkv.weight" || part == "ssm_conv1d.weight")
      return at::cat(
          {value.narrow(0, 0, qk), tiled(value.narrow(0, qk, value.size(0) - qk), head)});
    if (part == "attn_gate.weight") return tiled(value, head);
    if (part == "ssm_beta.weight" || part == "ssm_alpha.weight" || part == "ssm_a" ||
        part == "ssm_dt.bias")
      return tiled(value, 1);
    if (part == "ssm_out.weight") return tiled(value.t().contiguous(), head).t().contiguous();
    return value;
  }

  /// Qwen3-Next stores [q | k | v | z] for each key head; the layout wants q|k|v of all heads, and
  /// z.
  void put_qkvz(const std::string& block, const StoredTensor& tensor) {
    const std::int64_t keys = number("linear_num_key_heads"), k = number("linear_key_head_dim"),
                       v = number("linear_num_value_heads") / keys *
                           number("linear_value_head_dim"),
                       width = tensor.shape.at(1);
    const at::ScalarType type = type_of(tensor, true);
    const auto part = [this, &tensor, keys, k, v, width, type](std::int64_t begin,
                                                               std::int64_t length) {
      return read_tensor(tensor, type)
          .view({keys, 2 * k + 2 * v, width})
          .narrow(1, begin, length)
          .reshape({keys * length, width});
    };
    file_.add(block + "attn_qkv.weight", {keys * (2 * k + v), width}, type, [=] {
      return at::cat({part(0, k), part(k, k), part(2 * k, v)});
    });
    file_.add(block + "attn_gate.weight", {keys * v, width}, type,
              [=] { return part(2 * k + v, v); });
  }

  void add_experts() {
    for (const auto& [block, parts] : experts_) {
      if (parts.contains("gate_up_proj")) {
        const StoredTensor& both = *parts.at("gate_up_proj");
        const std::int64_t half = both.shape.at(1) / 2;
        const at::ScalarType type = type_of(both, true);
        for (const auto& [name, begin] : {std::pair{"gate", std::int64_t{0}}, {"up", half}}) {
          file_.add(fmt::format("{}ffn_{}_exps.weight", block, name),
                    {both.shape[0], half, both.shape[2]}, type, [&both, type, begin, half] {
                      return read_tensor(both, type, at::kCPU, {{1, begin, half}});
                    });
        }
        put(block + "ffn_down_exps.weight", *parts.at("down_proj"), false);
        continue;
      }
      for (const char* name : {"gate", "up", "down"}) stack(block, name, parts);
    }
  }

  /// Experts that are stored one by one.
  void stack(const std::string& block, const char* name,
             const std::map<std::string, const StoredTensor*>& parts) {
    std::vector<const StoredTensor*> experts;
    for (std::int64_t e = 0; e < expert_count(); ++e) {
      const auto found = parts.find(fmt::format("{}.{}_proj.weight", e, name));
      if (found == parts.end())
        throw_error<ModelError>("{}: {} has no expert {} for {}_proj", source_.path().string(),
                                block, e, name);
      experts.push_back(found->second);
    }
    std::vector<std::int64_t> shape = experts.front()->shape;
    shape.insert(shape.begin(), std::ssize(experts));
    const at::ScalarType type = type_of(*experts.front(), true);
    file_.add(fmt::format("{}ffn_{}_exps.weight", block, name), shape, type, [experts, type] {
      std::vector<at::Tensor> values;
      for (const StoredTensor* expert : experts) values.push_back(read_tensor(*expert, type));
      return at::stack(values);
    });
  }

  const ModelDirectory& source_;
  const Json text_;
  models::GgufForm form_;
  GgufFile file_;
  /// By block, e.g. "blk.0.": names below mlp.experts.
  std::map<std::string, std::map<std::string, const StoredTensor*>> experts_;
};

}  // namespace

GgufReport write_gguf(const ModelDirectory& source, const Path& output) {
  try {
    return GgufModel(source).write(output);
  } catch (const nlohmann::json::exception& error) {
    throw_error<ModelError>("{}: configuration or tokenizer is not as expected: {}",
                            source.path().string(), error.what());
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    throw_error<ModelError>("{}: a tensor has not the shape that config.json gives: {}",
                            source.path().string(), text.substr(0, text.find('\n')));
  } catch (const std::out_of_range&) {
    throw_error<ModelError>("{}: a tensor has fewer dimensions than config.json gives",
                            source.path().string());
  }
}

}  // namespace heddle::ckpt
