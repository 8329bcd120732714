#include "base/quote.h"
#include "serve/store/keys.h"
#include "serve/tinker/service.h"

// Checkpoints: saved, loaded, listed, shared.
namespace heddle::serve::tinker {
namespace {

using nlohmann::json;

constexpr const char* kToken = "weights_access_token";
constexpr const char* kTokenHeader = "x-tinker-weights-access-token";
/// A field of requests that are kept for a replay: whose key each came with.
constexpr const char* kReader = "heddle_reader";
constexpr int kDiskRetry_s = 5;  ///< Until a client may have deleted something.

json cursor_json(const Page& page, std::int64_t total) {
  return {{"offset", page.offset}, {"limit", page.limit}, {"total_count", total}};
}

/// Clients download external weights alone: of the others the SDK makes such, by a run of its own.
tenants::SavedFor purpose_of(Checkpoint::Kind kind) {
  switch (kind) {
    case Checkpoint::Kind::kTraining:
      return tenants::SavedFor::kTraining;
    case Checkpoint::Kind::kSampler:
      return tenants::SavedFor::kSampling;
    default:
      return tenants::SavedFor::kPeft;
  }
}

json list_of(const std::vector<Checkpoint>& checkpoints) {
  json list = json::array();
  for (const Checkpoint& each : checkpoints) list.push_back(each.json());
  return list;
}

}  // namespace

void Service::require_disk(const Caller& caller) {
  const std::int64_t most = caller.limits.max_disk_bytes, bytes = checkpoints_.bytes(caller.tenant);
  if (most > 0 && bytes >= most)
    throw HttpError(429,
                    fmt::format("saved weights of this key's tenant have {} bytes, and {} are "
                                "allowed: delete checkpoints, or let them expire",
                                bytes, most),
                    kDiskRetry_s);
}

void Service::save(const Request& request, const Responder& responder, const Fields& fields,
                   Checkpoint::Kind kind, const std::string& name,
                   const std::function<std::string(const Checkpoint&)>& answer) {
  const std::string run = fields.text("model_id");
  const tenants::SetOptions options = require_run(request, run);
  const std::int64_t seq = fields.integer("seq_id", 0);
  const bool overwrite = fields.boolean("overwrite", false);
  const std::string tenant = request.caller.tenant;
  json metadata;
  if (const json* value = fields.find("user_metadata")) metadata = *value;
  const auto expires = expiry_of(fields);
  // The name is looked up when its turn comes: an earlier save of the queue may take it.
  auto planned = std::make_shared<Checkpoint>();
  auto replaced = std::make_shared<std::filesystem::path>();
  Operation operation;
  operation.seq = seq > 0 ? seq : -1;
  operation.kind = fmt::format("save_{}", segment_of(kind));
  operation.bytes = request.body.size();
  operation.check = [this, caller = request.caller] { require_disk(caller); };
  operation.before = [this, planned, tenant, run, kind, name, overwrite] {
    *planned = checkpoints_.plan(tenant, run, kind, name, overwrite);
  };
  operation.act = [planned, kind](Backend& backend, tenants::SetId set) {
    if (!backend.is_finite(set))
      throw UserError(
          "the run's weights hold NaN or infinity, and nothing is saved: load an earlier "
          "checkpoint into a new run, and take smaller steps");
    backend.save(set, planned->folder, purpose_of(kind));
    planned->bytes = folder_bytes(planned->folder);
    return Outcome();
  };
  operation.then = [this, planned, replaced, options, metadata, expires, answer,
                    caller = request.caller](Outcome& outcome) {
    if (outcome.is_failed) return;
    planned->options = options;
    planned->metadata = metadata;
    planned->expires = expires;
    *replaced = checkpoints_.add(*planned);
    audit_.note(caller, "checkpoint_save", planned->path);
    try {
      outcome = Outcome::json(answer(*planned));
    } catch (const HttpError& error) {
      outcome = Outcome::failure(error.what(), "user");
    }
  };
  // Not before: a crash would leave an entry without its folder.
  operation.after = [replaced] {
    if (!replaced->empty()) remove_folder(*replaced);
  };
  submit(request, responder, run, std::move(operation));
}

void Service::save_weights(const Request& request, const Responder& responder) {
  const Fields fields(request.body, known::kSaveWeights);
  const std::string name = fields.text("path", fmt::format("step-{}", fields.integer("seq_id", 0)));
  save(request, responder, fields, Checkpoint::Kind::kTraining, name, [](const Checkpoint& saved) {
    return dump({{"type", "save_weights"}, {"path", saved.path}});
  });
}

void Service::save_weights_for_sampler(const Request& request, const Responder& responder) {
  const Fields fields(request.body, known::kSaveWeightsForSampler);
  if (fields.text("kind", "snapshot") != "snapshot")
    throw HttpError(400, "kind inflight is not built: expected snapshot");
  if (const auto name = fields.maybe_text("path")) {
    return save(request, responder, fields, Checkpoint::Kind::kSampler, *name,
                [](const Checkpoint& saved) {
                  return dump({{"type", "save_weights_for_sampler"}, {"path", saved.path}});
                });
  }
  for (const char* name : {"ttl_seconds", "overwrite", "user_metadata"})
    if (fields.find(name) != nullptr)
      fields.refuse(name, "nothing: weights without a name are no checkpoint; give path");
  save_unnamed(request, responder, fields, fields.integer("sampling_session_seq_id"));
}

void Service::save_unnamed(const Request& request, const Responder& responder, const Fields& fields,
                           std::int64_t number) {
  const std::string run = fields.text("model_id");
  require_run(request, run);
  const std::int64_t seq = fields.integer("seq_id", 0);
  auto weights = std::make_shared<SamplerWeights>();
  weights->name = unnamed_name(run, number);
  weights->version = next_version_++;
  Operation operation;
  operation.seq = seq > 0 ? seq : -1;
  operation.kind = "save_sampler_weights";
  operation.bytes = request.body.size();
  operation.is_short = true;
  operation.act = [weights](Backend& backend, tenants::SetId set) {
    weights->set = backend.snapshot(set);
    return Outcome();
  };
  operation.then = [this, weights, run, number, tenant = request.caller.tenant](Outcome& outcome) {
    if (outcome.is_failed) return;
    try {
      const std::string session = session_of(run);
      const std::string id = add_sampler(tenant, session, number, weights->name);
      if (beats_.contains(session)) weights_.add_unnamed(run, id, weights);
      // A path besides is an error to SDKs before 0.24.
      outcome =
          Outcome::json(dump({{"type", "save_weights_for_sampler"}, {"sampling_session_id", id}}));
    } catch (const HttpError& error) {
      outcome = Outcome::failure(error.what(), "user");
    }
  };
  submit(request, responder, run, std::move(operation));
}

void Service::save_weights_external(const Request& request, const Responder& responder) {
  const Fields fields(request.body, known::kSaveWeightsExternal);
  const json* recipients = fields.find("age_encryption_recipients");
  if (recipients != nullptr && !recipients->empty())
    throw HttpError(400, "age_encryption_recipients is not built: save without them");
  save(
      request, responder, fields, Checkpoint::Kind::kExternal, fields.text("path"),
      [](const Checkpoint& saved) {
        return dump(
            {{"type", "save_weights_external"}, {"path", saved.path}, {"size_bytes", saved.bytes}});
      });
}

std::string Service::reader_of(const Request& request, const Fields& fields,
                               const std::string& path) const {
  if (request.is_replay) return fields.maybe_text(kReader).value_or(request.caller.tenant);
  const std::string token =
      fields.maybe_text(kToken).value_or(std::string(request.header(kTokenHeader)));
  if (token.empty()) return request.caller.tenant;
  const Keys keys(data_.database());
  if (const auto grantor = keys.grantor(token, path)) return *grantor;
  const auto owner = keys.owner(token);
  if (!owner || !(owner->may("read") || owner->may("train") || owner->may("admin")))
    throw HttpError(
        403,
        "weights_access_token: expected a key of this server with the scope read, train "
        "or admin, of the tenant that the weights belong to, or a grant of these weights");
  return owner->tenant;
}

Request Service::as_kept(Request request, const std::string& reader) {
  if (request.is_replay) return request;
  json body = json::parse(request.body);
  body.erase(kToken);
  body.erase(kReader);
  if (reader != request.caller.tenant) body[kReader] = reader;
  request.body = body.dump();
  return request;
}

namespace {

/// A run keeps the rank and modules that clients were told of it.
void require_same_form(const tenants::SetOptions& run, const Checkpoint& checkpoint) {
  const tenants::SetOptions& saved = checkpoint.options;
  if (run.rank == saved.rank && run.attn == saved.attn && run.mlp == saved.mlp &&
      run.unembed == saved.unembed)
    return;
  const auto shown = [](const tenants::SetOptions& options) {
    return fmt::format("rank {}, train_attn {}, train_mlp {}, train_unembed {}", options.rank,
                       options.attn, options.mlp, options.unembed);
  };
  throw_http(400,
             "{} has {}, and the run {}: make a run as the checkpoint is, or load it with "
             "session_id",
             checkpoint.path, shown(saved), shown(run));
}

}  // namespace

void Service::load_weights(const Request& asked, const Responder& responder) {
  // A request from before a restart has kReader, and was looked at then.
  const Fields fields(asked.body, asked.is_replay ? known::kAny : known::kLoadWeights);
  const std::string path = fields.text("path");
  const std::string reader = reader_of(asked, fields, path);
  const Request request = as_kept(asked, reader);
  const Checkpoint checkpoint = checkpoints_.find(path, reader);
  if (reader != request.caller.tenant && !request.is_replay)
    audit_.note(request.caller, "checkpoint_read", checkpoint.path);
  const bool with_optimizer = fields.boolean("optimizer", false);
  if (with_optimizer && checkpoint.kind != Checkpoint::Kind::kTraining)
    throw_http(400, "{} holds no optimizer state: load a path of weights/", checkpoint.path);
  const auto make = [folder = checkpoint.folder, with_optimizer](Backend& backend) {
    return backend.load(folder, with_optimizer);
  };
  if (fields.maybe_text("session_id")) {
    for (const char* name : {"model_id", "seq_id"})
      if (fields.find(name) != nullptr)
        fields.refuse(name, "nothing beside session_id; leave that out to load into a run");
    require_base(fields, false);
    return open_run(request, responder, fields, checkpoint.options, checkpoint.path, make);
  }
  for (const char* name : {"model_seq_id", "base_model", "user_metadata", "optimizer_config"})
    if (fields.find(name) != nullptr)
      fields.refuse(name, "nothing beside model_id; give session_id to make a run");
  const std::string run = fields.text("model_id");
  require_same_form(require_run(request, run), checkpoint);
  const std::int64_t seq = fields.integer("seq_id", 0);
  if (seq > 1)
    throw HttpError(400, "weights are loaded into a run as its first request only: make a new run");
  Operation operation;
  operation.seq = seq > 0 ? seq : -1;
  operation.kind = "load_weights";
  operation.make = make;
  operation.then = [run, path](Outcome& outcome) {
    if (!outcome.is_failed)
      outcome = Outcome::json(dump({{"type", "load_weights"}, {"path", path}, {"model_id", run}}));
  };
  submit(request, responder, run, std::move(operation));
}

void Service::weights_info(const Request& request, const Responder& responder) {
  const Checkpoint found = checkpoints_.find(
      Fields(request.body, known::kWeightsInfo).text("tinker_path"), request.caller.tenant);
  responder.answer(200, dump({{"base_model", model_.facts().name},
                              {"is_lora", true},
                              {"lora_rank", found.options.rank},
                              {"train_unembed", found.options.unembed},
                              {"train_mlp", found.options.mlp},
                              {"train_attn", found.options.attn},
                              {"optimizer_config", {{"type", "adamw"}}}}));
}

json Service::run_json(const std::string& tenant, const std::string& run) {
  Statement row(data_.database(),
                "SELECT last_request, options, metadata FROM run WHERE id = ? AND tenant = ?");
  if (!row.bind(run).bind(tenant).step())
    throw_http(404, "training run {} is not known", text::shown(run, 100));
  json value{{"training_run_id", run},
             {"base_model", model_.facts().name},
             {"model_owner", tenant},
             {"is_lora", true},
             {"corrupted", false},
             {"lora_rank", set_options_of(json::parse(row.text(1))).rank},
             {"last_request_time", as_utc(row.real(0))}};
  if (!row.is_null(2)) value["user_metadata"] = json::parse(row.text(2));
  for (const Checkpoint& each : checkpoints_.of_run(run, tenant)) {
    if (each.kind == Checkpoint::Kind::kTraining) value["last_checkpoint"] = each.json();
    if (each.kind == Checkpoint::Kind::kSampler) value["last_sampler_checkpoint"] = each.json();
  }
  return value;
}

void Service::list_runs(const Request& request, const Responder& responder) {
  check_query(request, known::kList);
  const Page page = page_of(request);
  const std::string& tenant = request.caller.tenant;
  Statement count(data_.database(), "SELECT count(*) FROM run WHERE tenant = ?");
  count.bind(tenant).step();
  Statement rows(data_.database(),
                 "SELECT id FROM run WHERE tenant = ? ORDER BY created DESC LIMIT ? OFFSET ?");
  rows.bind(tenant).bind(page.limit).bind(page.offset);
  json list = json::array();
  while (rows.step()) list.push_back(run_json(tenant, rows.text(0)));
  responder.answer(
      200, dump({{"training_runs", list}, {"cursor", cursor_json(page, count.integer(0))}}));
}

void Service::get_run(const Request& request, const Responder& responder) {
  check_query(request, known::kOne);
  responder.answer(200, dump(run_json(request.caller.tenant, request.parameters.at("run"))));
}

void Service::list_run_checkpoints(const Request& request, const Responder& responder) {
  check_query(request, known::kOne);
  const std::string& run = request.parameters.at("run");
  require_run(request, run);
  responder.answer(
      200, dump({{"checkpoints", list_of(checkpoints_.of_run(run, request.caller.tenant))}}));
}

void Service::list_checkpoints(const Request& request, const Responder& responder) {
  check_query(request, known::kList);
  const Page page = page_of(request);
  const std::string& tenant = request.caller.tenant;
  responder.answer(
      200, dump({{"checkpoints", list_of(checkpoints_.of_tenant(tenant, page.limit, page.offset))},
                 {"cursor", cursor_json(page, checkpoints_.count(tenant))}}));
}

Checkpoint Service::own_checkpoint(const Request& request) {
  return checkpoints_.own(request.parameters.at("run"), request.parameters.at("id"),
                          request.caller.tenant);
}

void Service::delete_checkpoint(const Request& request, const Responder& responder) {
  const Checkpoint checkpoint = own_checkpoint(request);
  checkpoints_.remove(checkpoint);
  audit_.note(request.caller, "checkpoint_delete", checkpoint.path);
  responder.answer(204, "");
}

void Service::publish_checkpoint(const Request& request, const Responder& responder) {
  const Checkpoint checkpoint = own_checkpoint(request);
  checkpoints_.set_public(checkpoint, true);
  audit_.note(request.caller, "checkpoint_publish", checkpoint.path);
  responder.answer(204, "");
}

void Service::unpublish_checkpoint(const Request& request, const Responder& responder) {
  const Checkpoint checkpoint = own_checkpoint(request);
  checkpoints_.set_public(checkpoint, false);
  audit_.note(request.caller, "checkpoint_unpublish", checkpoint.path);
  responder.answer(204, "");
}

void Service::set_ttl(const Request& request, const Responder& responder) {
  const Checkpoint checkpoint = own_checkpoint(request);
  const Fields fields(request.body, known::kSetTtl);
  if (!fields.contains("ttl_seconds"))
    fields.refuse("ttl_seconds", "3600 seconds to 10 years, or null for no end");
  checkpoints_.set_expiry(checkpoint, expiry_of(fields));
  audit_.note(request.caller, "checkpoint_ttl_set", checkpoint.path);
  responder.answer(204, "");
}

}  // namespace heddle::serve::tinker
