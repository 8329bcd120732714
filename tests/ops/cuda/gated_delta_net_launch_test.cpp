// The CUDA kernels of the gated delta rule through their own interface: the inverse that they save,
// sequences cut into segments, columns of V spread over CTAs, neighbours of NaN, CUDA graphs.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "ops/gated_delta_net/cuda/args.h"
#include "ops/gated_delta_net/kernels.h"
#include "ops/gated_delta_rule_support.h"

namespace heddle::ops::testing {
namespace {

using cuda::GatedDeltaNetKernel;

constexpr int kNeverSplit = 1 << 20;

/// A problem with the gradients that enter its backward, on the CPU.
struct Whole {
  Problem problem;
  at::Tensor d_o, d_final;

  explicit Whole(const Case& c) : problem(make(c, at::kBFloat16)) {
    d_o = randn(problem.inputs[2].sizes(), at::kBFloat16, 7);
    d_final = randn(problem.inputs[5].sizes(), at::kFloat, 8);
  }
  /// Its first sequences alone.
  Whole first(std::int64_t sequences) const {
    Whole part = *this;
    const std::vector<std::int32_t>& cu = problem.sequences.cu_seqlens_host;
    const std::int64_t tokens = cu[sequences];
    for (int i = 0; i < 5; ++i)
      part.problem.inputs[i] = problem.inputs[i].narrow(0, 0, tokens).contiguous();
    part.problem.inputs[5] = problem.inputs[5].narrow(0, 0, sequences).contiguous();
    part.problem.sequences = Sequences::from_host({cu.begin(), cu.begin() + sequences + 1},
                                                  problem.sequences.cu_seqlens.device());
    part.d_o = d_o.narrow(0, 0, tokens).contiguous();
    part.d_final = d_final.narrow(0, 0, sequences).contiguous();
    return part;
  }
};

/// One forward and backward on buffers of its own.
class Launch {
 public:
  Launch(const Whole& whole, GatedDeltaNetKernel kernel, int segment_chunks = 0) {
    const Tensors& in = whole.problem.inputs;
    shape_.tokens = static_cast<int>(in[0].size(0));
    shape_.sequences = static_cast<int>(whole.problem.sequences.count());
    shape_.k_heads = static_cast<int>(in[0].size(1));
    shape_.v_heads = static_cast<int>(in[2].size(1));
    shape_.head_dim = static_cast<int>(in[0].size(2));
    shape_.segment_chunks = segment_chunks;
    options_.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(shape_.head_dim)));
    options_.kernel = kernel;
    const c10::Device gpu(c10::DeviceType::CUDA, 0);
    const auto room = [&](const at::Tensor& like) { return at::empty_like(like, gpu); };
    for (const at::Tensor& x : in) inputs_.push_back(room(x));
    cu_seqlens_ = at::empty({shape_.sequences + 1}, inputs_[3].options().dtype(at::kInt));
    d_o_ = room(whole.d_o);
    d_final_ = room(whole.d_final);
    // As names() has them.
    results_ = {room(in[2]), room(in[5]), room(in[0]), room(in[1]),
                room(in[2]), room(in[3]), room(in[4]), room(in[5])};
    const auto bytes = [&](std::size_t count) {
      return at::empty({static_cast<std::int64_t>(count)}, cu_seqlens_.options().dtype(at::kByte));
    };
    saved_ = bytes(cuda::gated_delta_net_saved_bytes(shape_, true));
    workspace_ = bytes(cuda::gated_delta_net_workspace_bytes(shape_));
    give(whole);
  }

