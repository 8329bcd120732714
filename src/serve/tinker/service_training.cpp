#include <utility>

#include "base/quote.h"
#include "base/random_hex.h"
#include "serve/tinker/inputs.h"
#include "serve/tinker/service.h"

// Training runs: made, trained, asked about.
namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

/// A JSON body's seq_id: absent or 0 means that the client does not number.
std::int64_t seq_of(const Fields& fields) {
  const std::int64_t seq = fields.integer("seq_id", 0);
  return seq > 0 ? seq : -1;
}

std::string run_id(const std::string& session, std::int64_t number) {
  return fmt::format("{}:train:{}", session, number);
}

constexpr int kRunRetry_s = 5;  ///< Until a run may have ended.

void require_adamw(const Fields& fields) {
  if (fields.find("optimizer_config") == nullptr) return;
  const std::string type =
      fields.object("optimizer_config", known::kOptimizerConfig).text("type", "adamw");
  if (type != "adamw")
    throw_http(400, "optimizer {} is not built: expected adamw", text::shown(type, 40));
}

}  // namespace

void Service::open_run(const Request& request, const Responder& responder, const Fields& fields,
                       const tenants::SetOptions& options, const std::string& path,
                       const std::function<tenants::SetId(Backend&)>& make) {
  require_adamw(fields);
  const std::string session = fields.text("session_id");
  require_session(request, session);
  const std::int64_t number = fields.integer("model_seq_id");
  if (number < 0) fields.refuse("model_seq_id", "a number from 0 on");
  const std::string run = run_id(session, number);
  const std::string tenant = request.caller.tenant;
  const std::int64_t most = request.caller.limits.max_runs;
  if (is_copy(run))
    throw_http(409, "model_seq_id {} was used for a copy of weights, which is not trained", number);
  // Promise and run are entered together: a promise without its run would never end.
  Transaction entered(data_.database());
  const auto promise = promises_.make(
      {tenant, session + "/runs", number, path.empty() ? "create_model" : "load_weights",
       sha256_hex(request.body), true, kept_body(request)},
      [&](const std::string& id) {
        if (most > 0 && runs_.count(tenant) >= 2 * most)
          throw HttpError(
              429,
              fmt::format("{} training runs of this key's tenant are in memory, which is the "
                          "limit, and as many wait: finish a session to free its runs",
                          most),
              kRunRetry_s);
        return dump({{"request_id", id}, {"model_id", run}});
      });
  const auto enter = [&] {
    std::optional<std::string> metadata;
    if (const json* value = fields.find("user_metadata")) metadata = dump(*value);
    Statement(
        data_.database(),
        "INSERT OR REPLACE INTO run(id, session, tenant, created, last_request, options, metadata, "
        "is_live) VALUES (?, ?, ?, ?, ?, ?, ?, 1)")
        .bind(run)
        .bind(session)
        .bind(tenant)
        .bind(now_s())
        .bind(now_s())
        .bind(as_json(options).dump())
        .bind(metadata)
        .run();
    if (promise.is_new) {
      audit_.note(request.caller, "run_create", run);
      if (!path.empty()) audit_.note(request.caller, "checkpoint_read", path);
    }
    entered.commit();
  };
  if (promise.is_new || request.is_replay) {
    try {
      enter();
    } catch (...) {
      if (promise.is_new) promises_.forget(promise.id);
      throw;
    }
    Operation operation;
    operation.promise = promise.id;
    operation.kind = path.empty() ? "create_model" : "load_weights";
    operation.make = make;
    operation.most_runs = most;
    promises_.on_wait(promise.id, [this, run] { return runs_.queue_state(run); });
    operation.then = [run, path](Outcome& outcome) {
      if (outcome.is_failed) return;
      json result{{"type", path.empty() ? "create_model" : "load_weights"}, {"model_id", run}};
      if (!path.empty()) result["path"] = path;
      outcome = Outcome::json(dump(result));
    };
    runs_.open(run, tenant, std::move(operation), 1);
  }
  responder.answer(200, promise.answer);
}

void Service::create_model(const Request& request, const Responder& responder) {
  const Fields fields(request.body, known::kCreateModel);
  require_base(fields, true);
  const Fields lora = fields.object("lora_config", known::kLoraConfig);
  tenants::SetOptions options;
  options.rank = lora.integer("rank");
  if (options.rank < 1 || options.rank > options_.max_rank)
    throw_http(400, "lora_config.rank is {}: expected 1 to {}", options.rank, options_.max_rank);
  options.shared_expert_factors = options_.shared_expert_factors;
  const auto seed = lora.maybe_integer("seed");
  if (request.is_replay) {
    const tenants::SetOptions before =
        require_run(request, run_id(fields.text("session_id"), fields.integer("model_seq_id")));
    options.seed = before.seed;
    options.shared_expert_factors = before.shared_expert_factors;
  } else if (seed) {
    options.seed = static_cast<std::uint64_t>(*seed);
  } else {
    options.seed = std::stoull(random_hex(6), nullptr, 16);  // JSON keeps 53 bits everywhere
  }
  options.attn = lora.boolean("train_attn", true);
  options.mlp = lora.boolean("train_mlp", true);
  options.unembed = lora.boolean("train_unembed", true);
  open_run(request, responder, fields, options, "",
           [options](Backend& backend) { return backend.create(options); });
}

