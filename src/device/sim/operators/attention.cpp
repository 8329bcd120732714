// npu_fusion_attention in its packed layout (TND), and its gradient.
#include <ATen/TensorOperators.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/triu.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <array>
#include <limits>

#include "device/sim/driver.h"
#include "device/sim/operators/operators.h"
#include "device/sim/rules.h"

namespace heddle::device::sim {
namespace {

constexpr std::int64_t kCompressed = 2048;
constexpr std::int64_t kLeftUpCausal = 2, kRightDownCausal = 3;
/// The statistics of the softmax stand eight times in a row: 32 bytes, the vector unit's block.
constexpr std::int64_t kBlock = 8;

void check_mask(const Arguments& in, const at::Tensor& mask, std::int64_t mode) {
  const bool is_compressed = mode == kLeftUpCausal || mode == kRightDownCausal;
  if (!mask.defined()) {
    if (is_compressed) {
      refuse(Rule::kMaskShape, "{}: sparse_mode {} without the compressed mask [{}, {}]", in.op(),
             mode, kCompressed, kCompressed);
    }
    return;
  }
  if (mask.dim() != 2 || !is_compressed) {
    refuse(Rule::kDenseMask,
           "{}: a mask {} in sparse_mode {} fails asynchronously on hardware; give the compressed "
           "mask [{}, {}] with sparse_mode 2 or 3",
           in.op(), c10::str(mask.sizes()), mode, kCompressed, kCompressed);
  }
  if (mask.size(0) != kCompressed || mask.size(1) != kCompressed ||
      (mask.scalar_type() != at::kBool && mask.scalar_type() != at::kByte)) {
    refuse(Rule::kMaskShape, "{}: a mask {} of {}; sparse_mode {} takes [{}, {}] of Bool", in.op(),
           c10::str(mask.sizes()), c10::toString(mask.scalar_type()), mode, kCompressed,
           kCompressed);
  }
  static const at::Tensor& expected =
      *new at::Tensor(at::ones({kCompressed, kCompressed}, at::kBool).triu(1));
  if (!at::equal(mask.to(at::kBool), expected)) {
    refuse(Rule::kMaskShape,
           "{}: the compressed mask is true where a key is masked, above the diagonal alone; this "
           "one is not",
           in.op());
  }
}

/// Ends of the packed sequences, without the leading 0.
std::vector<std::int64_t> lengths_of(const Arguments& in, const char* name, std::int64_t tokens) {
  const auto ends = in.integers(name);
  if (!ends || ends->empty()) {
    refuse(Rule::kLengths, "{}: layout TND needs {}, cumulative and of the host", in.op(), name);
  }
  std::int64_t before = 0;
  for (const std::int64_t end : *ends) {
    if (end < before) {
      refuse(Rule::kLengths, "{}: {} falls from {} to {}; it is cumulative", in.op(), name, before,
             end);
    }
    before = end;
  }
  if (before != tokens) {
    refuse(Rule::kLengths, "{}: {} ends at {}, the tensor has {} tokens", in.op(), name, before,
           tokens);
  }
  return *ends;
}

/// One packed sequence of the arguments, heads first: q [n, Tq, D], k [n, Tk, D], v [n, Tk, V].
struct Sequence {
  std::int64_t q_begin, q_count, k_begin, k_count;
};

/// The arguments that both passes share, checked.
struct Problem {
  at::Tensor q, k, v;
  std::vector<Sequence> sequences;
  std::int64_t mode = 0, groups = 1;
  double scale = 1;
  c10::ScalarType wide = at::kFloat;

  Problem(const Arguments& in, const char* scale_name)
      : q(in.tensor("query")), k(in.tensor("key")), v(in.tensor("value")) {
    const std::string layout = in.text("input_layout");
    TORCH_CHECK(layout == "TND", in.op(), ": the simulation knows layout TND, not ", layout);
    TORCH_CHECK(q.dim() == 3 && k.dim() == 3 && v.dim() == 3 && q.size(2) == k.size(2) &&
                    k.size(1) == v.size(1) && q.size(1) % k.size(1) == 0 &&
                    q.size(1) == in.integer("head_num"),
                in.op(), ": query ", q.sizes(), ", key ", k.sizes(), ", value ", v.sizes(),
                ", head_num ", in.integer("head_num"));
    TORCH_CHECK(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(), in.op(),
                ": query, key and value have one dtype");
    TORCH_CHECK(in.number("keep_prob") == 1, in.op(), ": the simulation has no dropout");
    mode = in.integer("sparse_mode");
    check_mask(in, in.tensor("atten_mask"), mode);
    const auto q_ends = lengths_of(in, "actual_seq_qlen", q.size(0)),
               k_ends = lengths_of(in, "actual_seq_kvlen", k.size(0));
    if (q_ends.size() != k_ends.size()) {
      refuse(Rule::kLengths, "{}: {} sequences of queries, {} of keys", in.op(), q_ends.size(),
             k_ends.size());
    }
    for (std::size_t s = 0; s < q_ends.size(); ++s) {
      const std::int64_t q0 = s == 0 ? 0 : q_ends[s - 1], k0 = s == 0 ? 0 : k_ends[s - 1];
      sequences.push_back({q0, q_ends[s] - q0, k0, k_ends[s] - k0});
    }
    groups = q.size(1) / k.size(1);
    scale = in.number(scale_name);
    wide = wide_type(q);
  }