  /// Takes the numbers and the boundaries of a problem of the same sizes.
  void give(const Whole& whole) {
    for (std::size_t i = 0; i < inputs_.size(); ++i) inputs_[i].copy_(whole.problem.inputs[i]);
    cu_seqlens_.copy_(whole.problem.sequences.cu_seqlens);
    d_o_.copy_(whole.d_o);
    d_final_.copy_(whole.d_final);
  }
  void enqueue_forward(cudaStream_t stream) const {
    cuda::gated_delta_net_forward(shape_, options_, inputs(), forward(), stream);
  }
  void enqueue(cudaStream_t stream) const {
    enqueue_forward(stream);
    cuda::GatedDeltaNetBackward out;
    out.d_o = view(d_o_);
    out.d_final_state = d_final_.const_data_ptr<float>();
    out.saved = saved_.const_data_ptr();
    out.workspace = workspace_.mutable_data_ptr();
    out.dq = view(results_[2]);
    out.dk = view(results_[3]);
    out.dv = view(results_[4]);
    out.dg = results_[5].mutable_data_ptr<float>();
    out.dbeta = results_[6].mutable_data_ptr<float>();
    out.d_initial_state = results_[7].mutable_data_ptr<float>();
    cuda::gated_delta_net_backward(shape_, options_, inputs(), out, stream);
  }
  /// Makes memory that nobody wrote, or that was read before it was written, show.
  void spoil(int garbage) {
    for (at::Tensor& x : results_) x.fill_(std::numeric_limits<double>::quiet_NaN());
    saved_.fill_(garbage);
    workspace_.fill_(garbage);
  }
  Tensors results() const {
    Tensors host;
    for (const at::Tensor& x : results_) host.push_back(x.cpu());
    return host;
  }
  Tensors run(int garbage = 0xff) {
    spoil(garbage);
    enqueue(nullptr);
    return results();
  }
  /// (I + M diag(beta))^-1 of each chunk, [chunks, Hv, 64, 64], as the forward saved it.
  at::Tensor inverses(std::int64_t chunks) const {
    const cuda::gdn::Args a = cuda::gdn::forward_args(shape_, options_, inputs(), forward());
    const auto first =
        reinterpret_cast<const char*>(a.solve) - static_cast<const char*>(saved_.const_data_ptr());
    const at::Tensor image = saved_.narrow(0, first, chunks * shape_.v_heads * 64 * 64 * 2)
                                 .cpu()
                                 .view(at::kBFloat16)
                                 .view({chunks, shape_.v_heads, 64, 8, 8});
    at::Tensor rows = at::empty_like(image);
    for (int i = 0; i < 64; ++i)  // 16-byte pieces of a row are exchanged by XOR with row % 8
      for (int p = 0; p < 8; ++p)
        rows.select(2, i).select(2, p).copy_(image.select(2, i).select(2, p ^ (i % 8)));
    return rows.view({chunks, shape_.v_heads, 64, 64}).to(at::kDouble);
  }

 private:
  static cuda::GatedDeltaNetTensor view(const at::Tensor& x) {
    return {x.mutable_data_ptr(), x.stride(0)};
  }
  cuda::GatedDeltaNetInputs inputs() const {
    return {view(inputs_[0]),
            view(inputs_[1]),
            view(inputs_[2]),
            inputs_[3].const_data_ptr<float>(),
            inputs_[4].const_data_ptr<float>(),
            cu_seqlens_.const_data_ptr<int>(),
            inputs_[5].const_data_ptr<float>()};
  }
  cuda::GatedDeltaNetForward forward() const {
    return {view(results_[0]), results_[1].mutable_data_ptr<float>(), saved_.mutable_data_ptr(),
            /*for_backward=*/true};
  }

  cuda::GatedDeltaNetShape shape_;
  cuda::GatedDeltaNetOptions options_;
  Tensors inputs_, results_;
  at::Tensor cu_seqlens_, d_o_, d_final_, saved_, workspace_;
};

/// (I + M diag(beta))^-1 in fp64 of `count` tokens from `first` on, one sequence, [Hv, count,
/// count].
at::Tensor exact_inverse(const Problem& p, const Case& c, std::int64_t first, std::int64_t count) {
  const Problem wide = in_double(p);
  const auto rows = [&](int i) { return wide.inputs[i].narrow(0, first, count); };
  const at::Tensor k = rows(1).transpose(0, 1);
  const at::Tensor unit = k / ((k * k).sum({-1}, true) + 1e-6).sqrt();
  const at::Tensor products = at::matmul(unit, unit.transpose(1, 2)).repeat_interleave(c.group, 0);
  const at::Tensor G = at::cumsum(rows(3).t(), 1), beta = rows(4).t();
  const at::Tensor M = (products * at::exp(G.unsqueeze(2) - G.unsqueeze(1))).tril(-1);
  at::Tensor lower = at::zeros({M.size(0), 64, 64}, M.options());
  lower.narrow(1, 0, count).narrow(2, 0, count).copy_(M * beta.unsqueeze(1));
  return gated_delta_rule_reference::unit_lower_inverse(lower);
}

