#include "ops/sequences.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "device/upload.h"

namespace heddle::ops {

Sequences Sequences::from_host(std::vector<std::int32_t> cu_seqlens, c10::Device device) {
  TORCH_CHECK(!cu_seqlens.empty() && cu_seqlens.front() == 0, "cu_seqlens must begin with 0");
  Sequences sequences;
  for (std::size_t i = 1; i < cu_seqlens.size(); ++i) {
    TORCH_CHECK(cu_seqlens[i] >= cu_seqlens[i - 1], "cu_seqlens decreases at entry ", i, ": ",
                cu_seqlens[i - 1], " then ", cu_seqlens[i]);
    sequences.max_seqlen =
        std::max<std::int64_t>(sequences.max_seqlen, cu_seqlens[i] - cu_seqlens[i - 1]);
  }
  at::Tensor host = at::empty({static_cast<std::int64_t>(cu_seqlens.size())}, at::kInt);
  std::copy(cu_seqlens.begin(), cu_seqlens.end(), host.mutable_data_ptr<std::int32_t>());
  sequences.cu_seqlens = device::upload(host, device);
  sequences.cu_seqlens_host = std::move(cu_seqlens);
  return sequences;
}

}  // namespace heddle::ops
