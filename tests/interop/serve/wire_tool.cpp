// Drives the protobuf code of the server for test_wire.py, which compares with Python's runtime.
//   heddle_wire_tool decode   ForwardBackwardRequests, each after its length (4 bytes), -> JSON
//   lines heddle_wire_tool encode   JSON lines {"output": ...} or {"sample": ...} -> messages after
//   their lengths
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <string>

#include <nlohmann/json.hpp>

#include "serve/http/request.h"
#include "serve/tinker/wire.h"

namespace {

using namespace heddle::serve::tinker;
using nlohmann::json;

std::string hex(const std::string& bytes) {
  std::string out;
  for (const unsigned char byte : bytes) out += fmt::format("{:02x}", byte);
  return out;
}

std::string unhex(const std::string& digits) {
  std::string out;
  for (std::size_t i = 0; i + 1 < digits.size(); i += 2)
    out += static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16));
  return out;
}

json as_json(const ForwardBackwardRequest& request) {
  json data = json::array();
  for (const Datum& datum : request.data) {
    json chunks = json::array(), inputs = json::object();
    for (const Chunk& chunk : datum.model_input)
      chunks.push_back({{"kind", static_cast<int>(chunk.kind)}, {"tokens", chunk.tokens}});
    for (const auto& [name, tensor] : datum.loss_fn_inputs)
      inputs[name] = {{"sparse", tensor.is_sparse},
                      {"values", hex(tensor.values)},
                      {"crow", hex(tensor.crow_indices)},
                      {"col", hex(tensor.col_indices)},
                      {"dtype", static_cast<int>(tensor.dtype)},
                      {"shape", tensor.shape}};
    data.push_back({{"chunks", chunks}, {"inputs", inputs}});
  }
  return {{"model_id", request.model_id},
          {"seq_id", request.seq_id},
          {"loss_fn", request.loss_fn},
          {"numbers", request.numbers},
          {"texts", request.texts},
          {"forward_only", request.forward_only},
          {"data", data}};
}

TopkLogprobs topk_of(const json& value) {
  return {value.at("ids"), value.at("logprobs"), value.at("k"), value.at("length")};
}

Tensor tensor_of(const json& tensor) {
  const bool is_sparse = tensor.contains("crow");
  return {is_sparse,
          unhex(tensor.at("values")),
          is_sparse ? unhex(tensor.at("crow")) : "",
          is_sparse ? unhex(tensor.at("col")) : "",
          static_cast<DType>(tensor.at("dtype").get<int>()),
          tensor.at("shape")};
}

std::string encoded(const json& value) {
  if (value.contains("output")) {
    const json& in = value.at("output");
    ForwardBackwardOutput output;
    output.loss_fn_output_type = in.at("type");
    output.metrics = in.at("metrics").get<std::map<std::string, double>>();
    for (const json& told : in.at("records")) {
      ArrayRecord& record = output.records.emplace_back();
      record.num_datums = told.at("num_datums");
      for (const auto& [name, field] : told.at("fields").items())
        record.fields[name] = {unhex(field.at("data")), field.at("offsets"),
                               static_cast<DType>(field.at("dtype").get<int>()),
                               field.at("trailing_shape")};
    }
    return encode(output);
  }
  const json& in = value.at("sample");
  SampleResponse response;
  for (const json& each : in.at("sequences")) {
    SampledSequence sequence{each.at("is_cut"), each.at("tokens"), each.at("logprobs"), {}};
    if (each.contains("topk")) sequence.topk = topk_of(each.at("topk"));
    response.sequences.push_back(sequence);
  }
  if (in.contains("prompt_logprobs"))
    response.prompt_logprobs = in.at("prompt_logprobs").get<std::vector<float>>();
  if (in.contains("topk")) response.topk_prompt_logprobs = topk_of(in.at("topk"));
  response.prompt_cache_hit_tokens = in.at("cached");
  if (in.contains("targets")) response.target_prompt_logprobs = tensor_of(in.at("targets"));
  if (in.contains("alternatives")) {
    const json& both = in.at("alternatives");
    response.prompt_alt_tokens = {tensor_of(both.at("tokens")), tensor_of(both.at("logprobs"))};
  }
  return encode(response);
}

void decode_all() {
  std::uint32_t size = 0;
  while (std::fread(&size, sizeof size, 1, stdin) == 1) {
    std::string bytes(size, '\0');
    if (size > 0 && std::fread(bytes.data(), size, 1, stdin) != 1) return;
    try {
      // Names in a broken message may be no UTF-8.
      std::cout << as_json(decode_forward_backward(bytes))
                       .dump(-1, ' ', false, json::error_handler_t::replace)
                << "\n";
    } catch (const heddle::serve::HttpError& error) {
      std::cout << json{{"refused", error.status()}}.dump() << "\n";
    }
  }
}

void encode_all() {
  for (std::string line; std::getline(std::cin, line);) {
    const std::string bytes = encoded(json::parse(line));
    const auto size = static_cast<std::uint32_t>(bytes.size());
    std::fwrite(&size, sizeof size, 1, stdout);
    std::fwrite(bytes.data(), 1, bytes.size(), stdout);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 2;
  std::string(arguments[1]) == "decode" ? decode_all() : encode_all();
  return 0;
}