class GatedDeltaRuleLaunch : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
    if (kernel() == GatedDeltaNetKernel::kHopper &&
        cuda::gated_delta_net_kernel_for_device() != GatedDeltaNetKernel::kHopper) {
      GTEST_SKIP() << "no Hopper device";
    }
  }
  static GatedDeltaNetKernel kernel() {
    return GetParam() == "sm90" ? GatedDeltaNetKernel::kHopper : GatedDeltaNetKernel::kPortable;
  }
  /// chunks: first token and length of each. What bf16 rounds is at most 1, by 2^-9; the merges of
  /// blocks in fp16 may add half of that. An expansion in powers, or merges in bf16, lose more
  /// (docs/gdn.md, 2). On the diagonal and above it nothing is rounded.
  static void expect_inverses(const Case& c, const std::vector<std::pair<int, int>>& chunks) {
    const Whole whole(c);
    Launch launch(whole, kernel());
    launch.spoil(0xff);
    launch.enqueue_forward(nullptr);
    const at::Tensor found = launch.inverses(static_cast<std::int64_t>(chunks.size()));
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      const auto& [first, count] = chunks[i];
      const at::Tensor error = at::abs(found[static_cast<std::int64_t>(i)] -
                                       exact_inverse(whole.problem, c, first, count));
      EXPECT_LE(error.max().item().toDouble(), 3e-3) << "from token " << first << ", " << c.text();
      EXPECT_EQ(error.triu(0).max().item().toDouble(), 0)
          << "from token " << first << ", " << c.text();
    }
  }
  /// Equal but for the rounding of bf16, which hard keys enlarge.
  static void expect_noise(const Tensors& found, const Tensors& expected, const Case& c,
                           const std::string& what) {
    for (std::size_t i = 0; i < found.size(); ++i)
      EXPECT_LE(rms_error(found[i], expected[i]), 8e-3 * (c.keys == Keys::kRandom ? 1 : 3))
          << names()[i] << ", " << what << ", " << c.text();
  }
  static void expect_identical(const Tensors& found, const Tensors& expected, const char* what) {
    for (std::size_t i = 0; i < found.size(); ++i)
      EXPECT_TRUE(identical(found[i], expected[i])) << names()[i] << ", " << what;
  }
};

TEST_P(GatedDeltaRuleLaunch, InverseOfKeysOfEveryKind) {
  for (const Keys keys : {Keys::kRandom, Keys::kCorrelated, Keys::kIdentical, Keys::kAlternating}) {
    for (const Gate gate : {Gate::kLogSigmoid, Gate::kZero}) {
      for (const double beta_shift : {0.0, 2.0, 40.0}) {
        for (const std::int64_t dim : {128, 64, 256}) {
          if (dim != 128 && gate != Gate::kZero) continue;
          if (dim == 256 && kernel() == GatedDeltaNetKernel::kHopper) continue;
          Case c = shape({37, 191}, 2, 2, dim);
          c.keys = keys;
          c.gate = gate;
          c.beta_shift = beta_shift;
          expect_inverses(c, {{0, 37}, {37, 64}, {101, 64}, {165, 63}});
        }
      }
    }
  }
}

/// Every kind of gates, and keys that carry a state far.
std::vector<Case> kinds(const Case& base) {
  std::vector<Case> cases;
  for (const Gate gate : {Gate::kLogSigmoid, Gate::kZero, Gate::kInitialisation, Gate::kMixed}) {
    cases.push_back(base);
    cases.back().gate = gate;
  }
  cases.push_back(base);
  cases.back().beta_edges = true;
  for (const Keys keys : {Keys::kCorrelated, Keys::kAlternating}) {
    cases.push_back(base);
    cases.back().keys = keys;
    cases.back().beta_shift = 2;
  }
  return cases;
}

