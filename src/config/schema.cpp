#include "config/table.h"

// The one place where a key is declared, with schema_rl.cpp. Order is the order of every printout.

namespace heddle::config {
namespace {

Section model_section() {
  Section s = make("model", "The model to start from.");
  Table<ModelSection>(s, &RunConfig::model)
      .key("path", &ModelSection::path,
           "folder of a Hugging Face checkpoint, or its name on the Hub (hf://, ms://)",
           {.aliases = {"model_name_or_path", "base_model", "model_path"}, .required = true})
      .key("tokenizer", &ModelSection::tokenizer,
           "folder with tokenizer.json and chat template; empty: model.path")
      .key("dtype", &ModelSection::dtype,
           "of weights and activations in training; bfloat16 on an accelerator unless given; "
           "optimizer "
           "state is at least float32",
           {.aliases = {"torch_dtype", "precision", "bf16", "fp16"}})
      .key("head", &ModelSection::head,
           "what the model predicts: next token, labels of a sequence, or an embedding")
      .key("num_labels", &ModelSection::num_labels,
           "outputs of head classify; 1 is regression or reward; 0: one for each name in "
           "data.labels",
           {.range = at_least(0)})
      .key("normalize", &ModelSection::normalize, "head embed: scale embeddings to length 1")
      .key("added_tokens", &ModelSection::added_tokens,
           "new special tokens; the vocabulary grows where the checkpoint has no spare rows",
           {.aliases = {"special_tokens", "additional_special_tokens"}})
      .key("resize_vocab", &ModelSection::resize_vocab,
           "rows of the embedding; 0: as the checkpoint and added_tokens need",
           {.range = at_least(0)});
  return s;
}

Section data_section() {
  Section s = make("data", "The rows to train and evaluate on.");
  Table<DataSection>(s, &RunConfig::data)
      .key("train", &DataSection::train,
           "training files, folders, patterns or a data set of the Hugging Face Hub; weight: how "
           "often a row is seen in an epoch",
           {.aliases = {"dataset", "datasets", "train_file", "train_path", "path"},
            .required = true})
      .key("eval", &DataSection::eval,
           "held-out files, or a share of the training rows as 0.02; empty: no evaluation",
           {.aliases = {"validation", "eval_file", "eval_path", "test", "val_size", "val_split",
                        "eval_split", "test_size", "split_dataset_ratio", "validation_split"}})
      .key("format", &DataSection::format, "what a row holds; auto looks at its fields")
      .key("packing", &DataSection::packing,
           "fill rows of max_length with several sequences, kept apart by cu_seqlens; false where "
           "a row holds several texts unless given")
      .key("max_length", &DataSection::max_length,
           "tokens of a packed row, and of a sequence at most",
           {.range = at_least(2),
            .aliases = {"max_seq_length", "seq_length", "seq_len", "cutoff_len", "sequence_len"}})
      .key(
          "truncation", &DataSection::truncation,
          "what happens to a longer sequence; split makes several of it; auto splits plain text of "
          "head lm and keeps the start of anything else")
      .key("on_bad_line", &DataSection::on_bad_line,
           "stop at an unusable row, or skip and count it")
      .key("shuffle", &DataSection::shuffle, "new order each epoch, from train.seed")
      .key("loss_on", &DataSection::loss_on, "assistant turns and completions only, or every token",
           {.aliases = {"train_on_inputs"}})
      .key("chat_template", &DataSection::chat_template,
           "Jinja file used instead of the tokenizer's template", {.aliases = {"template"}})
      .key("labels", &DataSection::labels,
           "head classify: names of the classes, in the order of their numbers; empty: those of "
           "the model's config.json, else of the training rows",
           {.aliases = {"label_list", "class_names", "id2label"}})
      .key("cache_dir", &DataSection::cache_dir,
           "folder of tokenized data; empty: <train.output_dir>/cache");
  return s;
}

Section template_section() {
  Section s = make("data.template_args", "Variables of the chat template.");
  Table<DataSection>(s, &RunConfig::data)
      .open("<name>", &DataSection::template_args, "for example enable_thinking: false");
  return s;
}

Section fields_section() {
  Section s = make("data.fields", "Under which names a row keeps its parts.");
  Table<DataFields>(s, &RunConfig::data, &DataSection::fields)
      .key("messages", &DataFields::messages, "list of turns")
      .key("tools", &DataFields::tools, "list of tool descriptions beside the messages")
      .key("prompt", &DataFields::prompt, "carries no loss")
      .key("completion", &DataFields::completion, "carries loss")
      .key("text", &DataFields::text, "plain text, all of it with loss")
      .key("conversations", &DataFields::conversations, "ShareGPT: list of turns")
      .key("from", &DataFields::from, "ShareGPT: human, gpt, system")
      .key("value", &DataFields::value, "ShareGPT: content of a turn")
      .key("instruction", &DataFields::instruction, "Alpaca")
      .key("input", &DataFields::input, "Alpaca, may be empty")
      .key("output", &DataFields::output, "Alpaca")
      .key("system", &DataFields::system, "ShareGPT and Alpaca, may be missing")
      .key("history", &DataFields::history, "Alpaca: earlier turns, may be missing")
      .key("input_ids", &DataFields::input_ids, "tokenized beforehand")
      .key("labels", &DataFields::labels, "as input_ids, -100 where there is no loss")
      .key("label", &DataFields::label,
           "head classify: name or number of the class, or number for regression")
      .key("weight", &DataFields::weight, "loss weight of a turn")
      .key("query", &DataFields::query, "head embed: what is searched with",
           {.aliases = {"anchor", "sentence1"}})
      .key("positive", &DataFields::positive, "head embed: the text that fits the query",
           {.aliases = {"document", "sentence2"}})
      .key("negatives", &DataFields::negatives,
           "head embed: texts that do not fit it, may be missing", {.aliases = {"negative"}})
      .key("chosen", &DataFields::chosen, "objectives dpo and reward: the better answer")
      .key("rejected", &DataFields::rejected, "objectives dpo and reward: the worse answer")
      .key("answer", &DataFields::answer,
           "objective policy: what rewards compare with; a.b: field b of a",
           {.aliases = {"ground_truth", "solution"}})
      .key("meta", &DataFields::meta, "objective policy: handed to rewards, may be missing",
           {.aliases = {"extra_info", "info"}});
  return s;
}

Section train_section() {
  Section s = make("train", "What is trained, for how long, and where it goes.");
  Table<TrainSection>(s, &RunConfig::train)
      .key("objective", &TrainSection::objective,
           "what is learned; auto: next tokens, labels or embeddings, as model.head says")
      .key("method", &TrainSection::method, "all weights, or a low-rank adapter beside frozen ones",
           {.aliases = {"finetuning_type", "peft", "lora", "adapter"}})
      .key("global_batch_size", &TrainSection::global_batch_size,
           "rows per optimizer step: sequences, or packed rows with data.packing",
           {.range = at_least(1), .aliases = {"batch_size", "train_batch_size"}})
      .key("micro_batch_tokens", &TrainSection::micro_batch_tokens,
           "tokens per forward pass at most; sets memory, not results; 0: data.max_length, with "
           "objectives dpo and reward 2 times, contrastive 8 times that",
           {.range = at_least(0),
            .aliases = {"micro_batch_size", "per_device_train_batch_size",
                        "gradient_accumulation_steps"}})
      .key("max_steps", &TrainSection::max_steps, "optimizer steps; 0: as many as epochs gives",
           {.range = at_least(0), .aliases = {"steps", "num_steps", "train_steps"}})
      .key("epochs", &TrainSection::epochs,
           "passes over data.train, also a part of one as 0.5; ignored with max_steps",
           {.range = at_least(0), .aliases = {"num_epochs", "num_train_epochs"}})
      .key("seed", &TrainSection::seed, "of order, dropout and new weights",
           {.range = at_least(0), .aliases = {"random_seed"}})
      .key("output_dir", &TrainSection::output_dir,
           "run directory; empty: runs/<name of the configuration file>, or without one "
           "runs/<model>-<number of the settings>",
           {.aliases = {"output", "save_dir", "run_dir", "run_name"}})
      .key("resume", &TrainSection::resume,
           "auto: from the newest checkpoint of output_dir, if any; never; or a checkpoint folder",
           {.aliases = {"resume_from_checkpoint"}})
      .key("freeze", &TrainSection::freeze, "parameters not trained, by name pattern (* and ?)",
           {.aliases = {"frozen", "freeze_modules"}})
      .key("recompute", &TrainSection::recompute,
           "activations made again in the backward instead of kept: none, norms and gates (a few "
           "percent "
           "of time), these and the MLP, or everything inside a block; auto: measured and chosen "
           "layer by layer in the first steps, what takes least time in the memory that there is",
           {.aliases = {"gradient_checkpointing", "activation_checkpointing"}})
      .key(
          "memory_limit_gib", &TrainSection::memory_limit_gib,
          "with recompute auto: tensors of a rank may hold so much of its device; 0: what is there",
          {.range = at_least(0)})
      .key("offload_activations", &TrainSection::offload_activations,
           "with recompute full or selective: inputs of what runs again wait in the memory of the "
           "host",
           {.aliases = {"enable_activation_offloading", "activation_offload"}})
      .key("router_aux_loss_coef", &TrainSection::router_aux_loss_coef,
           "load balance of mixture-of-experts models; -1: as the checkpoint says",
           {.range = at_least(-1), .aliases = {"aux_loss_coef"}})
      .key("router_aux_loss", &TrainSection::router_aux_loss,
           "per layer and sequence, or pooled over layers and batch as transformers does")
      .key("router_record", &TrainSection::router_record,
           "folder for the experts that each step's tokens choose, one file per step and rank")
      .key("router_replay", &TrainSection::router_replay,
           "folder of such files, of any layout: tokens go to these experts, not to the router's")
      .key("infonce_temperature", &TrainSection::infonce_temperature,
           "head embed: similarities are divided by it (1 / scale of sentence-transformers)",
           {.range = above(0), .aliases = {"temperature", "contrastive_temperature"}})
      .key("eval_every", &TrainSection::eval_every,
           "steps between evaluations on data.eval; 0: at the end only",
           {.range = at_least(0), .aliases = {"eval_steps", "eval_interval"}})
      .key("eval_every_epochs", &TrainSection::eval_every_epochs,
           "the same in epochs, as 1 or 0.25, instead of eval_every", {.range = at_least(0)})
      .key("eval_on_start", &TrainSection::eval_on_start,
           "also evaluate before the first step, as step 0", {.aliases = {"eval_at_start"}})
      .key("early_stop_patience", &TrainSection::early_stop_patience,
           "evaluations without a better one (eval.metric) before stopping; 0: never",
           {.range = at_least(0)})
      .key("deterministic", &TrainSection::deterministic,
           "bit-identical steps also on a GPU, at some cost")
      .key("cuda_graph", &TrainSection::cuda_graph,
           "auto: on one GPU a step whose sequence lengths come again is recorded and replayed as "
           "one graph")
      .key("neftune_alpha", &TrainSection::neftune_alpha,
           "NEFTune: in training, uniform noise of +-alpha / sqrt(length of the sequence * "
           "hidden size) on embedded tokens; 0: none",
           {.range = at_least(0), .aliases = {"neftune_noise_alpha"}})
      .key("spike", &TrainSection::spike,
           "a step whose gradient norm is above spike_factor times the median of the last "
           "spike_window steps: taken like any other, skipped (nothing changes), or the run stops "
           "with a checkpoint")
      .key("spike_factor", &TrainSection::spike_factor, "of the median", {.range = above(1)})
      .key("spike_window", &TrainSection::spike_window,
           "steps of the median; no step is judged before there are so many",
           {.range = within(2, 1000)})
      .key("grad_cosine", &TrainSection::grad_cosine,
           "report the cosine of each step's gradient with that of the step before "
           "(grad_cos_prev), which takes the memory of a second copy of the gradients");
  return s;
}

Section eval_section() {
  Section s = make("eval",
                   "Answers of the model in training, judged with each evaluation on data.eval as "
                   "`heddle eval` judges them.");
  Table<EvalSection>(s, &RunConfig::eval)
      .key("input", &EvalSection::input,
           "file of rows with a prompt and its right answer; empty: no answers are judged",
           {.aliases = {"eval_dataset", "predict_with_generate"}})
      .key("metrics", &EvalSection::metrics,
           "exact, numeric, f1, likelihood, perplexity and the others of `heddle eval`; empty: "
           "those that the rows are made for",
           {.aliases = {"compute_metrics"}})
      .key("answer", &EvalSection::answer,
           "field of the right answer; empty: answer, else the row's own last answer")
      .key("max_rows", &EvalSection::max_rows, "the first so many are judged; 0: all",
           {.range = at_least(0), .aliases = {"max_eval_samples", "max_samples"}})
      .key("max_new_tokens", &EvalSection::max_new_tokens,
           "length of an answer at most; the likeliest token is taken each time",
           {.range = at_least(1), .aliases = {"generation_max_length"}})
      .key("metric", &EvalSection::metric,
           "what the best checkpoint is chosen and early stopping decided by: loss, or a name of "
           "metrics; lower is better for loss and perplexity, higher for all others",
           {.aliases = {"metric_for_best_model"}});
  return s;
}

Section dpo_section() {
  Section s = make("dpo", "Preference tuning, for train.objective dpo.");
  Table<objective::DpoOptions>(s, &RunConfig::dpo)
      .key("beta", &objective::DpoOptions::beta,
           "how strongly the policy is held to the reference; orpo: weight of the odds ratio; "
           "simpo: scale of the margin, 2 unless given",
           {.range = above(0), .aliases = {"pref_beta"}})
      .key("loss", &objective::DpoOptions::loss,
           "of the margin between the two answers; ipo, orpo and simpo compare means over tokens; "
           "orpo and simpo need no reference",
           {.aliases = {"loss_type", "pref_loss"}})
      .key("label_smoothing", &objective::DpoOptions::label_smoothing,
           "losses sigmoid and simpo: share of pairs whose labels are wrong",
           {.range = from_up_to(0, 0.5)})
      .key(
          "sft_weight", &objective::DpoOptions::sft_weight,
          "of the mean cross-entropy of the chosen answer, added to the loss; orpo: 1 unless given",
          {.range = at_least(0), .aliases = {"rpo_alpha", "pref_ftx", "cpo_alpha"}})
      .key("simpo_gamma", &objective::DpoOptions::simpo_gamma,
           "loss simpo: what the chosen answer is to be ahead by, after scaling by beta",
           {.range = at_least(0)});
  return s;
}

Section optim_section() {
  Section s = make("optim", "Optimizer and learning-rate schedule.");
  Table<OptimSection>(s, &RunConfig::optim)
      .key("name", &OptimSection::name,
           "AdamW, SGD, or Muon for the matrices inside the blocks with AdamW for all else; with "
           "float32 master weights",
           {.aliases = {"optimizer", "optim", "type"}})
      .key("lr", &OptimSection::lr, "peak learning rate; 2e-4 with train.method lora unless given",
           {.range = at_least(0), .aliases = {"learning_rate", "max_lr"}})
      .key("lr_head", &OptimSection::lr_head,
           "peak learning rate of the output layer (lm_head, score), on the same schedule; 0: lr",
           {.range = at_least(0), .aliases = {"head_lr"}})
      .key("lr_embeddings", &OptimSection::lr_embeddings,
           "peak learning rate of the embedding, and of a head tied to it; 0: lr",
           {.range = at_least(0),
            .aliases = {"embedding_lr", "embedding_learning_rate", "lr_embedding"}})
      .key("weight_decay", &OptimSection::weight_decay, "decoupled; never on 1-D tensors",
           {.range = at_least(0), .aliases = {"wd"}})
      .key("betas", &OptimSection::betas, "AdamW",
           {.range = from_up_to(0, 1), .aliases = {"adam_betas", "adam_beta1", "adam_beta2"}})
      .key("eps", &OptimSection::eps, "AdamW",
           {.range = above(0), .aliases = {"adam_epsilon", "epsilon"}})
      .key("momentum", &OptimSection::momentum, "SGD, and Muon: 0.95 there unless given",
           {.range = from_up_to(0, 1), .aliases = {"muon_momentum"}})
      .key("clip_norm", &OptimSection::clip_norm, "largest norm of the whole gradient; 0: off",
           {.range = at_least(0), .aliases = {"max_grad_norm", "grad_clip", "gradient_clipping"}})
      .key("schedule", &OptimSection::schedule, "after warm-up; wsd holds, then decays",
           {.aliases = {"lr_scheduler", "lr_scheduler_type", "scheduler"}})
      .key("warmup_steps", &OptimSection::warmup_steps, "steps from 0 to lr",
           {.range = at_least(0), .aliases = {"warmup", "num_warmup_steps"}})
      .key("warmup_ratio", &OptimSection::warmup_ratio,
           "the same as a share of all steps, instead of warmup_steps", {.range = from_up_to(0, 1)})
      .key("decay_steps", &OptimSection::decay_steps, "wsd: steps of the final decay",
           {.range = at_least(0), .aliases = {"num_decay_steps"}})
      .key("decay_type", &OptimSection::decay_type, "wsd: form of the final decay",
           {.aliases = {"lr_wsd_decay_style", "wsd_decay_style"}})
      .key("min_lr_ratio", &OptimSection::min_lr_ratio, "end of the schedule, as a fraction of lr",
           {.range = within(0, 1), .aliases = {"min_lr", "lr_min"}})
      .key("no_decay", &OptimSection::no_decay,
           "further parameters without weight decay, by name pattern")
      .key("grad_dtype", &OptimSection::grad_dtype,
           "in which gradients are summed over micro-batches and ranks")
      .key("state_dtype", &OptimSection::state_dtype,
           "of AdamW's moments (float64 for model.dtype float64); bfloat16 and int8 also drop the "
           "float32 master of bfloat16 weights and round stochastically; int8: one byte each, in "
           "blocks of 256")
      .key("offload", &OptimSection::offload,
           "keep AdamW's moments and masters in the memory of the host and move them through the "
           "device at each step",
           {.aliases = {"offload_optimizer", "optimizer_cpu_offload", "cpu_offload"}});
  return s;
}

Section adapter_section() {
  Section s = make("adapter", "LoRA, with train.method lora.");
  Table<AdapterSection>(s, &RunConfig::adapter)
      .key("path", &AdapterSection::path,
           "adapter to train on from: a folder that PEFT or a run of Heddle wrote, or its name on "
           "the Hub; rank, alpha, rslora, targets, target_parameters and modules_to_save are then "
           "its own",
           {.aliases = {"adapter_name_or_path", "lora_path", "adapter_path", "lora_adapter_path"}})
      .key("rank", &AdapterSection::rank, "of A and B",
           {.range = at_least(0), .aliases = {"r", "lora_r", "lora_rank"}})
      .key("alpha", &AdapterSection::alpha, "the update is scaled by alpha / rank",
           {.range = above(0), .aliases = {"lora_alpha"}})
      .key("rslora", &AdapterSection::rslora, "scale by alpha / sqrt(rank) instead",
           {.aliases = {"use_rslora"}})
      .key("dropout", &AdapterSection::dropout, "on the input of A",
           {.range = from_up_to(0, 1), .aliases = {"lora_dropout"}})
      .key("targets", &AdapterSection::targets,
           "all-linear (all but the head), servable (of these what vLLM and SGLang load), or names "
           "as q_proj, in_proj_qkv, *.mlp.*",
           {.aliases = {"target_modules", "lora_target", "lora_target_modules"}})
      .key("target_parameters", &AdapterSection::target_parameters,
           "stacked matrices of routed experts, as mlp.experts.gate_up_proj, mlp.experts.down_proj",
           {.aliases = {"lora_target_parameters"}})
      .key(
          "shared_expert_factors", &AdapterSection::shared_expert_factors,
          "experts of a layer share the factor on the side of the hidden states: A of gate_up_proj "
          "and B of down_proj; false: each has a pair, as in PEFT")
      .key("modules_to_save", &AdapterSection::modules_to_save,
           "modules trained in full beside the adapter, as lm_head")
      .key("loraplus_lr_ratio", &AdapterSection::loraplus_lr_ratio,
           "LoRA+: learning rate of B over that of A, which is optim.lr",
           {.range = above(0), .aliases = {"plus_ratio", "lorap_lr_ratio", "loraplus_ratio"}})
      .key("seed", &AdapterSection::seed, "of A; train.seed unless given", {.range = at_least(0)});
  return s;
}

Section parallel_section() {
  Section s = make("parallel", "How ranks share the work; their product is the number of ranks.");
  const auto degree = [](std::string alias) {
    return Extra{.range = at_least(1), .aliases = {std::move(alias)}};
  };
  Table<ParallelSection>(s, &RunConfig::parallel)
      .key("dp", &ParallelSection::dp, "replicas of the model", degree("data_parallel_size"))
      .key("fsdp", &ParallelSection::fsdp, "ranks over which parameters are sharded",
           degree("fsdp_size"))
      .key("tp", &ParallelSection::tp, "tensor parallel", degree("tensor_parallel_size"))
      .key("cp", &ParallelSection::cp, "context parallel: one sequence over several ranks",
           degree("context_parallel_size"))
      .key("pp", &ParallelSection::pp, "pipeline stages", degree("pipeline_parallel_size"))
      .key("ep", &ParallelSection::ep, "expert parallel, carved from the others",
           degree("expert_parallel_size"))
      .key("cp_method", &ParallelSection::cp_method, "state passing, or all-to-all to heads")
      .key("pp_schedule", &ParallelSection::pp_schedule, "order of micro-batches in the pipeline")
      .key("pp_chunks", &ParallelSection::pp_chunks,
           "stages on each rank with pp_schedule interleaved",
           {.range = at_least(2), .aliases = {"virtual_pipeline_stages"}})
      .key("sum_gradients", &ParallelSection::sum_gradients,
           "over dp, fsdp and cp: once a step, while each rank keeps them whole, or with every "
           "micro-batch: more traffic, but only what a rank owns is kept")
      .key("timeout_s", &ParallelSection::timeout_s, "deadline of every collective operation",
           {.range = above(0), .aliases = {"timeout"}});
  return s;
}

Section kernels_section() {
  Section s = make("kernels", "Which kernel runs each operator; `heddle doctor` lists them.");
  Table<KernelsSection>(s, &RunConfig::kernels)
      .key("fallback", &KernelsSection::fallback,
           "whether an accelerator may use a reference kernel where a faster one exists")
      .key("fp8", &KernelsSection::fp8,
           "linear layers from the fifth block on, SwiGLU and norms in 8-bit floats, and the "
           "experts that LoRA leaves alone on one rank; needs a Hopper GPU and bfloat16")
      .open("<operator>", &KernelsSection::choice,
            "name of the kernel this operator must use, else the run stops");
  return s;
}

Section checkpoint_section() {
  Section s = make("ckpt", "Training checkpoints, in <train.output_dir>/checkpoints.");
  Table<CheckpointSection>(s, &RunConfig::ckpt)
      .key("every", &CheckpointSection::every, "steps; 0: only when stopped and at the end",
           {.range = at_least(0), .aliases = {"save_steps", "save_every", "save_interval"}})
      .key("every_epochs", &CheckpointSection::every_epochs,
           "the same in epochs, as 1 or 0.5, instead of every", {.range = at_least(0)})
      .key("keep_last", &CheckpointSection::keep_last, "older ones are removed",
           {.range = at_least(1), .aliases = {"save_total_limit"}})
      .key("keep_best", &CheckpointSection::keep_best,
           "also keep the one with the best evaluation, see eval.metric",
           {.aliases = {"load_best_model_at_end", "save_best"}});
  return s;
}

Section export_section() {
  Section s = make("ckpt.export", "The Hugging Face folder written at the end.");
  Table<ExportSection>(s, &RunConfig::ckpt, &CheckpointSection::export_)
      .key<Bytes>("max_shard_size", &ExportSection::max_shard_size, "largest safetensors file",
                  {.aliases = {"shard_size"}});
  return s;
}

Section log_section() {
  Section s = make("log", "What is shown and recorded.");
  Table<LogSection>(s, &RunConfig::log)
      .key("every", &LogSection::every,
           "steps between lines when the output is no terminal, at most one a second",
           {.range = at_least(1), .aliases = {"logging_steps", "log_every"}})
      .key("level", &LogSection::level, "of messages", {.aliases = {"verbosity", "log_level"}})
      .key("tensorboard", &LogSection::tensorboard, "write <train.output_dir>/tensorboard")
      .key("report", &LogSection::report, "write <train.output_dir>/report.html")
      .key("command", &LogSection::command,
           "a shell command that gets the configuration and each step's metrics as JSON lines on "
           "its standard input",
           {.aliases = {"report_to", "wandb", "use_wandb", "wandb_project"}})
      .key("sample_prompts", &LogSection::sample_prompts,
           "answered before and after training, for the report")
      .key("sample_tokens", &LogSection::sample_tokens, "length of these answers at most",
           {.range = at_least(1)})
      .key("profile_step", &LogSection::profile_step,
           "step whose kernels are timed, into <train.output_dir>/profile.txt and profile.json; "
           "0: none",
           {.range = at_least(0), .aliases = {"profile", "profiler"}});
  return s;
}

Section device_section() {
  Section s = make("device", "Where this rank computes; `device: cuda:1` is short for its name.");
  s.scalar_key = "device.name";
  Table<DeviceSection>(s, &RunConfig::device)
      .key("name", &DeviceSection::name,
           "N counts the devices this process sees; not given, it is the first accelerator that "
           "this "
           "build can use and the machine has, and the CPU where there is none")
      .key("threads", &DeviceSection::threads, "CPU threads; 0: every core this process may use",
           {.range = within(0, 4096), .aliases = {"num_threads", "cpus"}});
  return s;
}

}  // namespace

const std::vector<Section>& schema() {
  static const std::vector<Section> sections = [] {
    std::vector<Section> all = {model_section(),  data_section(),  template_section(),
                                fields_section(), train_section(), eval_section(),
                                optim_section(),  dpo_section()};
    for (Section& section : rl_sections()) all.push_back(std::move(section));
    for (Section& section :
         std::vector{adapter_section(), parallel_section(), kernels_section(), checkpoint_section(),
                     export_section(), log_section(), device_section()})
      all.push_back(std::move(section));
    return all;
  }();
  return sections;
}

const Section* find_section(std::string_view key) {
  for (const Section& section : schema()) {
    if (section.key == key) return &section;
  }
  return nullptr;
}

const Field* find_field(std::string_view key) {
  for (const Section& section : schema()) {
    for (const Field& field : section.fields) {
      if (field.key == key) return &field;
    }
  }
  return nullptr;
}

}  // namespace heddle::config
