#include "rl/steps.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>

#include "base/errors.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/agreement.h"
#include "rl/batch_bytes.h"
#include "rl/generation.h"
#include "rl/policy_options.h"
#include "rl/remote_generation.h"
#include "rl/timed.h"
#include "rollout/experts.h"

namespace heddle::rl {
namespace {

/// Tensor of a checkpoint: finished groups as to_bytes() writes them.
constexpr const char* kSavedGroups = "groups/finished";

at::Tensor tensor_of(const std::string& bytes) {
  at::Tensor tensor = at::empty({std::ssize(bytes)}, at::TensorOptions(at::kByte));
  std::ranges::copy(bytes, static_cast<char*>(tensor.mutable_data_ptr()));
  return tensor;
}

/// Fates of the rows that are no prompts as they are.
std::string left_out(const Prompts& prompts) { return prompts.report().left_out(); }

void warn_of_rows(const config::RunConfig& config, const Prompts& prompts) {
  if (!prompts.unread_verifier().empty()) {
    log::warning(
        "{}: the row names a verifier, which rl.reward.verifiers does not look for: 'row: 1' there "
        "takes each row's",
        prompts.unread_verifier());
  }
  if (!prompts.prompt_and_messages().empty()) {
    const config::DataFields& fields = config.data.fields;
    log::warning(
        "{}: the row has '{}' and '{}': '{}' is the prompt. To read '{}', give data.fields."
        "messages the name of no column",
        prompts.prompt_and_messages(), fields.prompt, fields.messages, fields.messages,
        fields.prompt);
  }
  for (const std::string& example : prompts.report().bad_examples)
    log::warning("skipped (data.on_bad_line): {}", example);
}

comm::Fact fact_of(const char* key, const Prompts& prompts) {
  return comm::content_fact(key, prompts.identity(), fmt::format("{} prompts", prompts.size()));
}

files::Path ledger_file(const config::RunConfig& config) {
  return files::Path(config.train.output_dir) / "ledger.log";
}

/// The checkpoint is one of this run: its record is in the run's ledger.
bool is_own_checkpoint(const config::RunConfig& config) {
  if (config.train.resume == "auto") return true;
  const files::Path run = std::filesystem::weakly_canonical(config.train.output_dir),
                    checkpoint = std::filesystem::weakly_canonical(config.train.resume);
  return std::ranges::mismatch(run, checkpoint).in1 == run.end();
}

/// The ledger as it was when the checkpoint was written; one that begins there where the checkpoint
/// is of another run, whose ledger stays as it is.
std::unique_ptr<Ledger> reopened_ledger(const config::RunConfig& config,
                                        const nlohmann::json& cursor) {
  if (is_own_checkpoint(config)) {
    return std::make_unique<Ledger>(ledger_file(config), cursor.at("ledger").get<std::uint64_t>());
  }
  auto ledger = std::make_unique<Ledger>(ledger_file(config), 0);
  const nlohmann::json& state = cursor.at("generation");
  std::vector<Dispatch> tried;
  for (const auto& entry : state.at("pending"))
    tried.push_back({entry.at(0).get<std::int64_t>(), entry.at(1).get<std::int64_t>() - 1});
  for (const auto& entry : state.value("finished", nlohmann::json::array()))
    tried.push_back({entry.at(0).get<std::int64_t>(), entry.at(1).get<std::int64_t>()});
  ledger->resumed(state.at("next_cursor").get<std::int64_t>(),
                  cursor.at("steps").get<std::int64_t>(), cursor.at("version").get<std::int64_t>(),
                  tried);
  return ledger;
}

}  // namespace

Steps::Steps(const config::RunConfig& config, train::Setup& setup, objective::Policy& policy)
    : config_(config),
      setup_(setup),
      policy_(policy),
      prompts_(config, train::DataPart::kTrain, *setup.tokenizer),
      held_out_(config, train::DataPart::kEval, *setup.tokenizer),
      info_(loader_info(config, prompts_)),
      judge_(config, *setup.tokenizer, /*in_order=*/true, setup.placed.context.mesh.world_group()),
      log_(std::filesystem::path(config.train.output_dir) / "groups.jsonl"),
      entropy_bonus_(config.rl.algorithm) {
  if (const auto world = setup.placed.context.mesh.world()) {
    comm::require_agreement(*world, "data",
                            {fact_of("data.train", prompts_), fact_of("data.eval", held_out_)});
  }
  if (is_first_rank()) {
    warn_of_rows(config, prompts_);
    warn_of_rows(config, held_out_);
  }
  if (config.rl.replays_experts()) {
    const std::int64_t width = rollout::expert_width(setup.placed.model->config());
    if (width == 0 && config.rl.router_replay != config::RouterReplay::kAuto) {
      throw_error<ConfigError>(
          "rl.router_replay: {} is for models with experts, and this one has "
          "none",
          config::to_string(config.rl.router_replay));
    }
    if (config.rl.replays_generation()) expert_width_ = width;
  }
  if (config.rl.has_critic()) critic_ = std::make_unique<Critic>(config, setup, info_.total_steps);
  if (config.rl.is_disaggregated()) {
    source_ = std::make_unique<RemoteGeneration>(config, setup.placed, prompts_);
  } else {
    source_ = std::make_unique<Generation>(config, setup.placed, setup.tokenizer, prompts_);
  }
  if (config.rl.reference.kl_coef > 0) reference_ = std::make_unique<Reference>(config, setup);
}

std::string Steps::summary() const {
  const std::string per_epoch = prompts_.per_epoch() == prompts_.size()
                                    ? ""
                                    : fmt::format(" ({} an epoch)", prompts_.per_epoch());
  std::string line =
      fmt::format("{} prompts{}, {} tokens{}", prompts_.size(), per_epoch,
                  text::format_count(static_cast<double>(prompts_.tokens())), left_out(prompts_));
  if (has_evaluation())
    line += fmt::format("; {} held out{}", held_out_.size(), left_out(held_out_));
  return line;
}

std::optional<data::Step> Steps::next() {
  if (done_ >= info_.total_steps) return std::nullopt;
  // A run that begins anew has nothing in its ledger.
  if (is_first_rank() && !ledger_) {
    // Nothing of an earlier run of this folder that had no checkpoint.
    log_.keep_up_to(0);
    ledger_ = std::make_unique<Ledger>(ledger_file(config_), 0);
  }
  times_ = {};
  if (updates_ == updates_of_batch_ && !begin_batch()) return std::nullopt;
  const comm::Mesh& mesh = setup_.placed.context.mesh;
  data::Step step;
  {
    const Timed timed(times_.prepare);
    step = experience_->step(done_++, mesh.data_rank(), mesh.data_size(),
                             updates_++ % experience_->parts());
  }
  if (critic_) {
    const Timed timed(times_.critic_update);
    critic_->learn(step, *experience_);
  }
  policy_.set_entropy_coefficient(entropy_bonus_.coefficient());
  step.epoch = batch_.groups.back().cursor / prompts_.per_epoch();
  has_loss_ = step.loss_rows > 0;
  if (!has_loss_ && is_first_rank()) warn_of_no_loss(step);
  return step;
}

bool Steps::begin_batch() {
  batch_ = source_->next();
  {
    const Timed timed(times_.record);
    record(batch_.fates);
  }
  if (batch_.groups.empty()) {
    warn_of_early_end();
    return false;
  }
  {
    const Timed timed(times_.prepare);
    experience_.emplace(config_, prompts_, batch_.groups, expert_width_);
  }
  updates_ = 0;
  updates_of_batch_ = experience_->parts() * config_.rl.epochs;
  if (reference_) {
    const Timed timed(times_.reference);
    experience_->set_reference(reference_->scores(
        [this](const auto& model, bool with_adapters) { return scores(model, with_adapters); }));
  }
  if (config_.rl.finds_anchor()) {
    const Timed timed(times_.anchor);
    find_anchor();
  }
  if (critic_) {
    const Timed timed(times_.critic_values);
    const comm::Mesh& mesh = setup_.placed.context.mesh;
    critic_->evaluate(experience_->step(done_, mesh.data_rank(), mesh.data_size()), *experience_);
  }
  const Timed timed(times_.prepare);
  std::vector<objective::PolicyRow> rows = experience_->policy_rows(source_->version());
  if (config_.rl.finds_anchor()) experience_->correct(correction_options(config_));
  policy_.set_rows(std::move(rows), experience_->mean_weight());
  return true;
}

void Steps::warn_of_no_loss(const data::Step& step) const {
  if (experience_->dropped_tokens(part()) > 0) {
    log::warning(
        "step {}: rl.correction.rs rejects all tokens, and nothing is left to learn from; the "
        "policy stays as it is. Raise rl.correction.rs_bounds, or lower rl.max_staleness",
        step.step + 1);
    return;
  }
  log::warning(
      "step {}: all completions reached rollout.max_new_tokens {}, and rl.overlong mask leaves "
      "nothing of them to learn from; the policy stays as it is. Raise rollout.max_new_tokens, or "
      "give rl.overlong punish",
      step.step + 1, config_.rollout.max_new_tokens);
}

void Steps::warn_of_early_end() const {
  if (!ledger_) return;
  const auto rejected = [this](Rejection reason) {
    const auto found = ledger_->state().rejected.find(reason);
    return found == ledger_->state().rejected.end() ? 0 : found->second;
  };
  log::warning(
      "the run ends with step {} of {}: train.epochs {} has no more prompts, as {} were filtered "
      "(rl.dynamic_sampling), {} could not be judged and {} were too old. optim.schedule had {} "
      "steps more; train.max_steps gives a run all its steps",
      done_, info_.total_steps, config_.train.epochs, rejected(Rejection::kFiltered),
      rejected(Rejection::kFailed), rejected(Rejection::kStale), info_.total_steps - done_);
}

std::span<const Group> Steps::groups_of_step() const {
  const auto [first, last] = experience_->groups_of(part());
  return std::span(batch_.groups)
      .subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(last - first));
}

