#include "ckpt/quantisation.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "base/errors.h"
#include "base/log.h"
#include "base/text.h"

namespace heddle::ckpt {
namespace {

/// A way to store weights in few bits.
struct Format {
  std::string_view name;
  std::string_view method;  ///< A part of quantization_config.quant_method.
  /// Endings of tensor names that this format alone has.
  std::array<std::string_view, 3> endings;
  /// How to get plain weights; {} stands for the folder. Empty: from the original release alone.
  std::string_view remedy;
};

constexpr std::string_view kTransformers =
    "python -c \"from transformers import AutoModelForCausalLM as M{}; "
    "M.from_pretrained('{}', dtype='bfloat16'{}){}.save_pretrained('{}-bf16')\"";

// In the order of the search: what stands first shares no ending with what follows.
constexpr std::array<Format, 12> kFormats = {{
    {"bitsandbytes 8 bit", "", {".SCB", ".weight_format"}, "bitsandbytes"},
    {"bitsandbytes 4 bit", "", {".absmax", ".quant_map", ".nested_absmax"}, "bitsandbytes"},
    {"bitsandbytes", "bitsandbytes", {}, "bitsandbytes"},
    {"HQQ", "hqq", {".W_q"}, ""},
    {"MLX", "mlx", {".biases"}, "mlx"},
    {"GPTQ", "gptq", {".g_idx"}, ""},
    {"AWQ", "awq", {}, ""},
    {"GPTQ or AWQ", "", {".qweight", ".qzeros"}, ""},
    {"compressed-tensors", "compressed-tensors", {".weight_packed"}, "compressed"},
    {"MXFP4", "mxfp4", {"_blocks"}, "mxfp4"},
    {"FP8", "fp8", {".weight_scale_inv"}, "fp8"},
    {"", "", {".weight_scale", ".input_scale"}, ""},
}};

bool ends_as(const Format& format, std::string_view name) {
  return std::any_of(format.endings.begin(), format.endings.end(), [&](std::string_view ending) {
    return !ending.empty() && name.ends_with(ending);
  });
}

std::string remedy(const Format& format, const std::string& folder) {
  const auto transformers = [&](std::string_view imported, std::string_view argument,
                                std::string_view then) {
    return fmt::format(fmt::runtime(kTransformers), imported, folder, argument, then, folder);
  };
  if (format.remedy == "bitsandbytes") return transformers("", "", ".dequantize()");
  if (format.remedy == "fp8") {
    return transformers(", FineGrainedFP8Config as C", ", quantization_config=C(dequantize=True)",
                        "");
  }
  if (format.remedy == "mxfp4")
    return transformers(", Mxfp4Config as C", ", quantization_config=C(dequantize=True)", "");
  if (format.remedy == "compressed") {
    return transformers(", CompressedTensorsConfig as C",
                        ", quantization_config=C(run_compressed=False)", "");
  }
  if (format.remedy == "mlx") {
    return fmt::format("python -m mlx_lm convert --dequantize --hf-path {} --mlx-path {}-bf16",
                       folder, folder);
  }
  return "";
}

/// Name of the quantisation format in config.json; empty if it names none.
std::string method_of(const nlohmann::ordered_json& config) {
  const auto of = [](const nlohmann::ordered_json& json) -> std::string {
    if (json.contains("quantization_config") && json["quantization_config"].is_object()) {
      const auto method = json["quantization_config"].find("quant_method");
      const bool is_named = method != json["quantization_config"].end() && method->is_string();
      return is_named ? method->get<std::string>() : "of an unnamed method";
    }
    return json.contains("quantization") && json["quantization"].is_object() ? "mlx" : "";
  };
  const std::string method = of(config);
  if (!method.empty() || !config.contains("text_config")) return method;
  return of(config["text_config"]);
}

/// The format that config.json or the tensors tell; its name is empty if neither does.
Format format_of(const std::string& method, const std::vector<StoredTensor>& tensors) {
  const auto has_tensors = [&](const Format& format) {
    return std::any_of(tensors.begin(), tensors.end(),
                       [&](const StoredTensor& tensor) { return ends_as(format, tensor.name); });
  };
  for (const Format& format : kFormats) {
    const bool is_named = !format.method.empty() && method.find(format.method) != method.npos;
    // bitsandbytes has one name for two formats.
    const bool asks_tensors = method.empty() || method == "bitsandbytes";
    if (!format.name.empty() && (is_named || (asks_tensors && has_tensors(format)))) return format;
  }
  return {method, "", {}, ""};
}

}  // namespace

void check_not_quantised(const Path& path, const nlohmann::ordered_json& config,
                         const std::vector<StoredTensor>& tensors) {
  const std::string method = method_of(config);
  std::vector<std::string> found;
  for (const StoredTensor& tensor : tensors) {
    const bool is_named = std::any_of(kFormats.begin(), kFormats.end(), [&](const Format& format) {
      return ends_as(format, tensor.name);
    });
    const bool is_coded = !is_plain_float(tensor.dtype) && tensor.name.ends_with(".weight");
    if (is_named || is_coded || is_scaled_float(tensor.dtype))
      found.push_back(fmt::format("{} ({})", tensor.name, name_of(tensor.dtype)));
  }
  if (found.empty()) {
    if (!method.empty()) {
      log::warning(
          "{}: config.json names the quantisation '{}', but the weights are plain: they are taken "
          "as they are",
          path.string(), method);
    }
    return;
  }
  const Format format = format_of(method, tensors);
  const std::string command = remedy(format, path.string());
  throw_error<ModelError>(
      "{}: {} tensors are of a quantised checkpoint{}: {}. Heddle trains F32, BF16 and F16 "
      "weights: take the unquantised release of the model{}",
      path.string(), found.size(), format.name.empty() ? "" : fmt::format(" ({})", format.name),
      text::list_some(found),
      command.empty() ? "" : fmt::format(", or dequantise this one once: {}", command));
}

}  // namespace heddle::ckpt
