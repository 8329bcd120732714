#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// Messages of the package tinker_public (proto3) that cross HTTP, by the field numbers of the
/// SDK's descriptor. Encoded bytes are those of Python's runtime with deterministic order of maps.
namespace heddle::serve::tinker {

enum class DType { kUnspecified = 0, kFloat32 = 1, kInt64 = 2, kInt32 = 3, kBfloat16 = 4 };

/// A dense tensor, or a matrix in CSR form.
struct Tensor {
  bool is_sparse = false;
  std::string values;                     ///< Little-endian numbers of `dtype`.
  std::string crow_indices, col_indices;  ///< int64, of a sparse one.
  DType dtype = DType::kUnspecified;
  std::vector<std::int64_t> shape;
};

struct Chunk {
  enum class Kind { kNone, kText, kImage, kDmel };
  Kind kind = Kind::kNone;
  std::vector<std::int32_t> tokens;  ///< Text alone; other kinds are refused later and not kept.
};

struct Datum {
  std::vector<Chunk> model_input;
  std::map<std::string, Tensor> loss_fn_inputs;
};

struct ForwardBackwardRequest {
  std::string model_id;
  std::int64_t seq_id = 0;  ///< 0: not set.
  std::vector<Datum> data;
  std::string loss_fn;
  std::map<std::string, double> numbers;     ///< loss_fn_config
  std::map<std::string, std::string> texts;  ///< Text values of loss_fn_config_v2.
  bool forward_only = false;
};
/// Throws HttpError 422 with the byte at which the message is broken, or the number of a field that
/// is not known: the fields are those of the SDK from 0.18 to 0.38.0.
ForwardBackwardRequest decode_forward_backward(std::string_view bytes);

/// Where a request stands in the order of its run.
struct Place {
  std::string run;
  std::int64_t seq = 0;  ///< 0: its client does not number, or it cannot be read.
};
/// The place of a message, as far as it can be read.
Place decode_place(std::string_view bytes);

/// One field of all datums of an output: numbers one after another.
struct BatchedTensor {
  std::string data;
  std::vector<std::int64_t> offsets;  ///< [datums + 1], in bytes.
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> trailing_shape;
};

/// Consecutive datums whose fields have the same trailing shapes.
struct ArrayRecord {
  std::map<std::string, BatchedTensor> fields;
  std::int64_t num_datums = 0;
};

struct ForwardBackwardOutput {
  std::string loss_fn_output_type = "ArrayRecord";
  std::vector<ArrayRecord> records;
  std::map<std::string, double> metrics;
};
std::string encode(const ForwardBackwardOutput& output);

/// Row-major [length, k]; an empty cell is token 0 with -99999.
struct TopkLogprobs {
  std::vector<std::int32_t> token_ids;
  std::vector<float> logprobs;
  std::uint32_t k = 0, length = 0;
};

struct SampledSequence {
  bool is_cut = false;  ///< Ended by max_tokens, not by a stop.
  std::vector<std::int32_t> tokens;
  std::vector<float> logprobs;
  std::optional<TopkLogprobs> topk;
};

/// Draws [length - 1, k] in the places of a prompt.
struct PromptAltTokens {
  Tensor tokens, logprobs;
};

struct SampleResponse {
  std::vector<SampledSequence> sequences;
  std::optional<std::vector<float>> prompt_logprobs;  ///< NaN: none.
  std::optional<TopkLogprobs> topk_prompt_logprobs;
  std::int32_t prompt_cache_hit_tokens = 0;
  std::optional<Tensor> target_prompt_logprobs;
  std::optional<PromptAltTokens> prompt_alt_tokens;
};
std::string encode(const SampleResponse& response);

/// Numbers as the wire has them, and back. `bytes` must be whole numbers.
template <class Number>
std::string as_bytes(const std::vector<Number>& numbers) {
  return std::string(reinterpret_cast<const char*>(numbers.data()),
                     numbers.size() * sizeof(Number));
}

}  // namespace heddle::serve::tinker