  at::Tensor queries(const at::Tensor& x, const Sequence& s) const {
    return x.narrow(0, s.q_begin, s.q_count).transpose(0, 1).to(wide);
  }
  /// Each key head for every query head of its group.
  at::Tensor keys(const at::Tensor& x, const Sequence& s) const {
    return x.narrow(0, s.k_begin, s.k_count).transpose(0, 1).to(wide).repeat_interleave(groups, 0);
  }
  /// [n, Tq, Tk], masked with -inf.
  at::Tensor scores(const Sequence& s) const {
    at::Tensor x = at::bmm(queries(q, s), keys(k, s).transpose(1, 2)).mul_(scale);
    if (mode != kLeftUpCausal && mode != kRightDownCausal) return x;
    const std::int64_t shift = mode == kRightDownCausal ? s.k_count - s.q_count : 0;
    const at::Tensor masked = at::ones({s.q_count, s.k_count}, at::kBool).triu(1 + shift);
    return x.masked_fill_(masked, -std::numeric_limits<double>::infinity());
  }
};

Results forward(const Arguments& in) {
  const Problem p(in, "scale");
  const std::int64_t T = p.q.size(0), n = p.q.size(1);
  at::Tensor out = at::zeros({T, n, p.v.size(2)}, p.q.options());
  at::Tensor maximum = at::zeros({T, n, kBlock}, p.q.options().dtype(p.wide));
  at::Tensor sum = at::zeros_like(maximum);
  for (const Sequence& s : p.sequences) {
    if (s.q_count == 0 || s.k_count == 0) continue;
    const at::Tensor x = p.scores(s);
    // A row without keys gives 0 and not NaN.
    const at::Tensor top = x.amax({-1}, true).clamp_min(std::numeric_limits<float>::lowest());
    const at::Tensor e = at::exp(x - top), total = e.sum({-1}, true);
    const at::Tensor o = at::bmm(e, p.keys(p.v, s)) / total.clamp_min(1e-30);
    out.narrow(0, s.q_begin, s.q_count).copy_(o.transpose(0, 1));
    maximum.narrow(0, s.q_begin, s.q_count).copy_(top.transpose(0, 1));
    sum.narrow(0, s.q_begin, s.q_count).copy_(total.transpose(0, 1));
  }
  const at::Tensor none = at::empty({0}, p.q.options());
  return {out, maximum, sum, none, std::int64_t{0}, std::int64_t{0}, std::int64_t{0}};
}

Results backward(const Arguments& in) {
  const Problem p(in, "scale_value");
  const at::Tensor dy = in.tensor("dy"), maximum = in.tensor("softmax_max"),
                   sum = in.tensor("softmax_sum"), o = in.tensor("attention_in");
  TORCH_CHECK(maximum.defined() && sum.defined() && o.defined(), in.op(),
              ": softmax_max, softmax_sum and attention_in come from the forward");
  TORCH_CHECK(dy.sizes() == o.sizes() && dy.scalar_type() == p.q.scalar_type(), in.op(), ": dy ",
              dy.sizes(), " of ", dy.scalar_type());
  at::Tensor dq = at::zeros_like(p.q), dk = at::zeros_like(p.k), dv = at::zeros_like(p.v);
  const auto ungrouped = [&](const at::Tensor& x) {  // [n, Tk, D] summed over each key head's group
    return x.view({-1, p.groups, x.size(1), x.size(2)}).sum(1).transpose(0, 1);
  };
  for (const Sequence& s : p.sequences) {
    if (s.q_count == 0 || s.k_count == 0) continue;
    const auto statistic = [&](const at::Tensor& t) {
      return t.narrow(0, s.q_begin, s.q_count).narrow(2, 0, 1).transpose(0, 1).to(p.wide);
    };
    const at::Tensor probability =
        at::exp(p.scores(s) - statistic(maximum)) / statistic(sum).clamp_min(1e-30);
    const at::Tensor g = p.queries(dy, s);
    const at::Tensor dp = at::bmm(g, p.keys(p.v, s).transpose(1, 2));
    const at::Tensor delta = (g * p.queries(o, s)).sum({-1}, true);
    const at::Tensor ds = probability * (dp - delta) * p.scale;
    dq.narrow(0, s.q_begin, s.q_count).copy_(at::bmm(ds, p.keys(p.k, s)).transpose(0, 1));
    dk.narrow(0, s.k_begin, s.k_count)
        .copy_(ungrouped(at::bmm(ds.transpose(1, 2), p.queries(p.q, s))));
    dv.narrow(0, s.k_begin, s.k_count).copy_(ungrouped(at::bmm(probability.transpose(1, 2), g)));
  }
  const at::Tensor none = at::empty({0}, p.q.options());
  return {dq, dk, dv, none, none};
}

}  // namespace

std::span<const FusedOperator> attention_operators() {
  static constexpr std::array<FusedOperator, 2> kOperators = {
      {{"npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, "
        "str input_layout, Tensor? pse=None, Tensor? padding_mask=None, "
        "Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
        "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, "
        "int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, "
        "int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, "
        "str softmax_layout=\"\", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, "
        "int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
        forward},
       {"npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, "
        "int head_num, str input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, "
        "Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor? softmax_sum=None, "
        "Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., "
        "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, "
        "int inner_precise=0, int seed=0, int offset=0, int numels=0, int[]? prefix=None, "
        "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, "
        "bool gen_mask_parallel=True, bool sync=False, str softmax_layout=\"\", "
        "Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        backward}}};
  return kOperators;
}

}  // namespace heddle::device::sim
