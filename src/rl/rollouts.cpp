#include "rl/rollouts.h"

#include <chrono>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "assembly/from_config.h"
#include "assembly/model_units.h"
#include "base/errors.h"
#include "base/log.h"
#include "device/device.h"
#include "rl/batch_bytes.h"
#include "rl/generation.h"
#include "rl/link.h"
#include "rl/membership.h"
#include "rl/published.h"
#include "rl/run_facts.h"
#include "rl/timed.h"
#include "sync/verification.h"
#include "sync/weight_sync.h"
#include "train/vocabulary.h"

namespace heddle::rl {
namespace {

/// Pause of a rank that has as many groups as it may.
constexpr std::chrono::milliseconds kIdle{1};
/// Passes from one look for a message to the next: a look is a question to the job's store, 0.1 ms,
/// and a pass of a small model takes 1 to 3 ms. All ranks count the same passes.
constexpr std::int64_t kPassesPerLook = 4;

assembly::ModelOnRanks place(const config::RunConfig& config, const data::Tokenizer& tokenizer,
                             const std::shared_ptr<comm::World>& world) {
  const auto source =
      std::make_shared<const ckpt::ModelDirectory>(ckpt::ModelDirectory::open(config.model.path));
  assembly::ModelRecipe recipe =
      assembly::recipe_of_run(config, assembly::read_config(*source), source);
  recipe.config.vocab_size = train::vocabulary_rows(config, tokenizer, recipe.config.vocab_size);
  recipe.purpose = assembly::Purpose::kGenerate;
  recipe.auxiliary_loss = false;
  recipe.freeze.clear();
  return assembly::place(recipe, assembly::make_context(config, world));
}

/// Pinned sequences go on under their own adapters: a copy of the next ones is small.
sync::SyncOptions receiving_options(const config::RunConfig& config, c10::Device device) {
  sync::SyncOptions options = sync_options(config.sync, device);
  const bool is_pinned = config.rl.update_mode == config::UpdateMode::kPin;
  options.staged = options.staged || (is_pinned && options.device.is_cpu());
  return options;
}

/// Throws CommError if the job has failed or the trainer falls silent.
void look_at_trainer(const comm::World& job, SignsOfLife& signs, comm::Seconds silence) {
  if (const auto failure = failure_of_job(job)) throw CommError(*failure);
  if (signs.age(comm::pulse_key(assembly::kTrainers, 0)) <= silence) return;
  throw_error<CommError>(
      "rl: rank 0, the first of the trainers, gave no sign of life for {:.3g} s (sync.timeout_s)",
      silence.count());
}

/// Answers the trainer's messages, and generates in between.
class Service {
 public:
  Service(const config::RunConfig& config, const comm::World& job, const Membership& members,
          assembly::ModelOnRanks& model, const RolloutData& data, const std::atomic<bool>* stop)
      : config_(config),
        stop_(stop),
        model_(model),
        everybody_(model_.context.mesh.world_group()),
        generation_(config, model_, data.tokenizer, *data.prompts),
        subscriber_(sync::received_parts(published(config, model_)),
                    receiving_options(config, model_.context.device)) {
    if (members.generation > 0 || config.rl.has_two_jobs()) {
      // The trainer invites once all have placed their part of the model.
      everybody_.barrier();
      if (everybody_.rank() == 0) say_ready(*model_.context.mesh.world());
    }
    Channels channels = meet(config.sync, job, members, facts_of_run(config, *data.prompts));
    subscriber_.connect(std::move(channels.weights), members.generation + 1);
    const comm::Seconds silence(config.sync.timeout_s);
    link_ = std::make_unique<Link>(
        std::move(channels.messages), job, members.generation,
        [&job, silence, signs = SignsOfLife(job.job_store().reconnected())]() mutable {
          look_at_trainer(job, signs, silence);
        });
  }

  /// False if it was asked to stop.
  bool run() {
    try {
      return serve();
    } catch (const CommError&) {
      subscriber_.disconnect();
      throw;
    }
  }

 private:
  bool serve() {
    for (std::int64_t passes = 0; true; ++passes) {
      // Rank 0 sees a message, and all take it between the same passes. Weights that have come to
      // one of them are about to come to all.
      const bool is_first = everybody_.rank() == 0, is_asked = is_first && is_stopped();
      if (passes % kPassesPerLook == 0 &&
          everybody_.any(subscriber_.has_come() ||
                         (is_first && (is_asked || link_->is_announced())))) {
        if (stop_ != nullptr && everybody_.any(is_asked)) {
          // Said before the groups are gone, whose end would tell the trainer less.
          model_.context.mesh.world()->fail("its job was asked to stop");
          return false;
        }
        passes = -1;
        if (awaited_) {
          // A message that is there too was sent after the weights, and is answered by them.
          take_awaited(*std::exchange(awaited_, std::nullopt));
        } else if (!answer(unpacked(link_->receive()))) {
          return true;
        }
        continue;
      }
      if (is_wanted_) {
        if (std::optional<Batch> batch = generation_.try_next()) {
          batch->counts.paused_s = std::exchange(paused_s_, 0);
          link_->send(to_bytes(*batch));
          is_wanted_ = false;
        }
      }
      // Nothing is drawn by weights that the trainer has not given.
      if (subscriber_.version() >= 0 && advance()) continue;
      std::this_thread::sleep_for(kIdle);
      passes = -1;
    }
  }

