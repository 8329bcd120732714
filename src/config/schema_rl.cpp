#include "config/table.h"

namespace heddle::config {
namespace {

Section rl_section() {
  Section s = make("rl", "Reinforcement learning, for train.objective policy.");
  Table<RlSection>(s, &RunConfig::rl)
      .key("mode", &RlSection::mode,
           "sync: generate, score and train in turn; async: generation goes on over updates")
      .key(
          "role", &RlSection::role,
          "all: this job is the whole run; trainer, rollout: all its ranks train, or generate, and "
          "those of another job do the other; the two meet at sync.rendezvous")
      .key("trainer_ranks", &RlSection::trainer_ranks,
           "ranks that train, the first of the job; 0: all that do not generate",
           {.range = at_least(0)})
      .key("rollout_ranks", &RlSection::rollout_ranks,
           "ranks that only generate, the last of the job; 0: those that train do both in turn",
           {.range = at_least(0)})
      .key("max_staleness", &RlSection::max_staleness,
           "async: versions that a token may be old when it is trained on; 0 equals sync",
           {.range = at_least(0), .aliases = {"staleness_threshold", "max_staleness_steps"}})
      .key("stale_policy", &RlSection::stale_policy,
           "async: for groups that would get too old the trainer waits, or they are dropped and "
           "their prompts issued again")
      .key("stale_attempts", &RlSection::stale_attempts,
           "async: times that a prompt is issued at most; a group that gets too old in the last of "
           "them is rejected, and a line names its prompt",
           {.range = at_least(1)})
      .key("update_mode", &RlSection::update_mode,
           "async: running sequences when the weights change: recompute: go on after their tokens "
           "have passed through the new weights, wait: are finished first, abort: are begun "
           "again, keep: go on from what the old weights have read, pin: end under the adapter "
           "that they began with (train.method lora, where it is the default unless something "
           "of this run stands in its way)")
      .key("history", &RlSection::history,
           "what a turn after the first follows: append: the turns before as they were drawn, "
           "render: "
           "the conversation as the chat template renders it then; where that is no continuation "
           "of what stood there, what follows becomes a row of its own")
      .key("groups_per_step", &RlSection::groups_per_step, "prompts of an optimizer step",
           {.range = at_least(1), .aliases = {"train_batch_size", "rollout_batch_size"}})
      .key("sync_every", &RlSection::sync_every,
           "optimizer steps before those that generate get the new weights: so many times "
           "groups_per_step prompts are a batch, whose advantages are found together",
           {.range = at_least(1), .aliases = {"trigger_parameter_sync_step", "weight_sync_steps"}})
      .key("epochs", &RlSection::epochs, "passes over a batch, each of sync_every optimizer steps",
           {.range = at_least(1), .aliases = {"ppo_epochs", "num_iterations"}})
      .key("samples_per_group", &RlSection::samples_per_group, "completions of a prompt",
           {.range = at_least(1), .aliases = {"num_generations", "group_size", "n"}})
      .key("max_inflight_groups", &RlSection::max_inflight_groups,
           "async: running groups; 0: as many as max_staleness admits", {.range = at_least(0)})
      .key(
          "old_logprobs", &RlSection::old_logprobs,
          "anchor of the ratio: rollout: the policy that drew the tokens, recompute: the weights "
          "before the batch's first step, loglinear: for tokens older than a version, between the "
          "policy that drew them and the one in training; but for rollout, rl.correction.is weighs "
          "the anchor against the policy that drew",
          {.aliases = {"prox_logp_method"}})
      .key(
          "router_replay", &RlSection::router_replay,
          "experts that completions are trained with: off: those of the trainer's own router, r2: "
          "those that it chose in the pass of old_logprobs recompute, r3: those that generation "
          "chose; with the weights that the router gives them. auto: r3 for models with experts in "
          "mode async")
      .key("overlong", &RlSection::overlong,
           "completions near the length limit: a penalty, or truncated ones leave the loss but not "
           "their group's mean")
      .key("overlong_buffer", &RlSection::overlong_buffer,
           "overlong punish: tokens before the limit over which the penalty grows",
           {.range = at_least(0)})
      .key("overlong_penalty", &RlSection::overlong_penalty, "overlong punish: at the limit",
           {.range = at_least(0)})
      .key("dynamic_sampling", &RlSection::dynamic_sampling,
           "replace groups whose rewards are all equal by others", {.aliases = {"filter_groups"}})
      .key("max_attempts", &RlSection::max_attempts,
           "dynamic_sampling: times the groups of a batch that are generated for it at most",
           {.range = at_least(1), .aliases = {"max_num_gen_batches"}})
      .key("groups_every", &RlSection::groups_every,
           "steps between groups written to <train.output_dir>/groups.jsonl; 0: none",
           {.range = at_least(0)})
      .key("deterministic", &RlSection::deterministic,
           "a run's bits follow from its seed also in mode async: groups are consumed in the order "
           "of their prompts, and with rollout_ranks every group that a version admits is "
           "generated by it");
  return s;
}

Section algorithm_section() {
  Section s = make("rl.algorithm", "Advantages and the loss of tokens.");
  Table<RlAlgorithm>(s, &RunConfig::rl, &RlSection::algorithm)
      .key("advantage", &RlAlgorithm::advantage, "what a reward is measured against",
           {.aliases = {"adv_estimator", "advantage_estimator"}})
      .key("loss", &RlAlgorithm::loss, "of a token", {.aliases = {"policy_loss", "loss_type"}})
      .key("mean", &RlAlgorithm::mean,
           "how losses of tokens add up; norm: divided by rollout.max_new_tokens",
           {.aliases = {"loss_agg_mode"}})
      .key("clip_low", &RlAlgorithm::clip_low, "losses ppo, gspo, cispo: lower bound 1 - clip_low",
           {.range = at_least(0), .aliases = {"epsilon", "cliprange", "clip_ratio_low"}})
      .key("clip_high", &RlAlgorithm::clip_high,
           "losses ppo, gspo, cispo: upper bound 1 + clip_high; DAPO 0.28",
           {.range = at_least(0), .aliases = {"epsilon_high", "clip_ratio_high"}})
      .key("dual_clip", &RlAlgorithm::dual_clip,
           "losses ppo, gspo: bound c of -A for negative advantages; 0: off",
           {.range = at_least(0), .aliases = {"clip_ratio_c", "delta"}})
      .key("sapo_tau_positive", &RlAlgorithm::sapo_tau_positive, "loss sapo", {.range = above(0)})
      .key("sapo_tau_negative", &RlAlgorithm::sapo_tau_negative, "loss sapo", {.range = above(0)})
      .key("dppo_cap", &RlAlgorithm::dppo_cap, "loss dppo: largest ratio", {.range = above(0)})
      .key("dppo_delta", &RlAlgorithm::dppo_delta, "loss dppo: change of probability allowed",
           {.range = above(0)})
      .key("dro_beta", &RlAlgorithm::dro_beta, "loss dro", {.range = at_least(0)})
      .key("entropy_coef", &RlAlgorithm::entropy_coef,
           "of the mean entropy that the loss raises; 0: none",
           {.range = at_least(0), .aliases = {"entropy_coeff", "entropy_loss_coef"}})
      .key("entropy_target", &RlAlgorithm::entropy_target,
           "mean entropy in nats; a step at or below it raises the coefficient, which begins as "
           "entropy_coef, one above lowers it and the next has no bonus; 0: it stays",
           {.range = at_least(0)})
      .key("entropy_coef_delta", &RlAlgorithm::entropy_coef_delta,
           "entropy_target: change of the coefficient in a step", {.range = above(0)})
      .key("entropy_coef_min", &RlAlgorithm::entropy_coef_min, "entropy_target: its lower bound",
           {.range = at_least(0)})
      .key("entropy_coef_max", &RlAlgorithm::entropy_coef_max, "entropy_target: its upper bound",
           {.range = at_least(0)})
      .key("gamma", &RlAlgorithm::gamma, "advantages reinforce++ and gae: discount",
           {.range = within(0, 1)})
      .key("lambda", &RlAlgorithm::lambda,
           "advantage gae: 1 trusts rewards alone, 0 the critic's next value",
           {.range = within(0, 1), .aliases = {"lam", "gae_lambda"}});
  return s;
}

Section correction_section() {
  Section s = make("rl.correction", "Weights and bounds for tokens of another policy.");
  Table<RlCorrection>(s, &RunConfig::rl, &RlSection::correction)
      .key("is", &RlCorrection::is,
           "importance weights; with old_logprobs rollout the ratio holds them, but for loss "
           "reinforce",
           {.aliases = {"rollout_is", "tis"}})
      .key("is_cap", &RlCorrection::is_cap, "largest weight; 0: any", {.range = at_least(0)})
      .key("is_batch_normalize", &RlCorrection::is_batch_normalize,
           "divide the weights by their mean over the batch; with old_logprobs recompute",
           {.aliases = {"rollout_is_batch_normalize"}})
      .key("rs", &RlCorrection::rs, "statistic by which tokens or sequences are rejected",
           {.aliases = {"rollout_rs"}})
      .key("rs_bounds", &RlCorrection::rs_bounds, "what is kept: from, to")
      .key(
          "rs_denominator", &RlCorrection::rs_denominator,
          "keep: what is rejected counts in the divisor of the loss, as losses of 0; drop: it does "
          "not, as if it had not been drawn; with old_logprobs recompute")
      .key("off_policy_delta", &RlCorrection::off_policy_delta,
           "drop sequences of negative advantage that lost more than this, in nats a token; 0: off",
           {.range = at_least(0)});
  return s;
}

Section reference_section() {
  Section s =
      make("rl.reference", "The model that training starts from; with LoRA it is the base model.");
  Table<RlReference>(s, &RunConfig::rl, &RlSection::reference)
      .key("kl_coef", &RlReference::kl_coef, "of the KL from it; 0: it is not run",
           {.range = at_least(0), .aliases = {"beta", "kl_loss_coef", "kl_ctl"}})
      .key("kl_where", &RlReference::kl_where, "in the loss, or -k1 in the reward")
      .key("kl_form", &RlReference::kl_form,
           "estimator in the loss; k3+: value of k3, gradient of k2")
      .key("kl_ratio_weighted", &RlReference::kl_ratio_weighted,
           "times the ratio, for an unbiased gradient", {.aliases = {"use_bias_correction_kl"}})
      .key("sync_every", &RlReference::sync_every,
           "steps after which the reference becomes the policy as it is then; 0: never",
           {.range = at_least(0), .aliases = {"ref_model_sync_steps"}});
  return s;
}

Section critic_section() {
  Section s = make("rl.critic",
                   "Values of tokens, for advantage gae: a second model that starts as a copy of "
                   "the first, with a head of one number.");
  Table<RlCritic>(s, &RunConfig::rl, &RlSection::critic)
      .key("lr", &RlCritic::lr, "its learning rate; name and moments of its optimizer are optim's",
           {.range = at_least(0), .aliases = {"critic_learning_rate", "critic_lr"}})
      .key("schedule", &RlCritic::schedule, "of its learning rate; wsd: optim.decay_steps")
      .key("lr_warmup_steps", &RlCritic::lr_warmup_steps,
           "first steps, over which its learning rate rises", {.range = at_least(0)})
      .key("clip_norm", &RlCritic::clip_norm, "largest norm of its gradient; 0: not clipped",
           {.range = at_least(0)})
      .key("updates", &RlCritic::updates, "on the tokens of each step", {.range = within(1, 1000)})
      .key("clip", &RlCritic::clip,
           "change of a value over the updates of a step after which it is not pushed further; 0: "
           "any",
           {.range = at_least(0), .aliases = {"cliprange_value", "value_clip"}})
      .key("warmup_steps", &RlCritic::warmup_steps,
           "first steps, in which the critic alone learns and the policy stays as it is",
           {.range = at_least(0), .aliases = {"critic_warmup"}});
  return s;
}

Section reward_section() {
  Section s = make("rl.reward",
                   "What judges completions: verifiers, a program, a server or an environment.");
  Table<RlReward>(s, &RunConfig::rl, &RlSection::reward)
      .key("combine", &RlReward::combine, "several verifiers: weighted sum or product")
      .key("command", &RlReward::command,
           "program and arguments: JSON lines of samples in, of rewards out")
      .key("environment", &RlReward::environment,
           "program and arguments that play episodes: JSON lines of resets and steps in, of "
           "observations and rewards out")
      .key("workers", &RlReward::workers, "processes of the program", {.range = within(1, 4096)})
      .key("url", &RlReward::url, "a server that gets lists of samples",
           {.secret = Secret::kPassword})
      .key("token", &RlReward::token, "bearer token for it", {.secret = Secret::kWhole})
      .key("timeout_s", &RlReward::timeout_s, "of one sample or request", {.range = above(0)})
      .key(
          "failed", &RlReward::failed,
          "reward of a completion that the program or the server could not judge; none: its prompt "
          "is left out")
      .key("memory_bytes", &RlReward::memory_bytes,
           "address space of a process of the program; 0: any", {.range = at_least(0)})
      .key("cpu_seconds", &RlReward::cpu_seconds,
           "processor time of a process of the program; 0: any", {.range = at_least(0)})
      .key("batch", &RlReward::batch, "samples in a request to the server at most",
           {.range = at_least(1)})
      .key("concurrency", &RlReward::concurrency, "requests to the server at once",
           {.range = within(1, 4096)})
      .key("retries", &RlReward::retries,
           "after status 429, 5xx or a broken connection the server is asked again so often",
           {.range = at_least(0)})
      .key("backoff_s", &RlReward::backoff_s,
           "before the first time; doubles each time, unless the server says how long",
           {.range = at_least(0)})
      .key("shuffle", &RlReward::shuffle,
           "permute the rewards of a step: a control, by which nothing can be learnt");
  return s;
}

Section verifiers_section() {
  Section s = make("rl.reward.verifiers", "Built-in verifiers and their weights.");
  Table<RlReward>(s, &RunConfig::rl, &RlSection::reward)
      .open("<verifier>", &RlReward::verifiers, "for example exact: 1");
  return s;
}

Section parameters_section() {
  Section s = make("rl.reward.parameters", "Parameters of verifiers.");
  Table<RlReward>(s, &RunConfig::rl, &RlSection::reward)
      .open("<verifier>", &RlReward::parameters,
            "a JSON object as text, for example '{\"ignore_case\": true}'");
  return s;
}

Section rollout_section() {
  Section s = make("rollout", "Generation in training, over all tokens.");
  Table<RolloutSection>(s, &RunConfig::rollout)
      .key("max_new_tokens", &RolloutSection::max_new_tokens,
           "tokens of a completion at most; prompts may have data.max_length less this",
           {.range = at_least(1),
            .aliases = {"max_completion_length", "response_length", "max_tokens"}})
      .key("max_sequences", &RolloutSection::max_sequences, "generated at the same time",
           {.range = at_least(1), .aliases = {"max_num_seqs"}})
      .key("prefill_tokens", &RolloutSection::prefill_tokens,
           "prompt tokens of one pass of a data rank at most", {.range = at_least(1)})
      .key("stop", &RolloutSection::stop, "texts that end a completion, besides its end tokens")
      .key("temperature", &RolloutSection::temperature,
           "of the distribution that tokens are drawn from and the policy is trained as",
           {.range = above(0)})
      .key("top_k", &RolloutSection::top_k,
           "tokens are drawn from so many most likely ones, over which the policy is trained; 0: "
           "all",
           {.range = at_least(0)})
      .key("top_p", &RolloutSection::top_p,
           "of these from the fewest that have this probability together; below 1 top_k says how "
           "many they may be",
           {.range = {.low = 0, .high = 1, .low_open = true}})
      .key("min_p", &RolloutSection::min_p,
           "of these from those of at least this share of the most likely one's probability; above "
           "0 top_k says how many they may be",
           {.range = within(0, 1)})
      .key("tp", &RolloutSection::tp,
           "tensor parallelism of rl.rollout_ranks; what is left are replicas",
           {.range = at_least(1), .aliases = {"tensor_model_parallel_size"}})
      .key(
          "merge_adapter", &RolloutSection::merge_adapter,
          "train.method lora: generate with the adapter added to its matrices, as fast as the base "
          "model; needs the memory of a second copy of them, and rounds the sums to their dtype",
          {.aliases = {"merge_lora"}})
      .key("gather_weights", &RolloutSection::gather_weights,
           "with parallel.fsdp: ranks gather the whole weights before they generate and let go of "
           "them after it, so that tokens wait for no other rank; needs their memory meanwhile. "
           "false: each layer is gathered for each token")
      .key("release_memory", &RolloutSection::release_memory,
           "give the memory of states, keys and values back while the same ranks train, and record "
           "graphs anew before the next batch; what is under way is read again",
           {.aliases = {"enable_sleep_mode", "free_cache_engine"}});
  Table<rollout::CacheOptions>(s, &RunConfig::rollout, &RolloutSection::caches)
      .key("state_dtype", &rollout::CacheOptions::state_dtype,
           "recurrent states of Gated DeltaNet layers between steps; bfloat16: half the memory and "
           "traffic, each state rounded once a step",
           {.aliases = {"mamba_ssm_cache_dtype"}})
      .key("kv_page", &rollout::CacheOptions::kv_page,
           "tokens of a page of keys and values, a power of two", {.range = at_least(1)})
      .key("memory_fraction", &rollout::CacheOptions::memory_fraction,
           "share of the device's free memory that states, keys and values take at most; where "
           "max_sequences at full length want more, sequences may be interrupted; 0: 0.5 on ranks "
           "that train too, 0.9 on others",
           {.range = within(0, 1), .aliases = {"gpu_memory_utilization"}})
      .key(
          "graph_batches", &rollout::CacheOptions::graph_batches,
          "batch sizes whose steps are recorded as graphs, ascending; a smaller batch is filled up "
          "to one of them, steps of a larger one are launched one by one; empty: 1, 2, 4, 8, 16, "
          "24, 32, 48, 64 and then multiples of 32",
          {.range = at_least(1), .aliases = {"cudagraph_capture_sizes"}});
  return s;
}

Section sync_section() {
  Section s = make("sync", "Weights on their way to rl.rollout_ranks.");
  Table<SyncSection>(s, &RunConfig::sync)
      .key("backend", &SyncSection::backend,
           "what carries them: nccl (hccl) from device to device, gloo through the memory of the "
           "hosts; auto: the device's own")
      .key("bucket_bytes", &SyncSection::bucket_bytes,
           "of a message; a rank has two of them in memory", {.range = at_least(1024)})
      .key("staged", &SyncSection::staged,
           "rollouts keep new weights apart until all have come, so that a failed update leaves "
           "the old ones, and over gloo generate on meanwhile; needs the memory of a second copy")
      .key(
          "verify", &SyncSection::verify,
          "after the first publication, and each whose version this divides, the rollouts' tensors "
          "are compared with the trainer's by a hash; 0: never",
          {.range = at_least(0)})
      .key("listen", &SyncSection::listen,
           "HOST:PORT at which a job of rl.role trainer waits for one of rl.role rollout: an "
           "address of its first host that the other reaches; port 0: one that the system chooses")
      .key("rendezvous", &SyncSection::rendezvous,
           "file that tells a job of rl.role rollout where the trainer waits, with the key that it "
           "is let in by; the trainer writes it; empty: <train.output_dir>/rendezvous.json")
      .key("rendezvous_timeout_s", &SyncSection::rendezvous_timeout_s,
           "how long trainer and rollouts wait for each other at the start, and with rl.role after "
           "the other job was lost",
           {.range = at_least(1)})
      .key("timeout_s", &SyncSection::timeout_s,
           "after which a message or a sign of life of the other side counts as lost",
           {.range = at_least(1)});
  return s;
}

}  // namespace

std::vector<Section> rl_sections() {
  return {rl_section(),      algorithm_section(), correction_section(), reference_section(),
          critic_section(),  reward_section(),    verifiers_section(),  parameters_section(),
          rollout_section(), sync_section()};
}

}  // namespace heddle::config
