#include <algorithm>
#include <atomic>
#include <utility>

#include "base/log.h"
#include "base/quote.h"
#include "serve/tinker/inputs.h"
#include "serve/tinker/service.h"

// Sampling sessions and asample.
namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

void count(GenerationMetrics& metrics, const SampleRequest& asked, const GenerationResult& result,
           double seconds) {
  std::int64_t tokens = 0;
  for (const GeneratedSequence& sample : result.samples) {
    tokens += std::ssize(sample.ids);
    metrics.ended(sample.end == GenerationEnd::kStop ? "stop" : "length");
  }
  const std::int64_t prompt = std::ssize(asked.generation.prompt);
  metrics.answered(prompt, tokens, seconds);
  metrics.cached(prompt, result.cached_tokens);
  metrics.begun(result.queue_s, result.prompt_s);
}

}  // namespace

std::string Service::add_sampler(const std::string& tenant, const std::string& session,
                                 std::int64_t seq, const std::optional<std::string>& model_path) {
  const std::string id = sampler_id(session, seq);
  Statement(data_.database(),
            "INSERT OR IGNORE INTO sampler(id, session, tenant, created, model_path) VALUES (?, ?, "
            "?, ?, ?)")
      .bind(id)
      .bind(session)
      .bind(tenant)
      .bind(now_s())
      .bind(model_path)
      .run();
  Statement row(data_.database(), "SELECT model_path FROM sampler WHERE id = ?");
  row.bind(id).step();
  if (row.text(0) != model_path.value_or(""))
    throw_http(409, "sampling_session_seq_id {} was used with other weights", seq);
  return id;
}

void Service::require_base(const Fields& fields, bool is_needed) const {
  const std::string& served = model_.facts().name;
  const std::string base =
      is_needed ? fields.text("base_model") : fields.text("base_model", served);
  if (base != served)
    throw_http(400, "base_model {} is not served here: expected {}", text::shown(base, 100),
               served);
}

void Service::create_sampling_session(const Request& request, const Responder& responder) {
  const Fields fields(request.body, known::kCreateSamplingSession);
  const std::string session = fields.text("session_id");
  require_session(request, session);
  const std::int64_t seq = fields.integer("sampling_session_seq_id");
  const auto path = fields.maybe_text("model_path");
  require_base(fields, !path);
  if (path) checkpoints_.find(*path, request.caller.tenant);
  const std::string id = sampler_id(session, seq);
  Statement row(data_.database(), "SELECT model_path FROM sampler WHERE id = ?");
  if (!row.bind(id).step()) {
    add_sampler(request.caller.tenant, session, seq, path);
    if (path) audit_.note(request.caller, "checkpoint_read", *path);
  } else if (row.text(0) != path.value_or("")) {
    throw_http(409, "sampling_session_seq_id {} was used with other weights", seq);
  }
  responder.answer(200, dump({{"type", "create_sampling_session"}, {"sampling_session_id", id}}));
}

void Service::join_sampling_session(const Request& request, const Responder& responder) {
  const std::string id =
      Fields(request.body, known::kJoinSamplingSession).text("sampling_session_id");
  Statement row(data_.database(),
                "UPDATE sampler SET clones = clones + 1 WHERE id = ? AND tenant = ? RETURNING "
                "clones");
  if (!row.bind(id).bind(request.caller.tenant).step())
    throw_http(404, "sampling session {} is not known", text::shown(id, 100));
  const std::int64_t clone = row.integer(0);
  while (row.step()) {
  }
  responder.answer(200, dump({{"type", "join_sampling_session"}, {"client_counter", clone}}));
}

