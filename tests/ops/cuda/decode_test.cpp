// The CUDA kernels that decode one token of many sequences, against the references in fp64 on the
// CPU.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>

#include <functional>
#include <limits>

#include "ops/attention/attention_decode.h"
#include "ops/builtin.h"
#include "ops/causal_conv1d/conv_decode.h"
#include "ops/cuda/fused_support.h"
#include "ops/gated_delta_net/gated_delta_rule_decode.h"

namespace heddle::ops::testing {
namespace {

using GpuDecode = GpuFused;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Slots in no order, with free ones between them.
std::vector<std::int64_t> scattered(std::int64_t batch) {
  std::vector<std::int64_t> slots(static_cast<std::size_t>(batch));
  for (std::int64_t b = 0; b < batch; ++b)
    slots[static_cast<std::size_t>(b)] = 2 * ((batch + 2 - b) % batch) + 1;
  return slots;
}

/// NaN in the slots that no sequence has.
at::Tensor with_free_slots(const at::Tensor& rows, const std::vector<std::int64_t>& slots) {
  std::vector<std::int64_t> sizes = rows.sizes().vec();
  sizes[0] = 2 * sizes[0] + 1;
  at::Tensor cache = at::full(sizes, kNan, rows.options());
  for (std::size_t b = 0; b < slots.size(); ++b)
    cache.select(0, slots[b]).copy_(rows.select(0, static_cast<std::int64_t>(b)));
  return cache;
}

at::Tensor rows_of(const at::Tensor& cache, const std::vector<std::int64_t>& slots) {
  std::vector<at::Tensor> rows;
  for (const std::int64_t slot : slots) rows.push_back(cache.select(0, slot).cpu());
  return at::stack(rows);
}

at::Tensor half(const at::Tensor& x) { return x.to(at::kBFloat16); }
at::Tensor exact(const at::Tensor& x) { return x.cpu().to(at::kDouble); }

KernelTable gpu_table(const OpRequest& request, const char* name, c10::ScalarType dtype) {
  return table_of(request, name, dtype, {Platform::kCuda});
}

KernelTable exact_table(const OpRequest& request) {
  return table_of(request, "reference", at::kDouble, Target{});
}

TEST_F(GpuDecode, TheRuleEqualsTheReference) {
  for (const auto& [batch, hk, hv, dim] :
       {std::tuple{1, 2, 2, 128}, {3, 2, 6, 128}, {64, 4, 4, 128}, {3, 1, 8, 64}, {5, 2, 2, 256}}) {
    const std::vector<std::int64_t> slots = scattered(batch);
    // Columns of one projection.
    const at::Tensor qkv = half(randn({batch, (2 * hk + hv) * dim}, at::kFloat, 1));
    const auto split = [&, hk = hk, hv = hv, dim = dim](const at::Tensor& x) {
      return split_qkv(x, hk, dim, hv, dim);
    };
    const at::Tensor g = -randn({batch, hv}, at::kFloat, 2).abs(),
                     beta = randn({batch, hv}, at::kFloat, 3).sigmoid();
    const at::Tensor before = with_free_slots(randn({batch, hv, dim, dim}, at::kFloat, 4), slots);

    const auto [q64, k64, v64] = split(exact(qkv));
    at::Tensor expected_states = exact(before);
    const at::Tensor expected =
        gated_delta_rule_decode(exact_table(any<GatedDeltaRuleDecode>()),
                                {q64, k64, v64, exact(g), exact(beta), expected_states},
                                CacheRows::from_host(slots, slots, at::kCPU));

    const KernelTable kernels =
        gpu_table(OpRequest::of<GatedDeltaRuleDecode>({.head_k_dim = dim, .head_v_dim = dim}),
                  "cuda.fused", at::kBFloat16);
    const CacheRows rows = CacheRows::from_host(slots, slots, gpu());
    const auto [q, k, v] = split(qkv.to(gpu()));
    at::Tensor states = before.to(gpu()), again = states.clone();
    const at::Tensor o =
        gated_delta_rule_decode(kernels, {q, k, v, g.to(gpu()), beta.to(gpu()), states}, rows);
    EXPECT_TRUE(close(o.cpu(), expected, 5e-3)) << batch << " " << dim;
    EXPECT_TRUE(close(rows_of(states, slots), rows_of(expected_states, slots), 1e-5)) << dim;
    EXPECT_TRUE(states.select(0, 0).isnan().all().item().toBool());
    const at::Tensor o_again =
        gated_delta_rule_decode(kernels, {q, k, v, g.to(gpu()), beta.to(gpu()), again}, rows);
    EXPECT_TRUE(identical(o.cpu(), o_again.cpu()));
    EXPECT_TRUE(identical(states.cpu(), again.cpu()));
  }
}

TEST_F(GpuDecode, TheRuleRoundsStatesOfBf16Once) {
  for (const auto& [batch, hk, hv, dim] :
       {std::tuple{1, 2, 2, 128}, {3, 2, 6, 128}, {70, 4, 4, 128}, {3, 1, 8, 64}, {5, 2, 2, 256}}) {
    const std::vector<std::int64_t> slots = scattered(batch);
    const KernelTable kernels =
        gpu_table(OpRequest::of<GatedDeltaRuleDecode>({.head_k_dim = dim, .head_v_dim = dim}),
                  "cuda.fused", at::kBFloat16);
    const CacheRows rows = CacheRows::from_host(slots, slots, gpu());
    const auto [q, k, v] = split_qkv(
        half(randn({batch, (2 * hk + hv) * dim}, at::kFloat, 1)).to(gpu()), hk, dim, hv, dim);
    const at::Tensor g = -randn({batch, hv}, at::kFloat, 2).abs().to(gpu()),
                     beta = randn({batch, hv}, at::kFloat, 3).sigmoid().to(gpu());
    at::Tensor states =
        half(with_free_slots(randn({batch, hv, dim, dim}, at::kFloat, 4), slots)).to(gpu());
    at::Tensor wide = states.to(at::kFloat);
    const at::Tensor o = gated_delta_rule_decode(kernels, {q, k, v, g, beta, states}, rows),
                     expected = gated_delta_rule_decode(kernels, {q, k, v, g, beta, wide}, rows);
    EXPECT_TRUE(identical(o.cpu(), expected.cpu())) << batch << " " << dim;
    EXPECT_TRUE(identical(rows_of(states, slots), half(rows_of(wide, slots))))
        << batch << " " << dim;
    EXPECT_TRUE(states.select(0, 0).isnan().all().item().toBool());
  }
}

TEST_F(GpuDecode, AttentionEqualsTheReference) {
  constexpr std::int64_t kPageTokens = 32, kPages = 32, kCapacity = kPages * kPageTokens;
  const std::vector<std::int64_t> some = {0, 1, 62, 63, 64, 126, 127, 128, 500, 999, 1000};
  for (const auto& [batch, hkv, group, dim] : {std::tuple{1, 2, 4, 256},
                                               {3, 1, 3, 256},
                                               {64, 2, 4, 256},
                                               {11, 1, 8, 256},
                                               {11, 2, 1, 128},
                                               {11, 1, 2, 64},
                                               {11, 2, 12, 128}}) {
    const std::vector<std::int64_t> slots = scattered(batch);
    std::vector<std::int64_t> lengths(slots.size());
    for (std::size_t b = 0; b < lengths.size(); ++b)
      lengths[b] = some[(b + (batch == 1 ? 10 : 0)) % some.size()];
    const at::Tensor fresh = half(randn({batch, (group + 2) * hkv, dim}, at::kFloat, 1));
    at::Tensor keys = half(randn({batch, kCapacity, hkv, dim}, at::kFloat, 2)),
               values = half(randn({batch, kCapacity, hkv, dim}, at::kFloat, 3));
    // Slots that no token was written to are never read.
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      for (at::Tensor* x : {&keys, &values})
        x->select(0, static_cast<std::int64_t>(b))
            .narrow(0, lengths[b], kCapacity - lengths[b])
            .fill_(kNan);
    }
    const auto decode = [&, hkv = hkv, group = group](const KernelTable& kernels,
                                                      const at::Tensor& x, at::Tensor k,
                                                      at::Tensor v, const CacheRows& rows) {
      return attention_decode(kernels,
                              {x.narrow(1, 0, group * hkv), x.narrow(1, group * hkv, hkv),
                               x.narrow(1, (group + 1) * hkv, hkv), k, v, 0},
                              rows);
    };
    // The pages of a sequence follow each other with the others' between them.
    std::vector<std::vector<std::int32_t>> pages(slots.size());
    for (std::size_t b = 0; b < pages.size(); ++b) {
      for (std::int64_t p = 0; p <= lengths[b] / kPageTokens; ++p)
        pages[b].push_back(static_cast<std::int32_t>(p * batch) + static_cast<std::int32_t>(b));
    }
    const auto in_pages = [&, hkv = hkv, dim = dim](const at::Tensor& x) {
      return x.view({batch, kPages, kPageTokens, hkv, dim})
          .transpose(0, 1)
          .reshape({kPages * batch, kPageTokens, hkv, dim});
    };
    const at::Tensor before_k = in_pages(keys), before_v = in_pages(values);
    at::Tensor k64 = exact(before_k), v64 = exact(before_v);
    const at::Tensor expected = decode(exact_table(any<AttentionDecode>()), exact(fresh), k64, v64,
                                       CacheRows::from_host(slots, lengths, pages, at::kCPU));

    const KernelTable kernels = gpu_table(OpRequest::of<AttentionDecode>({.head_dim = dim}),
                                          "cuda.split_keys", at::kBFloat16);
    const CacheRows rows = CacheRows::from_host(slots, lengths, pages, gpu());
    at::Tensor k = before_k.to(gpu()), v = before_v.to(gpu());
    const at::Tensor o = decode(kernels, fresh.to(gpu()), k, v, rows);
    EXPECT_TRUE(close(o.cpu(), expected, 1e-2)) << batch << " " << group << " " << dim;
    EXPECT_TRUE(identical(exact(k), k64));
    EXPECT_TRUE(identical(exact(v), v64));
    // Alone a sequence gets the bits that it gets among others, whatever their lengths.
    const std::int64_t last = batch - 1;
    at::Tensor k_alone = before_k.to(gpu()), v_alone = before_v.to(gpu());
    const at::Tensor alone =
        decode(kernels, fresh.narrow(0, last, 1).to(gpu()), k_alone, v_alone,
               CacheRows::from_host({slots.back()}, {lengths.back()}, {pages.back()}, gpu()));
    EXPECT_TRUE(identical(alone.cpu(), o.narrow(0, last, 1).cpu()));
  }
}

TEST_F(GpuDecode, TheConvolutionEqualsTheReference) {
  for (const c10::ScalarType type : {at::kBFloat16, at::kFloat}) {
    for (const auto& [batch, channels, width] :
         {std::tuple{1, 1000, 4}, {3, 37, 2}, {64, 300, 8}}) {
      const std::vector<std::int64_t> slots = scattered(batch);
      // A view into a wider row.
      const at::Tensor x =
          randn({batch, channels + 3}, at::kFloat, 1).to(type).narrow(1, 3, channels);
      const at::Tensor weight = randn({channels, width}, at::kFloat, 2).to(type);
      const at::Tensor before =
          with_free_slots(randn({batch, channels, width - 1}, at::kFloat, 3).to(type), slots);
      at::Tensor expected_states = exact(before), states = before.to(gpu());
      const at::Tensor expected =
          conv_decode(exact_table(any<ConvDecode>()), exact(x), exact(weight), expected_states,
                      CacheRows::from_host(slots, slots, at::kCPU));
      const at::Tensor y =
          conv_decode(gpu_table(any<ConvDecode>(), "cuda.fused", type), x.to(gpu()),
                      weight.to(gpu()), states, CacheRows::from_host(slots, slots, gpu()));
      EXPECT_TRUE(close(y.cpu(), expected, tolerance_of(type))) << batch;
      EXPECT_TRUE(identical(exact(states), expected_states));
    }
  }
}

/// The operators of a layer's mixer, with the reference of each or with the device's own.
KernelTable mixer_table(const Target& device, c10::ScalarType dtype, std::int64_t dim,
                        const std::string& kernel) {
  const std::vector<OpRequest> requests = {
      OpRequest::of<ConvDecode>(), OpRequest::of<GdnGates>({.num_v_heads = 1}),
      OpRequest::of<GatedDeltaRuleDecode>(
          {.num_k_heads = 1, .num_v_heads = 1, .head_k_dim = dim, .head_v_dim = dim}),
      OpRequest::of<GatedRmsNorm>({.dim = dim})};
  KernelPolicy policy;
  policy.allow_fallback = true;
  for (const OpRequest& request : requests) {
    if (!kernel.empty()) policy.named[request.op] = kernel;
  }
  return KernelTable::choose(builtin_registry(), device, dtype, requests, policy);
}

/// Shapes of the last three have more key heads than two CTAs a multiprocessor take.
const std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>> kMixers = {
    {1, 2, 2, 128},    {3, 2, 6, 128},    {64, 2, 4, 128},  {3, 1, 8, 64},
    {64, 16, 16, 128}, {40, 16, 32, 128}, {23, 12, 36, 128}};

GatedDeltaNetDecode some_mixer(std::int64_t batch, std::int64_t hk, std::int64_t hv,
                               std::int64_t dim, const std::vector<std::int64_t>& slots) {
  const std::int64_t channels = (2 * hk + hv) * dim;
  GatedDeltaNetDecode in;
  in.qkv = half(randn({batch, channels}, at::kFloat, 1));
  in.a = half(randn({batch, hv}, at::kFloat, 2));
  in.b = half(randn({batch, hv}, at::kFloat, 3));
  in.z = half(randn({batch, hv, dim}, at::kFloat, 4));
  in.conv_weight = half(randn({channels, 4}, at::kFloat, 5));
  in.a_log = randn({hv}, at::kFloat, 6);
  in.dt_bias = randn({hv}, at::kFloat, 7);
  in.norm_weight = half(randn({dim}, at::kFloat, 8));
  in.conv_states = with_free_slots(half(randn({batch, channels, 3}, at::kFloat, 9)), slots);
  in.states = with_free_slots(randn({batch, hv, dim, dim}, at::kFloat, 10), slots);
  in.num_key_heads = hk;
  in.norm_eps = 1e-6;
  return in;
}

GatedDeltaNetDecode moved(GatedDeltaNetDecode in,
                          const std::function<at::Tensor(const at::Tensor&)>& move) {
  for (at::Tensor* x : {&in.qkv, &in.a, &in.b, &in.z, &in.conv_weight, &in.a_log, &in.dt_bias,
                        &in.norm_weight, &in.conv_states, &in.states})
    *x = move(*x).clone();
  return in;
}

at::Tensor to_gpu(const at::Tensor& x) { return x.to(gpu()); }

TEST_F(GpuDecode, TheMixerRoundsStatesOfBf16Once) {
  for (const auto& [batch, hk, hv, dim] : kMixers) {
    const std::vector<std::int64_t> slots = scattered(batch);
    GatedDeltaNetDecode in = moved(some_mixer(batch, hk, hv, dim, slots), to_gpu);
    in.states = half(in.states);
    GatedDeltaNetDecode wide = moved(in, to_gpu);
    wide.states = in.states.to(at::kFloat);
    const KernelTable kernels = mixer_table({Platform::kCuda}, at::kBFloat16, dim, "");
    const CacheRows rows = CacheRows::from_host(slots, slots, gpu());
    // Two steps: a slot's second state is read from where the first was stored.
    for (int step = 0; step < 2; ++step) {
      wide.states = in.states.to(at::kFloat);
      const at::Tensor y = gated_delta_net_decode(kernels, in, rows),
                       expected = gated_delta_net_decode(kernels, wide, rows);
      EXPECT_TRUE(identical(y.cpu(), expected.cpu())) << batch << " " << hv << " " << dim;
      EXPECT_TRUE(identical(in.states.cpu(), half(wide.states).cpu())) << batch << " " << hv;
      EXPECT_TRUE(identical(in.conv_states.cpu(), wide.conv_states.cpu())) << batch;
    }
  }
}

TEST_F(GpuDecode, TheMixerInOnePassEqualsItsParts) {
  for (const auto& [batch, hk, hv, dim] : kMixers) {
    const std::vector<std::int64_t> slots = scattered(batch);
    const GatedDeltaNetDecode in = some_mixer(batch, hk, hv, dim, slots);
    const GatedDeltaNetDecode there64 = moved(in, exact);
    const at::Tensor expected =
        gated_delta_net_decode(mixer_table({}, at::kDouble, dim, "reference"), there64,
                               CacheRows::from_host(slots, slots, at::kCPU));
    const KernelTable kernels = mixer_table({Platform::kCuda}, at::kBFloat16, dim, "");
    ASSERT_NE(kernels.get<GatedDeltaRuleDecode>().net, nullptr);
    const GatedDeltaNetDecode there = moved(in, to_gpu);
    const at::Tensor y =
        gated_delta_net_decode(kernels, there, CacheRows::from_host(slots, slots, gpu()));
    EXPECT_TRUE(close(y.cpu(), expected, 2e-2)) << batch << " " << dim;
    EXPECT_TRUE(identical(exact(there.conv_states), there64.conv_states));
    // The rule's inputs are rounded to bf16 between the parts.
    EXPECT_TRUE(close(rows_of(there.states, slots), rows_of(there64.states, slots), 1e-2)) << dim;
    EXPECT_TRUE(there.states.select(0, 0).isnan().all().item().toBool());
    // A sequence's bits do not depend on the batch, whose kernels differ.
    GatedDeltaNetDecode alone = moved(in, to_gpu);
    for (at::Tensor* x : {&alone.qkv, &alone.a, &alone.b, &alone.z}) *x = x->narrow(0, 0, 1);
    const std::vector<std::int64_t> slot = {slots[0]};
    const at::Tensor own =
        gated_delta_net_decode(kernels, alone, CacheRows::from_host(slot, slot, gpu()));
    EXPECT_TRUE(identical(own.cpu(), y.narrow(0, 0, 1).cpu())) << batch << " " << dim;
    EXPECT_TRUE(identical(rows_of(alone.states, slot).cpu(), rows_of(there.states, slot).cpu()));
  }
}

}  // namespace
}  // namespace heddle::ops::testing
