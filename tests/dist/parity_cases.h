#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// Layouts and kinds of training that tests/dist/parity_test.cpp compares with one rank.
namespace heddle::parity {

struct Layout {
  const char* name;
  std::int64_t ranks;
  std::vector<std::string> overrides;
  std::string simulation = {};  ///< HEDDLE_SIM_NPU, where the ranks are simulated NPUs.
};
inline const Layout kOneRank = {"one rank", 0, {}};

inline const std::vector<Layout> kLayouts = {
    {"dp2", 2, {"parallel.dp=2"}},
    {"fsdp2", 2, {"parallel.fsdp=2"}},
    {"dp2 x fsdp2", 4, {"parallel.dp=2", "parallel.fsdp=2"}},
    {"fsdp3", 3, {"parallel.fsdp=auto"}},
    {"tp2", 2, {"parallel.tp=2"}},
    {"tp2 x fsdp2", 4, {"parallel.tp=2", "parallel.fsdp=2"}},
    // Two key/value heads: each on two ranks.
    {"tp4", 4, {"parallel.tp=4"}},
    {"tp4 x fsdp2", 8, {"parallel.tp=4", "parallel.fsdp=2"}},
    {"tp2 x cp2", 4, {"parallel.tp=2", "parallel.cp=2"}},
    {"tp2 x pp2", 4, {"parallel.tp=2", "parallel.pp=2"}},
    {"tp2 x dp2 x fsdp2", 8, {"parallel.tp=2", "parallel.dp=2", "parallel.fsdp=2"}},
    {"pp2", 2, {"parallel.pp=2"}},
    {"pp4", 4, {"parallel.pp=4"}},
    {"pp2 interleaved", 2, {"parallel.pp=2", "parallel.pp_schedule=interleaved"}},
    {"pp2 x dp2 x tp2", 8, {"parallel.pp=2", "parallel.dp=2", "parallel.tp=2"}},
    {"pp2 x dp2 interleaved",
     4,
     {"parallel.pp=2", "parallel.dp=2", "parallel.pp_schedule=interleaved"}},
    {"pp2 x fsdp2", 4, {"parallel.pp=2", "parallel.fsdp=2"}},
    {"pp2 x cp2", 4, {"parallel.pp=2", "parallel.cp=2"}},
    {"cp2", 2, {"parallel.cp=2"}},
    {"cp3", 3, {"parallel.cp=3"}},
    {"cp2 x dp2", 4, {"parallel.cp=2", "parallel.dp=2"}},
    {"cp2 x fsdp2 x tp2", 8, {"parallel.cp=2", "parallel.fsdp=2", "parallel.tp=2"}},
    {"ulysses2", 2, {"parallel.cp=2", "parallel.cp_method=ulysses"}},
    {"ulysses4", 4, {"parallel.cp=4", "parallel.cp_method=ulysses"}},
    {"ulysses2 x dp2", 4, {"parallel.cp=2", "parallel.cp_method=ulysses", "parallel.dp=2"}},
    {"ulysses2 x fsdp2", 4, {"parallel.cp=2", "parallel.cp_method=ulysses", "parallel.fsdp=2"}},
    {"ulysses2 x tp2", 4, {"parallel.cp=2", "parallel.cp_method=ulysses", "parallel.tp=2"}},
    {"ulysses2 x pp2", 4, {"parallel.cp=2", "parallel.cp_method=ulysses", "parallel.pp=2"}},
};

/// For models with experts.
inline const std::vector<Layout> kExpertLayouts = {
    {"dp2 ep2", 2, {"parallel.dp=2", "parallel.ep=2"}},
    {"dp4 ep2", 4, {"parallel.dp=4", "parallel.ep=2"}},
    {"fsdp2 ep2", 2, {"parallel.fsdp=2", "parallel.ep=2"}},
    {"fsdp2 x dp2 ep2", 4, {"parallel.fsdp=2", "parallel.dp=2", "parallel.ep=2"}},
    {"fsdp2 x dp2 ep4", 4, {"parallel.fsdp=2", "parallel.dp=2", "parallel.ep=4"}},
    {"fsdp4 ep2", 4, {"parallel.fsdp=4", "parallel.ep=2"}},
    {"fsdp3 x dp2 ep2", 6, {"parallel.fsdp=3", "parallel.dp=2", "parallel.ep=2"}},
    {"tp2 ep2", 2, {"parallel.tp=2", "parallel.ep=2"}},
    {"tp2 x dp2 ep4", 4, {"parallel.tp=2", "parallel.dp=2", "parallel.ep=4"}},
    {"tp2 x fsdp2 ep2", 4, {"parallel.tp=2", "parallel.fsdp=2", "parallel.ep=2"}},
    {"cp2 ep2", 2, {"parallel.cp=2", "parallel.ep=2"}},
    {"cp2 x tp2 x dp2 ep4",
     8,
     {"parallel.cp=2", "parallel.tp=2", "parallel.dp=2", "parallel.ep=4"}},
    {"ulysses2 x dp2 ep2",
     4,
     {"parallel.cp=2", "parallel.cp_method=ulysses", "parallel.dp=2", "parallel.ep=2"}},
    {"pp2 x fsdp2 ep2", 4, {"parallel.pp=2", "parallel.fsdp=2", "parallel.ep=2"}},
    {"pp2 x tp2 x cp2 ep2",
     8,
     {"parallel.pp=2", "parallel.tp=2", "parallel.cp=2", "parallel.ep=2"}},
};

/// Model and method of a training; each is compared with one rank of its own.
struct Variant {
  const char* name;
  const char* model;
  std::vector<std::string> overrides;
  const char* rows = "train.jsonl";
};

inline const std::vector<Variant> kVariants = {
    {"dense, full", "dense", {}},
    {"dense, LoRA", "dense", {"train.method=lora", "adapter.rank=4", "adapter.dropout=0.1"}},
    // Layers of one kind alone have adapters: stages and units without any.
    {"dense, LoRA of attention alone",
     "dense",
     {"train.method=lora", "adapter.rank=4", "adapter.targets=[self_attn.q_proj]"}},
    {"dense, LoRA and the tied embedding",
     "dense",
     {"train.method=lora", "adapter.rank=4", "adapter.modules_to_save=[embed_tokens]"}},
    {"dense, full, unpacked, accumulated",
     "dense",
     {"data.packing=false", "train.micro_batch_tokens=64"}},
    {"dense, full, recomputed", "dense", {"train.recompute=full"}},
    {"dense, full, elementwise recomputed", "dense", {"train.recompute=elementwise"}},
    {"dense, full, long prompts",
     "dense",
     {"data.loss_on=assistant", "kernels.gated_delta_rule=reference"},
     "answers.jsonl"},
    // In a micro-batch of one row, the ranks along cp that lack its end have no loss (P15).
    {"dense, full, loss at the end alone",
     "dense",
     {"data.packing=false", "train.global_batch_size=4", "train.micro_batch_tokens=48",
      "train.eval_every=5", "kernels.gated_delta_rule=reference"},
     "endings.jsonl"},
    {"moe, full, loss at the end alone",
     "moe",
     {"data.packing=false", "train.global_batch_size=4", "train.micro_batch_tokens=48",
      "train.recompute=selective"},
     "endings.jsonl"},
    {"classification, full, evaluated",
     "dense",
     {"model.head=classify", "model.num_labels=3", "train.eval_every=5"},
     "labelled.jsonl"},
    {"dense, full, fewer rows than ranks",
     "dense",
     {"train.global_batch_size=1", "data.packing=false"}},
    {"dense, some frozen, evaluated",
     "dense",
     {"train.freeze=['*.layers.0.*', '*embed_tokens*']", "train.eval_every=5"}},
    {"dense, the end frozen", "dense", {"train.freeze=['*.layers.3.*', '*.norm.weight']"}},
    {"moe, full", "moe", {}},
    {"moe, full, accumulated, recomputed",
     "moe",
     {"train.micro_batch_tokens=64", "train.recompute=selective"}},
    {"moe, full, summed with every micro-batch",
     "moe",
     {"train.micro_batch_tokens=64", "parallel.sum_gradients=micro_batch"}},
    {"moe, full, fewer rows than ranks",
     "moe",
     {"train.global_batch_size=1", "data.packing=false", "train.recompute=full"}},
    {"moe, LoRA of router and shared expert, elementwise recomputed",
     "moe",
     {"train.method=lora", "adapter.rank=4",
      "adapter.targets=[mlp.gate,mlp.shared_expert_gate,mlp.shared_expert.gate_proj,"
      "mlp.shared_expert.down_proj]",
      "train.recompute=elementwise"}},
    {"moe, LoRA, accumulated",
     "moe",
     {"train.method=lora", "adapter.rank=4", "adapter.dropout=0.1", "train.micro_batch_tokens=64"}},
    {"moe, LoRA on experts, recomputed",
     "moe",
     {"train.method=lora", "adapter.rank=4",
      "adapter.target_parameters=[mlp.experts.gate_up_proj,mlp.experts.down_proj]",
      "train.micro_batch_tokens=64", "train.recompute=full"}},
    {"moe, LoRA on experts that share factors",
     "moe",
     {"train.method=lora", "adapter.rank=4",
      "adapter.target_parameters=[mlp.experts.gate_up_proj,mlp.experts.down_proj]",
      "adapter.shared_expert_factors=true", "train.micro_batch_tokens=64"}},
    {"moe, experts frozen, evaluated",
     "moe",
     {"train.freeze=['*.experts.*']", "train.eval_every=5"}},
    {"qwen3, full", "qwen3", {}},
    {"qwen3, LoRA, recomputed",
     "qwen3",
     {"train.method=lora", "adapter.rank=4", "adapter.dropout=0.1", "train.recompute=elementwise"}},
    {"qwen3_vl, full", "qwen3_vl", {}},
    {"qwen3_moe, full", "qwen3_moe", {}},
    {"qwen3_moe, LoRA on experts, recomputed",
     "qwen3_moe",
     {"train.method=lora", "adapter.rank=4",
      "adapter.target_parameters=[mlp.experts.gate_up_proj,mlp.experts.down_proj]",
      "train.micro_batch_tokens=64", "train.recompute=full"}},
    {"embedding, full, evaluated",
     "dense",
     // The usual temperature of 0.05 magnifies the rounding of fp32 by twenty.
     {"model.head=embed", "train.infonce_temperature=1", "train.micro_batch_tokens=96",
      "train.eval_every=5"},
     "pairs.jsonl"},
    {"embedding, LoRA, fewer rows than ranks",
     "dense",
     {"model.head=embed", "train.infonce_temperature=1", "train.method=lora", "adapter.rank=4",
      "train.global_batch_size=3", "data.packing=false"},
     "pairs.jsonl"},
    {"dense, Muon, noisy embeddings, rates by group",
     "dense",
     {"optim.name=muon", "optim.weight_decay=0.1", "train.neftune_alpha=5",
      "optim.lr_embeddings=3e-4", "train.recompute=full", "train.grad_cosine=true"}},
    {"moe, Muon, noisy embeddings, untied rates",
     "moe",
     {"optim.name=muon", "train.neftune_alpha=5", "optim.lr_head=3e-4", "train.spike=skip",
      "train.spike_factor=1.2", "train.spike_window=3", "train.grad_cosine=true"}},
    {"dense, LoRA+ by Muon",
     "dense",
     {"optim.name=muon", "train.method=lora", "adapter.rank=4", "adapter.loraplus_lr_ratio=4",
      "train.grad_cosine=true"}},
    {"dpo, full, evaluated",
     "dense",
     {"train.objective=dpo", "data.loss_on=assistant", "train.micro_batch_tokens=128",
      "dpo.sft_weight=0.2", "train.eval_every=5"},
     "preferences.jsonl"},
    {"dpo, LoRA, fewer rows than ranks",
     "dense",
     {"train.objective=dpo", "data.loss_on=assistant", "train.method=lora", "adapter.rank=4",
      "adapter.dropout=0.1", "train.global_batch_size=3"},
     "preferences.jsonl"},
    {"moe, dpo, LoRA",
     "moe",
     {"train.objective=dpo", "data.loss_on=assistant", "train.method=lora", "adapter.rank=4",
      "train.micro_batch_tokens=96", "train.eval_every=5"},
     "preferences.jsonl"},
    {"orpo, full, evaluated",
     "dense",
     {"train.objective=dpo", "dpo.loss=orpo", "data.loss_on=assistant",
      "train.micro_batch_tokens=128", "train.eval_every=5"},
     "preferences.jsonl"},
    {"moe, simpo, LoRA, fewer rows than ranks",
     "moe",
     {"train.objective=dpo", "dpo.loss=simpo", "data.loss_on=assistant", "train.method=lora",
      "adapter.rank=4", "train.micro_batch_tokens=96", "train.global_batch_size=3"},
     "preferences.jsonl"},
    {"reward, full, evaluated",
     "dense",
     {"train.objective=reward", "model.head=classify", "model.num_labels=1",
      "train.micro_batch_tokens=128", "train.eval_every=5"},
     "preferences.jsonl"},
};

/// One micro-batch a step, as other layouts cut it in other ways: see train/auxiliary_loss.h.
inline const Variant kPooledBalance = {
    "moe, full, pooled balance",
    "moe",
    {"train.router_aux_loss=hf", "train.router_aux_loss_coef=0.5", "train.micro_batch_tokens=4096",
     "train.recompute=full"}};

struct Precision {
  const char* name;
  double bound;  ///< Bound of the losses.
  /// Bounds of the gradient norm, and, after the first step, of one that is sensitive. In fp32 the
  /// first norm of one rank is itself 1e-5 off that of float64; another kernel of rms_norm moves
  /// that of a model with experts by 4.5e-5 in ten steps (and the loss by 8e-8), as AdamW makes
  /// every rounding of a small gradient a step of full size; and a contrastive gradient is a small
  /// difference of embeddings that are nearly alike: a smaller bound would fail correct programs.
  double norm_bound, sensitive_norm_bound;
};
inline constexpr Precision kFloat64 = {"float64", 1e-9, 1e-9, 1e-9},
                           kFloat32 = {"float32", 1e-5, 1e-5, 1e-4},
                           kLooseFloat32 = {"float32", 1e-5, 3e-5, 1e-4};

}  // namespace heddle::parity