void Service::get_sampler(const Request& request, const Responder& responder) {
  check_query(request, known::kOne);
  const std::string id = request.parameters.at("id");
  Statement row(data_.database(), "SELECT model_path FROM sampler WHERE id = ? AND tenant = ?");
  if (!row.bind(id).bind(request.caller.tenant).step())
    throw_http(404, "sampler {} is not known", text::shown(id, 100));
  json answer{{"sampler_id", id}, {"base_model", model_.facts().name}};
  if (!row.is_null(0) && !row.text(0).starts_with(kInMemory)) answer["model_path"] = row.text(0);
  responder.answer(200, dump(answer));
}

void Service::find_weights(const std::string& path, const Caller& caller, WantsWeights wants) {
  server_.post([this, path, caller, wants = std::move(wants)]() mutable {
    try {
      const Checkpoint checkpoint = checkpoints_.find(path, caller.tenant);
      if (!weights_.of_checkpoint(checkpoint.folder.string()))
        audit_.note(caller, "checkpoint_read", path);
      with_weights(checkpoint, std::move(wants));
    } catch (const HttpError& error) {
      wants.failed(error.status(), error.what());
    }
  });
}

void Service::with_weights(const Checkpoint& checkpoint, WantsWeights wants) {
  const std::string folder = checkpoint.folder.string();
  if (const auto known = weights_.of_checkpoint(folder)) return wants.ready(known);
  std::vector<WantsWeights>& waiting = loading_[folder];
  waiting.push_back(std::move(wants));
  if (waiting.size() > 1) return;
  model_.run([this, checkpoint, version = next_version_++](Backend& backend) {
    auto weights = std::make_shared<SamplerWeights>();
    weights->name = checkpoint.path;
    weights->version = version;
    try {
      weights->set = backend.load_snapshot(checkpoint.folder);
    } catch (const std::exception& error) {
      log::error("{} cannot be loaded: {}", checkpoint.path, error.what());
      weights = nullptr;
    }
    server_.post([this, checkpoint, weights] { weights_came(checkpoint, weights); });
  });
}

void Service::weights_came(const Checkpoint& checkpoint,
                           const std::shared_ptr<const SamplerWeights>& weights) {
  const std::string folder = checkpoint.folder.string();
  if (weights) weights_.add_checkpoint(folder, weights);
  const auto waiting = loading_.extract(folder);
  for (const WantsWeights& each : waiting.mapped())
    weights ? each.ready(weights) : each.failed(500, checkpoint.path + " cannot be loaded");
}

KeptWeights::Weights Service::unnamed_weights(const std::string& sampler, const std::string& name) {
  const std::string run = name.substr(kInMemory.size(), name.rfind('/') - kInMemory.size());
  auto weights = weights_.of_sampler(run, sampler);
  if (const auto last = replayed_.find(run);
      !weights && last != replayed_.end() && runs_.next_seq(run) <= last->second)
    throw HttpError(503,
                    fmt::format("run {} goes back to where it was before the server's restart: its "
                                "weights come again",
                                run),
                    1);
  if (!weights)
    throw_http(404,
               "the weights of sampling session {} are gone: saved without a name they stay until "
               "session or server ends, or the run has saved {} that were used since; save with a "
               "name to keep them",
               sampler, KeptWeights::kUnnamed);
  return weights;
}

QueueState Service::queue_state(bool has_begun) const {
  const std::int64_t asked = model_.generations(), most = model_.facts().max_sequences;
  if (has_begun || asked <= most) return {};
  return {
      QueueState::Kind::kPausedCapacity,
      fmt::format("{} requests for answers are under way, and the model makes {} answers at the "
                  "same time",
                  asked, most)};
}

