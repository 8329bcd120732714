// Joins the CUDA kernels of sample_tokens with ATen.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include "ops/cuda/kernels.h"
#include "ops/cuda/tensor.h"
#include "ops/sampling/cuda/sampling.h"
#include "ops/sampling/kernels.h"

namespace heddle::ops::sample_tokens_cuda {
namespace {

SampleTokens::Tokens draw(const SampleTokens::Inputs& in, const SampleTokens::Next* next) {
  const cuda::OnDevice on(in.logits);
  const at::Tensor logits = cuda::with_unit_stride(in.logits);
  const std::int64_t B = logits.size(0), V = logits.size(1);
  SampleTokens::Tokens tokens{at::empty({B}, in.seeds.options()),
                              at::empty({B}, in.top_p.options()),
                              at::empty({B}, in.top_p.options()),
                              {}};
  if (in.support > 0) tokens.supports = at::full({B, in.support}, -1, in.seeds.options());
  const at::Tensor workspace =
      at::empty({cuda::sample_tokens_workspace(B, V)}, logits.options().dtype(at::kByte));
  cuda::SampleTokensArguments a{};
  a.type = cuda::element_of(logits);
  a.batch = static_cast<int>(B);
  a.vocabulary = static_cast<int>(V);
  a.logits = cuda::input_rows(logits);
  a.temperature = in.temperature.const_data_ptr<float>();
  a.top_p = in.top_p.const_data_ptr<double>();
  a.min_p = in.min_p.const_data_ptr<double>();
  a.top_k = in.top_k.const_data_ptr<std::int64_t>();
  a.seeds = in.seeds.const_data_ptr<std::int64_t>();
  a.positions = in.positions.const_data_ptr<std::int64_t>();
  a.stream_name = sampling_stream();
  a.ids = tokens.ids.mutable_data_ptr<std::int64_t>();
  a.logprobs = tokens.logprobs.mutable_data_ptr<double>();
  a.sampled_logprobs = tokens.sampled_logprobs.mutable_data_ptr<double>();
  a.support = static_cast<int>(in.support);
  if (in.support > 0) a.supports = tokens.supports.mutable_data_ptr<std::int64_t>();
  a.workspace = workspace.mutable_data_ptr();
  if (next != nullptr) {
    TORCH_CHECK(next->tokens.is_contiguous() && next->counts.is_contiguous() &&
                    next->is_real.is_contiguous() && next->told.is_contiguous() &&
                    next->told.is_pinned() && next->told.numel() == 6 * B &&
                    next->counts.size(1) == B,
                "sample_tokens: contiguous numbers of ", B, " rows, told in pinned memory");
    a.next_tokens = next->tokens.mutable_data_ptr<std::int64_t>();
    a.counts = next->counts.mutable_data_ptr<std::int64_t>();
    a.counted = static_cast<int>(next->counts.size(0));
    a.is_real = next->is_real.const_data_ptr<std::int64_t>();
    // One address for host and device.
    a.told = next->told.mutable_data_ptr<double>();
  }
  cuda::sample_tokens(a, on.stream());
  return tokens;
}

SampleTokens::Tokens forward(const SampleTokens::Inputs& in) { return draw(in, nullptr); }

void go_on(const SampleTokens::Inputs& in, const SampleTokens::Next& next) { draw(in, &next); }

}  // namespace

}  // namespace heddle::ops::sample_tokens_cuda

namespace heddle::ops::cuda {

void add_sample_tokens(Registry& registry) {
  using namespace sample_tokens_cuda;
  registry.add<SampleTokens>(KernelInfo::cuda("cuda.fused"), {forward, go_on});
}

}  // namespace heddle::ops::cuda