// Segments give equal results within the rounding of bf16, and equal bits each time.
TEST_P(GatedDeltaRuleLaunch, SegmentsEqualTheWholeSequence) {
  std::vector<Case> cases = kinds(shape({65, 0, 700, 29, 321}, 1, 4));
  cases.push_back(shape({129, 1, 0, 300}, 2, 2, 64));
  if (kernel() == GatedDeltaNetKernel::kPortable)
    cases.push_back(shape({129, 1, 0, 300}, 1, 2, 256));
  for (const Case& c : cases) {
    const Whole whole(c);
    const Tensors expected = Launch(whole, kernel(), kNeverSplit).run();
    for (const int chunks : {1, 2, 5}) {
      Launch split(whole, kernel(), chunks);
      const Tensors found = split.run();
      expect_noise(found, expected, c, "segments of " + std::to_string(chunks) + " chunks");
      expect_identical(split.run(0x5a), found, "again");
    }
  }
}

// With few sequences and heads a CTA of the wgmma kernels owns half of V's columns, with many all.
TEST_P(GatedDeltaRuleLaunch, HalvesOfVEqualTheWhole) {
  std::vector<std::int32_t> lengths = {700, 330};  // more chunks than stages of a pipeline
  lengths.resize(27, 3);
  for (const Case& c : kinds(shape(lengths, 2, 2))) {
    const Whole many(c), few = many.first(2);
    ASSERT_LE(2 * 4, cuda::gdn::kSplitValues);
    ASSERT_GT(27 * 4, cuda::gdn::kSplitValues);
    Launch wide(many, kernel(), kNeverSplit), halves(few, kernel(), kNeverSplit);
    const Tensors expected = wide.run(), found = halves.run();
    Tensors first_expected;
    for (std::size_t i = 0; i < found.size(); ++i)
      first_expected.push_back(expected[i].narrow(0, 0, found[i].size(0)));
    expect_noise(found, first_expected, c, "half of the columns");
    expect_identical(wide.run(0x5a), expected, "all columns again");
    expect_identical(halves.run(0x5a), found, "half of the columns again");
  }
}

// All that belongs to a neighbour is NaN: tokens, their gradients, states at both ends.
TEST_P(GatedDeltaRuleLaunch, NeighboursOfNaNDoNotLeak) {
  const Whole clean(shape({33, 165, 17}, 2, 2));
  Whole poisoned = clean;
  const auto poison = [](at::Tensor& x, bool state) {
    x = x.clone();
    const double nan = std::numeric_limits<double>::quiet_NaN();
    x.narrow(0, 0, state ? 1 : 33).fill_(nan);
    x.narrow(0, state ? 2 : 198, state ? 1 : 17).fill_(nan);
  };
  for (int i = 0; i < 6; ++i) poison(poisoned.problem.inputs[i], i == 5);
  poison(poisoned.d_o, false);
  poison(poisoned.d_final, true);
  for (const int chunks : {kNeverSplit, 1}) {
    const Tensors expected = Launch(clean, kernel(), chunks).run();
    const Tensors found = Launch(poisoned, kernel(), chunks).run();
    for (std::size_t i = 0; i < found.size(); ++i) {
      const bool state = found[i].dim() == 4;
      const std::int64_t from = state ? 1 : 33, count = state ? 1 : 165;
      EXPECT_TRUE(identical(found[i].narrow(0, from, count), expected[i].narrow(0, from, count)))
          << names()[i] << ", segments of " << chunks << " chunks";
    }
  }
}

// A graph knows the sizes alone: numbers and boundaries of sequences are those of its replay.
TEST_P(GatedDeltaRuleLaunch, GraphsReplayWithOtherSequences) {
  Case other_case = shape({37, 263, 100}, 2, 2);
  other_case.gate = Gate::kZero;
  const Whole one(shape({100, 0, 300}, 2, 2)), other(other_case);
  for (const int chunks : {0, 1}) {
    Launch launch(one, kernel(), chunks);
    const Tensors expected = launch.run();
    const Tensors expected_other = Launch(other, kernel(), chunks).run();
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    launch.enqueue(stream);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
    const auto replayed = [&](const Whole& whole) {
      launch.give(whole);
      launch.spoil(0x5a);
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      EXPECT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      return launch.results();
    };
    expect_identical(replayed(other), expected_other, "other sequences");
    expect_identical(replayed(one), expected, "the recorded ones");
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, GatedDeltaRuleLaunch, ::testing::Values("sm90", "mma"),
                         heddle::testing::ParameterName());

}  // namespace
}  // namespace heddle::ops::testing