  bool advance() { return awaited_ ? generation_.advance_before_update() : generation_.advance(); }
  bool is_stopped() const { return stop_ != nullptr && *stop_; }

  bool answer(const nlohmann::json& message) {
    const auto what = message.at("do").get<std::string>();
    if (what == "end") return false;
    if (what == "next") {
      is_wanted_ = true;
    } else if (what == "restore") {
      generation_.restore(message.at("state"),
                          batch_from_bytes(from_binary(message.at("finished"))).groups,
                          message.at("version").get<std::int64_t>());
      link_->send("ready");
    } else if (what == "standing") {
      link_->send(to_bytes(generation_.standing()));
    } else if (what == "verify") {
      link_->send(compared(message.at("hashes")).dump());
    } else {
      await_weights(what == "update", message.at("version").get<std::int64_t>());
    }
    return true;
  }

  /// Compares the values of all ranks with hashes of the trainer's.
  nlohmann::json compared(const nlohmann::json& hashes) const {
    std::vector<sync::TensorHash> expected;
    for (const auto& entry : hashes)
      expected.push_back({entry.at(0).get<std::string>(), entry.at(1).get<std::uint64_t>()});
    // Units that dp divides beside tp, with factors of experts, have values while they are
    // gathered.
    const parallel::Acquired all_units =
        assembly::acquire_all(model_.sharding.get(), *model_.model);
    const auto own = sync::held_hashes(published(config_, model_), model_.model->tensor_group());
    const std::vector<std::string> all =
        everybody_.all_gather_objects(sync::first_difference(expected, own));
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (!all[rank].empty())
        return {{"difference", fmt::format("rollout {}: {}", rank, all[rank])}};
    }
    return {{"difference", ""}};
  }

  /// Takes the weights that the trainer is about to send; those of a new version beside generation
  /// if they can be kept apart.
  void await_weights(bool is_new_version, std::int64_t version) {
    if (is_new_version && subscriber_.receives_beside()) {
      subscriber_.start();
      link_->send("ready");
      awaited_ = version;
      return;
    }
    if (is_new_version) generation_.prepare_update();
    const Timed timed(paused_s_);
    link_->send("ready");
    receive(version, [this] { return subscriber_.receive(); });
    use_weights(is_new_version);
  }

  /// The weights that come beside generation take the place of those before.
  void take_awaited(std::int64_t version) {
    {
      const Timed timed(paused_s_);
      receive(version, [this] { return subscriber_.await(); });
    }
    generation_.prepare_update();
    const Timed timed(paused_s_);
    subscriber_.finish();
    use_weights(/*is_new_version=*/true);
  }

  void use_weights(bool is_new_version) {
    // Replicas that own rows of each other's values exchange them.
    if (model_.sharding) model_.sharding->publish(/*with_frozen=*/true);
    if (is_new_version) {
      generation_.updated();
    } else {
      generation_.weights_changed();
    }
    device::synchronize(model_.context.device);
  }

  /// Whoever holds the group's store is its sender: when that one is frozen, the group's own error
  /// can name nobody.
  void receive(std::int64_t version, const std::function<std::int64_t()>& work) {
    std::int64_t received = -1;
    try {
      received = work();
    } catch (const CommError& error) {
      throw_error<CommError>("weights of version {} from rank 0: {}", version, error.what());
    }
    if (received != version)
      throw_error<CommError>("weights of version {} came as version {}", version, received);
  }

  const config::RunConfig& config_;
  const std::atomic<bool>* stop_;
  assembly::ModelOnRanks& model_;
  comm::Group everybody_;
  Generation generation_;
  sync::Subscriber subscriber_;
  std::unique_ptr<Link> link_;
  bool is_wanted_ = false;               ///< The trainer waits for a batch.
  std::optional<std::int64_t> awaited_;  ///< Version that comes beside generation.
  double paused_s_ = 0;                  ///< See GenerationCounts.
};

}  // namespace

RolloutData rollout_data(const config::RunConfig& config) {
  RolloutData data;
  data.tokenizer = train::load_tokenizer(config).tokenizer;
  data.prompts = std::make_unique<Prompts>(config, train::DataPart::kTrain, *data.tokenizer);
  return data;
}

bool run_rollouts(const config::RunConfig& config, const std::shared_ptr<comm::World>& job,
                  const RolloutData& data, const std::atomic<bool>* stop) {
  const config::RunConfig own = assembly::rollout_layout(config);
  Membership members = all_rollouts(*job);
  // The job's world lives on: it gives this rank's sign of life.
  std::shared_ptr<comm::World> world = job;
  while (true) {
    std::string failure;
    try {
      if (!world) world = join(*job, members);
      assembly::ModelOnRanks model = place(own, *data.tokenizer, world);
      return Service(config, *job, members, model, data, stop).run();
    } catch (const CommError& error) {
      // Another job comes again as a whole.
      if (config.rl.has_two_jobs()) throw;
      failure = error.what();
    }
    world.reset();
    const std::optional<Membership> next =
        next_generation(*job, members, failure, comm::Seconds(config.sync.timeout_s));
    if (!next) return true;
    members = *next;
  }
}

}  // namespace heddle::rl