tenants::SetOptions Service::require_run(const Request& request, const std::string& run) {
  Statement row(data_.database(), "SELECT options FROM run WHERE id = ? AND tenant = ?");
  if (!row.bind(run).bind(request.caller.tenant).step())
    throw_http(404, "training run {} is not known", text::shown(run, 100));
  return set_options_of(json::parse(row.text(0)));
}

void Service::get_info(const Request& request, const Responder& responder) {
  const std::string run = Fields(request.body, known::kRun).text("model_id");
  const tenants::SetOptions options = require_run(request, run);
  const ModelFacts& facts = model_.facts();
  responder.answer(200, dump({{"type", "get_info"},
                              {"model_id", run},
                              {"model_data",
                               {{"arch", facts.architecture},
                                {"model_name", facts.name},
                                {"tokenizer_id", facts.name}}},
                              {"model_name", facts.name},
                              {"is_lora", true},
                              {"lora_rank", options.rank},
                              {"optimizer_config", {{"type", "adamw"}}}}));
}

void Service::add_work(const Request& request, const Responder& responder, tenants::Work work,
                       const std::string& run, std::int64_t seq, std::size_t bytes) {
  require_run(request, run);
  Operation operation;
  operation.seq = seq > 0 ? seq : -1;
  operation.kind = work.forward_only ? "forward" : "forward_backward";
  operation.bytes = bytes;
  for (const tenants::Datum& datum : work.data)
    operation.tokens += static_cast<std::int64_t>(datum.tokens.size());
  operation.work = std::move(work);
  submit(request, responder, run, std::move(operation));
}

void Service::forward_backward(const Request& request, const Responder& responder) {
  const std::string_view type = request.header("content-type");
  ForwardBackwardRequest decoded;
  if (type.starts_with("application/x-protobuf")) {
    decoded = decode_forward_backward(request.body);
  } else if (type.starts_with("application/json")) {
    decoded =
        read_forward_backward(request.body, known::kForwardBackward, "forward_backward_input");
  } else {
    throw_http(415, "Content-Type {}: expected application/x-protobuf or application/json",
               text::shown(type, 60));
  }
  auto work = std::make_shared<tenants::Work>(work_of(decoded, model_.facts()));
  on_loop(responder,
          [this, request, responder, work, run = decoded.model_id, seq = decoded.seq_id] {
            add_work(request, responder, std::move(*work), run, seq, request.body.size());
          });
}

void Service::forward(const Request& request, const Responder& responder) {
  ForwardBackwardRequest decoded =
      read_forward_backward(request.body, known::kForward, "forward_input");
  decoded.forward_only = true;
  auto work = std::make_shared<tenants::Work>(work_of(decoded, model_.facts()));
  on_loop(responder,
          [this, request, responder, work, run = decoded.model_id, seq = decoded.seq_id] {
            add_work(request, responder, std::move(*work), run, seq, request.body.size());
          });
}

void Service::optim_step(const Request& request, const Responder& responder) {
  const Fields fields(request.body, known::kOptimStep);
  const std::string run = fields.text("model_id");
  require_run(request, run);
  Operation operation;
  operation.seq = seq_of(fields);
  operation.kind = "optim_step";
  operation.bytes = request.body.size();
  operation.update = read_adam(fields);
  if (options_.durable_steps > 0 && operation.seq >= 0)
    keep_state(run, request.caller.tenant, operation);
  submit(request, responder, run, std::move(operation));
}

void Service::unload_model(const Request& request, const Responder& responder) {
  const std::string run = Fields(request.body, known::kRun).text("model_id");
  require_run(request, run);
  const auto promise = promises_.make(
      {request.caller.tenant, run + "/unload", 0, "unload_model", sha256_hex(request.body)},
      [&](const std::string& id) {
        return dump({{"request_id", id}, {"model_id", run}});
      });
  audit_.note(request.caller, "run_unload", run);
  runs_.close(run, "the run was unloaded by its client");
  forget_run(run, request.caller.tenant);
  promises_.finish(promise.id, Outcome::json(dump({{"type", "unload_model"}, {"model_id", run}})));
  responder.answer(200, promise.answer);
}

}  // namespace heddle::serve::tinker
