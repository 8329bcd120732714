// Answers as protobuf.
#include <protozero/pbf_writer.hpp>

#include "serve/tinker/wire.h"

namespace heddle::serve::tinker {
namespace {

using protozero::pbf_writer;

// proto3 leaves out what has its default value.
void put(pbf_writer& out, std::uint32_t field, const std::string& bytes) {
  if (!bytes.empty()) out.add_bytes(field, bytes);
}
void put_sizes(pbf_writer& out, std::uint32_t field, const std::vector<std::int64_t>& sizes) {
  if (!sizes.empty()) out.add_packed_int64(field, sizes.begin(), sizes.end());
}

/// A message inside another, also an empty one: protozero's own nesting leaves that out.
template <class Fill>
void put_message(pbf_writer& out, std::uint32_t field, const Fill& fill) {
  std::string bytes;
  pbf_writer message(bytes);
  fill(message);
  out.add_message(field, bytes);
}

void put(pbf_writer& out, std::uint32_t field, const TopkLogprobs& topk) {
  put_message(out, field, [&](pbf_writer& message) {
    put(message, 1, as_bytes(topk.token_ids));
    put(message, 2, as_bytes(topk.logprobs));
    if (topk.k != 0) message.add_uint32(3, topk.k);
    if (topk.length != 0) message.add_uint32(4, topk.length);
  });
}

void put(pbf_writer& out, std::uint32_t field, const Tensor& tensor) {
  put_message(out, field, [&](pbf_writer& message) {
    if (tensor.is_sparse) {
      put_message(message, 2, [&](pbf_writer& matrix) {
        put(matrix, 1, tensor.values);
        put(matrix, 2, tensor.crow_indices);
        put(matrix, 3, tensor.col_indices);
      });
    } else {
      message.add_bytes(1, tensor.values);  // one of two: there even if it is empty
    }
    if (tensor.dtype != DType::kUnspecified) message.add_enum(3, static_cast<int>(tensor.dtype));
    put_sizes(message, 4, tensor.shape);
  });
}

void put(pbf_writer& out, std::uint32_t field, const BatchedTensor& tensor) {
  put_message(out, field, [&](pbf_writer& message) {
    put(message, 1, tensor.data);
    put(message, 2, as_bytes(tensor.offsets));
    if (tensor.dtype != DType::kUnspecified) message.add_enum(3, static_cast<int>(tensor.dtype));
    put_sizes(message, 4, tensor.trailing_shape);
  });
}

}  // namespace

std::string encode(const ForwardBackwardOutput& output) {
  std::string bytes;
  pbf_writer out(bytes);
  put(out, 1, output.loss_fn_output_type);
  for (const ArrayRecord& record : output.records) {
    put_message(out, 2, [&](pbf_writer& message) {
      put(message, 1, output.loss_fn_output_type);
      for (const auto& [name, tensor] : record.fields) {
        pbf_writer entry(message, 2);
        entry.add_string(1, name);
        put(entry, 2, tensor);
      }
      if (record.num_datums != 0) message.add_int64(3, record.num_datums);
    });
  }
  for (const auto& [name, value] : output.metrics) {
    pbf_writer entry(out, 3);
    entry.add_string(1, name);
    entry.add_double(2, value);
  }
  return bytes;
}

std::string encode(const SampleResponse& response) {
  std::string bytes;
  pbf_writer out(bytes);
  for (const SampledSequence& sequence : response.sequences) {
    pbf_writer message(out, 1);
    if (sequence.is_cut) message.add_enum(1, 1);
    put(message, 2, as_bytes(sequence.tokens));
    message.add_bytes(3, as_bytes(sequence.logprobs));
    if (sequence.topk) put(message, 4, *sequence.topk);
  }
  if (response.prompt_logprobs) out.add_bytes(2, as_bytes(*response.prompt_logprobs));
  if (response.topk_prompt_logprobs) put(out, 3, *response.topk_prompt_logprobs);
  if (response.prompt_cache_hit_tokens != 0) out.add_int32(4, response.prompt_cache_hit_tokens);
  if (response.target_prompt_logprobs) put(out, 5, *response.target_prompt_logprobs);
  if (response.prompt_alt_tokens) {
    put_message(out, 6, [&](pbf_writer& message) {
      put(message, 1, response.prompt_alt_tokens->tokens);
      put(message, 2, response.prompt_alt_tokens->logprobs);
    });
  }
  return bytes;
}

}  // namespace heddle::serve::tinker