void Steps::find_anchor() {
  const bool records = config_.rl.router_replay == config::RouterReplay::kR2;
  std::vector<at::Tensor> experts;
  experience_->set_anchor(scores(setup_.placed, /*with_adapters=*/true,
                                 records ? &experts : nullptr, experience_->experts()));
  if (records) experience_->set_experts(std::move(experts));
}

std::vector<train::RowScore> Steps::scores(const assembly::ModelOnRanks& model, bool with_adapters,
                                           std::vector<at::Tensor>* experts,
                                           std::span<const at::Tensor> given) const {
  train::Scorer scorer(model, with_adapters);
  const std::int64_t ranks = setup_.placed.context.mesh.data_size(),
                     most = config_.train.micro_batch_tokens * ranks;
  const std::span rows(experience_->tokens());
  const std::vector<objective::Supports> all = experience_->supports();
  const std::span supports(all);
  std::vector<train::RowScore> scores;
  for (std::size_t first = 0, last = 0; first < rows.size(); first = last) {
    std::int64_t tokens = 0;
    for (; last < rows.size() && (last == first || tokens + std::ssize(rows[last]) <= most); ++last)
      tokens += std::ssize(rows[last]);
    const auto part = rows.subspan(first, last - first);
    std::vector<at::Tensor> chosen;
    for (train::RowScore& score :
         scorer.score(part, {.temperature = config_.rollout.temperature},
                      experts != nullptr ? &chosen : nullptr,
                      given.empty() ? given : given.subspan(first, last - first),
                      supports.empty() ? supports : supports.subspan(first, last - first)))
      scores.push_back(std::move(score));
    if (experts == nullptr) continue;
    std::vector<std::int64_t> of_ranks(static_cast<std::size_t>(ranks));
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      for (std::size_t i = scorer.first_row(part.size(), rank);
           i < scorer.first_row(part.size(), rank + 1); ++i)
        of_ranks[static_cast<std::size_t>(rank)] += std::ssize(part[i]);
    }
    rollout::OwnExperts own = rollout::OwnExperts::of(model.model->config(), chosen);
    own.places = scorer.places();
    const at::Tensor table = rollout::expert_table(model, own, of_ranks).to(at::kShort);
    std::int64_t begin = 0;
    for (const std::vector<std::int32_t>& row : part) {
      experts->push_back(table.narrow(0, begin, std::ssize(row)));
      begin += std::ssize(row);
    }
  }
  return scores;
}

