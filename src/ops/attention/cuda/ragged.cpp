// Graphs of cudnn-frontend. One is made in about 50 ms (the first in 1.7 s) and kept by its sizes,
// so sizes that change from batch to batch are rounded up: a graph takes any sequences up to a
// number and a length, which costs it 3 % at most.
#include "ops/attention/cuda/ragged.h"

#include <ATen/cudnn/Handle.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "ops/attention/cuda/ragged_layout.h"
#include "ops/attention/kernels.h"
#include "ops/cuda/tensor.h"

// libtorch_cuda exports inline functions of another version of the front end: ours need a name of
// their own. What they call of cuDNN is looked up in the libraries that libtorch_cuda has loaded.
#define cudnn_frontend heddle_cudnn_frontend
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>
#undef cudnn_frontend

namespace heddle_cudnn_frontend {
void* cudnn_dlhandle = RTLD_DEFAULT;  // a name that the front end wants defined
}

namespace heddle::ops::attention_cudnn {
namespace {

namespace fe = heddle_cudnn_frontend;

/// The tensors of a graph, by which it is told where they lie.
enum Uid : std::int64_t { kQ, kK, kV, kO, kGradO, kLse, kDq, kDk, kDv, kTable };

std::int64_t uid_of(cuda::RaggedRow row) { return kTable + static_cast<std::int64_t>(row); }

/// All that a graph depends on.
struct GraphSizes {
  std::int64_t device, is_backward, keep, is_bfloat16;
  std::int64_t is_square;                  ///< Every sequence has as many keys as queries.
  std::int64_t batch, q_length, k_length;  ///< Sequences, and the tokens of each at most.
  std::int64_t q_tokens, k_tokens;         ///< Of all sequences at most: sizes the scratch.
  std::int64_t q_heads, k_heads, dim;
  std::int64_t k_strides[2], v_strides[2];  ///< Between tokens, between heads.
  double scale;

  auto operator<=>(const GraphSizes&) const = default;
};

/// At most an eighth above n, of few different values.
std::int64_t rounded_up(std::int64_t n) {
  const auto width = std::bit_width(static_cast<std::uint64_t>(std::max<std::int64_t>(n - 1, 0)));
  const std::int64_t step = std::int64_t{1} << std::max(static_cast<int>(width) - 3, 10);
  return (n + step - 1) / step * step;
}

std::int64_t power_of_two(std::int64_t n, std::int64_t least) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(std::max(n, least))));
}

GraphSizes sizes_of(const Attention::Inputs& in, bool is_backward, bool keep) {
  GraphSizes sizes{};
  sizes.device = in.q.device().index();
  sizes.is_backward = is_backward;
  sizes.keep = keep;
  sizes.is_bfloat16 = in.q.scalar_type() == at::kBFloat16;
  sizes.is_square = in.q_sequences.cu_seqlens_host == in.k_sequences.cu_seqlens_host;
  sizes.batch = power_of_two(in.q_sequences.count(), 1);
  sizes.q_length = power_of_two(in.q_sequences.max_seqlen, 128);
  sizes.k_length = power_of_two(in.k_sequences.max_seqlen, 128);
  sizes.q_tokens = rounded_up(in.q.size(0));
  sizes.k_tokens = rounded_up(in.k.size(0));
  sizes.q_heads = in.q.size(1);
  sizes.k_heads = in.k.size(1);
  sizes.dim = in.q.size(2);
  const auto strides = [](const at::Tensor& x, std::int64_t* to) {
    to[0] = x.stride(0);
    to[1] = x.stride(1);
  };
  strides(in.k, sizes.k_strides);
  strides(in.v, sizes.v_strides);
  sizes.scale = attention_scale(in);
  return sizes;
}

using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

