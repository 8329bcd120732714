#include "ops/attention/cuda/ragged_graph.h"

#include <ATen/cudnn/Handle.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <memory>

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
        .set_max_total_seq_len_kv(sizes_.k_tokens)
        .set_deterministic_algorithm(sizes_.is_deterministic != 0);
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

}  // namespace

void execute(const GraphSizes& sizes, const Pack& pack, const at::Tensor& like) {
  fe::graph::Graph& graph = graph_of(sizes);
  Pack tensors = pack;  // it is not const there
  std::int64_t bytes = 0;
  TORCH_CHECK(graph.get_workspace_size(bytes).is_good(), "cuDNN names no size of its scratch");
  const at::Tensor scratch =
      at::empty({std::max<std::int64_t>(bytes, 1)}, like.options().dtype(at::kByte));
  auto status = graph.execute(at::native::getCudnnHandle(), tensors, scratch.mutable_data_ptr());
  TORCH_CHECK(status.is_good(), "cuDNN's ragged attention: ", status.get_message());
}

}  // namespace heddle::ops::attention_cudnn