/// Records the events up to the batch; they reach the disk with the step that consumes it.
void Steps::record(std::span<const Fate> fates) {
  if (!ledger_) return;
  for (const Fate& fate : fates) {
    switch (fate.kind) {
      case Fate::Kind::kDispatched:
        if (const std::int64_t epoch = fate.dispatch.cursor / prompts_.per_epoch();
            epoch > ledger_->state().epoch)
          ledger_->epoch(epoch);
        ledger_->dispatched(fate.dispatch);
        break;
      case Fate::Kind::kCompleted:
        ledger_->completed(fate.dispatch.cursor);
        break;
      case Fate::Kind::kRejected:
        ledger_->rejected(fate.dispatch.cursor, fate.reason, fate.tokens);
        break;
    }
  }
}

std::int64_t Steps::groups_taken() const {
  return begun_.groups + (done_ - begun_.steps) / config_.rl.epochs * config_.rl.groups_per_step;
}

nlohmann::json Steps::cursor() {
  const Batch standing = this->standing();
  record(standing.fates);
  saved_groups_ = at::Tensor();
  if (is_first_rank() && !standing.groups.empty())
    saved_groups_ = tensor_of(to_bytes(Batch{.groups = standing.groups}));
  nlohmann::json cursor = {{"prompts", prompts_.key()},
                           {"steps", done_},
                           {"groups", groups_taken()},
                           {"version", source_->version()},
                           {"generation", standing.state}};
  if (critic_) cursor["critic_updates"] = critic_->updates();
  if (reference_) cursor["reference_step"] = reference_->step();
  cursor["entropy_bonus"] = entropy_bonus_.state();
  if (is_first_rank()) cursor["ledger"] = ledger_ ? ledger_->commit() : 0;
  return cursor;
}