class GraphBuilder {
 public:
  explicit GraphBuilder(const GraphSizes& sizes) : sizes_(sizes) {
    graph_->set_io_data_type(sizes.is_bfloat16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
  }

  std::shared_ptr<fe::graph::Graph> forward() {
    fe::graph::SDPA_attributes options;
    options.set_name("attention").set_generate_stats(sizes_.keep != 0);
    set_mask(options);
    auto [o, lse] =
        graph_->sdpa(queries(kQ), keys(kK, sizes_.k_strides), keys(kV, sizes_.v_strides), options);
    describe_output(o, kO, sizes_.q_heads, cuda::RaggedRow::kQ);
    if (lse) {
      lse->set_output(true).set_uid(kLse).set_data_type(fe::DataType_t::FLOAT);
      describe_lse(*lse);
    }
    return built();
  }

  std::shared_ptr<fe::graph::Graph> backward() {
    fe::graph::SDPA_backward_attributes options;
    options.set_name("attention_backward")
        .set_max_total_seq_len_q(sizes_.q_tokens)
        .set_max_total_seq_len_kv(sizes_.k_tokens);
    set_mask(options);
    const Tensor lse = graph_->tensor(
        fe::graph::Tensor_attributes().set_uid(kLse).set_data_type(fe::DataType_t::FLOAT));
    describe_lse(*lse);
    auto [dq, dk, dv] =
        graph_->sdpa_backward(queries(kQ), keys(kK, sizes_.k_strides), keys(kV, sizes_.v_strides),
                              queries(kO), queries(kGradO), lse, options);
    describe_output(dq, kDq, sizes_.q_heads, cuda::RaggedRow::kQ);
    describe_output(dk, kDk, sizes_.k_heads, cuda::RaggedRow::kKeyGradients);
    describe_output(dv, kDv, sizes_.k_heads, cuda::RaggedRow::kKeyGradients);
    return built();
  }

 private:
  template <class Options>
  void set_mask(Options& options) {
    options.set_attn_scale(static_cast<float>(sizes_.scale))
        .set_padding_mask(true)
        .set_seq_len_q(row(cuda::RaggedRow::kQueries))
        .set_seq_len_kv(row(cuda::RaggedRow::kKeys));
    if (sizes_.is_square) {
      options.set_causal_mask(true);
    } else {  // the last query sees the last key
      options.set_causal_mask_bottom_right(true);
    }
  }

  /// A row of the table: lengths have one entry for each sequence, offsets one more.
  Tensor row(cuda::RaggedRow which) {
    Tensor& made = rows_[which];
    if (made) return made;
    const bool is_length = which == cuda::RaggedRow::kQueries || which == cuda::RaggedRow::kKeys;
    made = graph_->tensor(fe::graph::Tensor_attributes()
                              .set_uid(uid_of(which))
                              .set_dim({sizes_.batch + (is_length ? 0 : 1), 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_data_type(fe::DataType_t::INT32));
    return made;
  }

  Tensor tensor(Uid uid, std::int64_t heads, std::int64_t length, const std::int64_t (&strides)[2],
                cuda::RaggedRow offsets) {
    return graph_->tensor(fe::graph::Tensor_attributes()
                              .set_uid(uid)
                              .set_dim({sizes_.batch, heads, length, sizes_.dim})
                              .set_stride({length * strides[0], strides[1], strides[0], 1})
                              .set_ragged_offset(row(offsets)));
  }
  /// Contiguous, as all that has the shape of q.
  Tensor queries(Uid uid) {
    const std::int64_t strides[2] = {sizes_.q_heads * sizes_.dim, sizes_.dim};
    return tensor(uid, sizes_.q_heads, sizes_.q_length, strides, cuda::RaggedRow::kQ);
  }
  Tensor keys(Uid uid, const std::int64_t (&strides)[2]) {
    return tensor(uid, sizes_.k_heads, sizes_.k_length, strides,
                  uid == kK ? cuda::RaggedRow::kK : cuda::RaggedRow::kV);
  }

  /// Contiguous [T, heads, dim].
  void describe_output(const Tensor& x, Uid uid, std::int64_t heads, cuda::RaggedRow offsets) {
    const std::int64_t length = offsets == cuda::RaggedRow::kQ ? sizes_.q_length : sizes_.k_length;
    x->set_output(true)
        .set_uid(uid)
        .set_dim({sizes_.batch, heads, length, sizes_.dim})
        .set_stride({length * heads * sizes_.dim, sizes_.dim, heads * sizes_.dim, 1})
        .set_ragged_offset(row(offsets));
  }

  void describe_lse(fe::graph::Tensor_attributes& lse) {
    lse.set_dim({sizes_.batch, sizes_.q_heads, sizes_.q_length, 1})
        .set_stride({sizes_.q_length * sizes_.q_heads, 1, sizes_.q_heads, 1})
        .set_ragged_offset(row(cuda::RaggedRow::kLogSumExp));
  }

  std::shared_ptr<fe::graph::Graph> built() {
    const cudnnHandle_t handle = at::native::getCudnnHandle();
    const auto require = [](fe::error_object status) {
      TORCH_CHECK(status.is_good(),
                  "cuDNN made no plan of ragged attention: ", status.get_message());
    };
    require(graph_->validate());
    require(graph_->build_operation_graph(handle));
    require(graph_->create_execution_plans({fe::HeurMode_t::A}));
    require(graph_->check_support(handle));
    require(graph_->build_plans(handle));
    return graph_;
  }

  const GraphSizes& sizes_;
  std::shared_ptr<fe::graph::Graph> graph_ = std::make_shared<fe::graph::Graph>();
  std::map<cuda::RaggedRow, Tensor> rows_;
};

/// The graph of these sizes, made when first asked for. Of this thread alone, as libtorch keeps its
/// own: plans are not safe to share.
fe::graph::Graph& graph_of(const GraphSizes& sizes) {
  thread_local std::map<GraphSizes, std::shared_ptr<fe::graph::Graph>> graphs;
  std::shared_ptr<fe::graph::Graph>& graph = graphs[sizes];
  if (!graph) {
    GraphBuilder builder(sizes);
    graph = sizes.is_backward ? builder.backward() : builder.forward();
  }
  return *graph;
}

/// Copies of what cuDNN cannot read: it wants the elements of a head side by side, and writes the
/// gradient of q where q itself would lie in a tensor of its own.
Attention::Inputs readable(const Attention::Inputs& in) {
  Attention::Inputs result = in;
  result.q = in.q.contiguous();
  result.k = cuda::with_unit_stride(in.k);
  result.v = cuda::with_unit_stride(in.v);
  return result;
}

at::Tensor layout_of(const Attention::Inputs& in, const cuda::OnDevice& on) {
  const std::int64_t batch = power_of_two(in.q_sequences.count(), 1);
  at::Tensor table = at::empty(
      {static_cast<std::int64_t>(cuda::RaggedRow::kCount), cuda::ragged_row_length(batch)},
      in.q_sequences.cu_seqlens.options());
  const std::int64_t q_heads = in.q.size(1), dim = in.q.size(2);
  cuda::ragged_layout({in.q_sequences.count(), batch, q_heads * dim, in.k.stride(0), in.v.stride(0),
                       in.k.size(1) * dim, q_heads},
                      in.q_sequences.cu_seqlens.const_data_ptr<std::int32_t>(),
                      in.k_sequences.cu_seqlens.const_data_ptr<std::int32_t>(),
                      table.mutable_data_ptr<std::int32_t>(), on.stream());
  return table;
}

using Pack = std::unordered_map<std::int64_t, void*>;

void add(Pack& pack, Uid uid, const at::Tensor& x) { pack[uid] = x.data_ptr(); }

Pack pack_of(const Attention::Inputs& in, const at::Tensor& table) {
  Pack pack;
  add(pack, kQ, in.q);
  add(pack, kK, in.k);
  add(pack, kV, in.v);
  for (std::int64_t row = 0; row < table.size(0); ++row)
    pack[kTable + row] = table.mutable_data_ptr<std::int32_t>() + row * table.stride(0);
  return pack;
}

void execute(const GraphSizes& sizes, Pack& pack, const at::Tensor& like) {
  fe::graph::Graph& graph = graph_of(sizes);
  std::int64_t bytes = 0;
  TORCH_CHECK(graph.get_workspace_size(bytes).is_good(), "cuDNN names no size of its scratch");
  const at::Tensor scratch =
      at::empty({std::max<std::int64_t>(bytes, 1)}, like.options().dtype(at::kByte));
  auto status = graph.execute(at::native::getCudnnHandle(), pack, scratch.mutable_data_ptr());
  TORCH_CHECK(status.is_good(), "cuDNN's ragged attention: ", status.get_message());
}

}  // namespace

bool ragged_fits(const Attention::Inputs& in) {
  int major = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, in.q.device().index()) !=
          cudaSuccess ||
      major < 9)
    return false;
  const std::vector<std::int32_t>&cu_q = in.q_sequences.cu_seqlens_host,
        &cu_k = in.k_sequences.cu_seqlens_host;
  for (std::size_t s = 0; s + 1 < cu_q.size(); ++s) {
    if (cu_k[s + 1] - cu_k[s] < cu_q[s + 1] - cu_q[s]) return false;
  }
  const auto reaches = [](const at::Tensor& x) {
    return x.size(0) * std::max(x.stride(0), x.size(1) * x.size(2));
  };
  return std::max({reaches(in.q), reaches(in.k), reaches(in.v)}) <=
         std::numeric_limits<std::int32_t>::max();
}