void Service::sample(const Request& request, const Responder& responder) {
  const Fields fields(request.body, known::kSample);
  auto asked = std::make_shared<SampleRequest>(read_sample(fields, model_.facts()));
  on_loop(responder, [this, request, responder, fields, asked] {
    const std::string tenant = request.caller.tenant;
    std::string owner = tenant + "/samples";
    std::int64_t seq = -1;
    KeptWeights::Weights unnamed;
    std::optional<std::string> path = fields.maybe_text("model_path");
    const auto sampler = fields.maybe_text("sampling_session_id");
    require_base(fields, !sampler && !path);
    if (sampler) {
      if (path) fields.refuse("model_path", "nothing beside sampling_session_id");
      Statement row(data_.database(), "SELECT model_path FROM sampler WHERE id = ? AND tenant = ?");
      if (!row.bind(*sampler).bind(tenant).step())
        throw_http(404, "sampling session {} is not known", text::shown(*sampler, 100));
      owner = *sampler;
      seq = fields.integer("seq_id");
      if (!row.is_null(0)) path = row.text(0);
      if (path && path->starts_with(kInMemory)) unnamed = unnamed_weights(*sampler, *path);
    }
    std::optional<Checkpoint> checkpoint;
    if (path && !unnamed) checkpoint = checkpoints_.find(*path, tenant);
    Promises::Submission submission{tenant, owner, seq, "asample", sha256_hex(request.body)};
    submission.is_durable = false;
    const auto places = std::make_shared<SamplesInFlight::Places>();
    const auto promise = promises_.make(submission, [&](const std::string& id) {
      *places = options_.samples->take(tenant, asked->generation.samples);
      json ids = json::array();
      for (std::int64_t i = 0; i < asked->generation.samples; ++i)
        ids.push_back(fmt::format("{}-{}", id, i));
      return dump({{"request_id", id}, {"sample_sequence_ids", ids}});
    });
    responder.answer(200, promise.answer);
    if (!promise.is_new) return;
    if (request.meter)
      request.meter->add_tokens(Meter::Tokens::kRead, std::ssize(asked->generation.prompt));
    const auto is_over = std::make_shared<bool>(false);
    // A cancellation may meet the end that is on its way: the first of them counts.
    const auto finish = [this, places, is_over, id = promise.id,
                         meter = request.meter](const Outcome& outcome) {
      if (std::exchange(*is_over, true)) return;
      if (meter) meter->finish();
      places->reset();
      promises_.finish(id, outcome);
    };
    const auto cancelled = Outcome::failure("cancelled by the client", "user");
    // Until its weights are there nothing runs that were to be stopped.
    promises_.on_cancel(promise.id, [finish, cancelled] { finish(cancelled); });
    const auto begun = std::make_shared<std::atomic<bool>>(false);
    promises_.on_wait(promise.id, [this, begun] { return queue_state(*begun); });
    const auto start = [this, asked, finish, is_over, begun, cancelled, meter = request.meter,
                        id = promise.id](std::shared_ptr<const SamplerWeights> weights) {
      if (*is_over) return;
      Generation generation = asked->generation;
      generation.weights = std::move(weights);
      const GenerationId own = model_.generate(
          std::move(generation),
          {[begun](const GeneratedToken&) { *begun = true; },
           [this, asked, finish, meter, came = now_s()](GenerationResult&& result) {
             if (options_.metrics) count(*options_.metrics, *asked, result, now_s() - came);
             for (const GeneratedSequence& sample : result.samples)
               if (meter) meter->add_tokens(Meter::Tokens::kGenerated, std::ssize(sample.ids));
             auto outcome =
                 Outcome::proto(Outcome::Form::kSample, encode(response_of(*asked, result)));
             server_.post([finish, outcome = std::move(outcome)] { finish(outcome); });
           },
           [this, finish](const std::string& message, bool is_users) {
             server_.post([finish, message, is_users] {
               finish(Outcome::failure(message, is_users ? "user" : "server"));
             });
           }});
      promises_.on_cancel(id, [this, own, finish, cancelled] {
        model_.cancel(own);
        finish(cancelled);
      });
    };
    if (checkpoint) {
      with_weights(*checkpoint, {start, [finish](int, const std::string& message) {
                                   finish(Outcome::failure(message, "server"));
                                 }});
    } else {
      start(unnamed);
    }
  });
}

}  // namespace heddle::serve::tinker