void Steps::seek(const nlohmann::json& cursor) {
  if (cursor.at("prompts").get<std::string>() != prompts_.key()) {
    throw DataError(
        "the prompts of data.train, train.seed or data.shuffle changed since the checkpoint: the "
        "run cannot go on where it stood");
  }
  done_ = begun_.steps = cursor.at("steps").get<std::int64_t>();
  begun_.groups = cursor.value("groups", done_ / config_.rl.epochs * config_.rl.groups_per_step);
  // Steps before may have had batches of another size.
  info_.total_steps = total_steps(config_, prompts_, begun_);
  if (critic_) critic_->set_total_steps(info_.total_steps);
  if (!cursor.contains("ledger")) {
    throw DataError(
        "the checkpoint was written before runs had a ledger: continue it with the version of "
        "heddle that wrote it");
  }
  if (critic_) critic_->restored(cursor.at("critic_updates").get<std::int64_t>());
  if (reference_) reference_->restored(cursor.value("reference_step", std::int64_t{0}));
  if (cursor.contains("entropy_bonus")) entropy_bonus_.restore(cursor.at("entropy_bonus"));
  if (is_first_rank()) {
    log_.keep_up_to(done_);
    ledger_ = reopened_ledger(config_, cursor);
  }
  source_->restore(cursor.at("generation"), std::exchange(loaded_groups_, {}),
                   cursor.at("version").get<std::int64_t>());
  require_published_weights();
}

/// The weights that the checkpoint brought are those that were published under its version.
void Steps::require_published_weights() {
  const std::string found = source_->weights_hash();
  if (!ledger_) return;
  const LedgerState& state = ledger_->state();
  const std::string& expected = state.weights_hash;
  if (state.version != source_->version() || expected.empty()) return;
  const auto manifest = [](const std::string& hash) { return hash.substr(0, hash.find('/')); };
  if (manifest(found) != manifest(expected)) {
    log::info(
        "{}: weights of version {} are not compared: sync.bucket_bytes or the tensors changed",
        ledger_file(config_).string(), state.version);
    return;
  }
  if (found == expected) return;
  throw_error<DataError>(
      "{}: weights {} were published as version {}, and the checkpoint has {}: it is damaged or of "
      "another run; resume from another checkpoint",
      ledger_file(config_).string(), expected, state.version, found);
}

bool Steps::trains(std::int64_t step) const {
  return has_loss_ && (!critic_ || step >= config_.rl.critic.warmup_steps);
}

std::vector<ckpt::TensorPart> Steps::state(bool with_copies) const {
  std::vector<ckpt::TensorPart> parts;
  if (critic_) parts = critic_->state(with_copies);
  if (reference_) std::ranges::move(reference_->state(with_copies), std::back_inserter(parts));
  if (saved_groups_.defined())
    parts.push_back({kSavedGroups, saved_groups_, {0}, {saved_groups_.numel()}});
  return parts;
}