Attention::Forward ragged_forward(const Attention::Inputs& inputs, bool keep) {
  const cuda::OnDevice on(inputs.q);
  const Attention::Inputs in = readable(inputs);
  Attention::Forward result;
  result.o = at::empty(in.q.sizes(), in.q.options());
  if (in.q.size(0) == 0) return result;
  const at::Tensor table = layout_of(in, on);
  Pack pack = pack_of(in, table);
  add(pack, kO, result.o);
  if (keep) {
    const at::Tensor lse =
        at::empty({in.q.size(0), in.q.size(1)}, in.q.options().dtype(at::kFloat));
    add(pack, kLse, lse);
    result.saved = {lse, table};
  }
  execute(sizes_of(in, /*is_backward=*/false, keep), pack, in.q);
  return result;
}

Attention::Gradients ragged_backward(const Attention::Inputs& inputs,
                                     const Attention::Forward& saved, const at::Tensor& grad_o) {
  const cuda::OnDevice on(inputs.q);
  const Attention::Inputs in = readable(inputs);
  // Zeros, as keys of a sequence without queries are not visited.
  Attention::Gradients result = {at::empty(in.q.sizes(), in.q.options()),
                                 at::zeros(in.k.sizes(), in.k.options()),
                                 at::zeros(in.v.sizes(), in.v.options())};
  if (in.q.size(0) == 0) return result;
  const at::Tensor dy = grad_o.contiguous();
  Pack pack = pack_of(in, saved.saved[1]);
  add(pack, kO, saved.o);
  add(pack, kGradO, dy);
  add(pack, kLse, saved.saved[0]);
  add(pack, kDq, result.q);
  add(pack, kDk, result.k);
  add(pack, kDv, result.v);
  execute(sizes_of(in, /*is_backward=*/true, /*keep=*/true), pack, in.q);
  return result;
}

}  // namespace heddle::ops::attention_cudnn
