#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "base/errors.h"
#include "base/files.h"
#include "base/rng.h"
#include "ckpt/tensor_io.h"

namespace heddle::ckpt::testing {

/// A file of a header as it is given and zeros as data.
inline std::string raw_safetensors(const std::string& header, std::size_t data_bytes) {
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(header.size() >> (8 * i) & 0xff));
  return bytes + header + std::string(data_bytes, '\0');
}

/// Standard normal values that depend on the name only.
at::Tensor random_tensor(const std::string& name, std::vector<std::int64_t> shape,
                         at::ScalarType dtype = at::kFloat);

/// Same type, shape and bits.
bool is_identical(const at::Tensor& a, const at::Tensor& b);

/// A model directory of these tensors, in shards of at most `shard_bytes`.
void write_model(const Path& path, const std::vector<NamedTensor>& tensors,
                 std::uint64_t shard_bytes = 5'000'000'000);

/// what() of the error of type E that `body` throws; a failure if it throws none.
template <class E, class F>
std::string message_of(F&& body) {
  try {
    body();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected an error";
  return "";
}

}  // namespace heddle::ckpt::testing