void Steps::load(const ckpt::TrainingCheckpoint& checkpoint) {
  if (!checkpoint.has(kSavedGroups)) return;
  const at::Tensor bytes = checkpoint.whole(kSavedGroups);
  const auto* first = static_cast<const char*>(bytes.const_data_ptr());
  try {
    loaded_groups_ = batch_from_bytes({first, static_cast<std::size_t>(bytes.numel())}).groups;
  } catch (const CommError& error) {
    throw_error<DataError>("{}: {}", checkpoint.info().path.string(), error.what());
  }
}

void Steps::on_updated(train::StepInfo& info) {
  const bool is_async = config_.rl.mode == config::RlMode::kAsync;
  report_groups(groups_of_step(), source_->version(), config_, info);
  info.epoch = epoch();
  const bool begins_batch = updates_ == 1;
  if (begins_batch)
    report_generation(batch_, is_async, setup_.placed.context.mesh.world_size(), info);
  const objective::PolicyStatistics statistics = policy_.take_statistics();
  report_policy(statistics, experience_->dropped_tokens(part()), reference_ != nullptr, info);
  if (entropy_bonus_.is_on()) info.metrics.set(metric::kEntropyCoef, entropy_bonus_.coefficient());
  if (statistics.tokens > 0) entropy_bonus_.updated(statistics.entropy / statistics.tokens);
  if (reference_) reference_->updated(done_);
  if (critic_) critic_->report(info);
  if (expert_width_ > 0)
    info.metrics.set(metric::kRouterMissing,
                     static_cast<double>(experience_->unread_tokens(part())));
  {
    const Timed timed(times_.record);
    record_consumed();
  }
  if (ends_batch()) publish();
  if (config_.rl.is_disaggregated()) {
    report_publications(source_->take_publications(), info);
  }
  if (ledger_) report_ledger(ledger_->state(), info);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - times_.begin;
  report_times(times_, seconds.count(), begins_batch ? &batch_ : nullptr, config_, info);
}

double Steps::epoch() const {
  // Groups are in the order of their prompts, and those that were rejected stand between them.
  const Group& last = is_first_pass() ? groups_of_step().back() : batch_.groups.back();
  return static_cast<double>(last.cursor + 1) / static_cast<double>(prompts_.per_epoch());
}

void Steps::publish() {
  {
    const Timed timed(times_.sync);
    source_->updated();
  }
  const Timed timed(times_.record);
  const std::string hash = source_->weights_hash();
  if (!ledger_) return;
  ledger_->published(source_->version(), hash);
  ledger_->commit();
}

void Steps::record_consumed() {
  const std::span<const Group> groups = groups_of_step();
  const std::int64_t every = config_.rl.groups_every;
  const bool is_due = every > 0 && (done_ == 1 || done_ % every == 0);
  if (is_due && is_first_rank()) {
    const Group& group = groups.front();
    log_.write(done_, source_->version(), prompts_.row(group.row), group);
  }
  if (!ledger_ || !is_first_pass()) return;
  std::vector<std::int64_t> cursors;
  for (const Group& group : groups) cursors.push_back(group.cursor);
  ledger_->consumed(done_, cursors);
  ledger_->commit();
}

Batch Steps::standing() {
  Batch standing = source_->standing();
  // The run may end before a batch's first pass does: the rest is as if no batch had had it.
  if (!experience_ || updates_ == updates_of_batch_ || !is_first_pass()) return standing;
  const auto trained = experience_->groups_of(updates_ - 1).second;
  for (const Group& group : std::span(batch_.groups).subspan(static_cast<std::size_t>(trained))) {
    standing.state.at("finished").push_back({group.cursor, group.attempt});
    standing.groups.push_back(group);
  }
  return standing;
}

train::Subject subject(const config::RunConfig& config, train::Setup& setup) {
  auto policy = std::make_unique<objective::Policy>(setup.placed, policy_options(config));
  auto steps = std::make_unique<Steps>(config, setup, *policy);
  return {std::move(policy), std::move(steps)};
}

}  // namespace heddle::rl
