#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <ostream>

#include "base/errors.h"
#include "base/log.h"
#include "base/quote.h"
#include "cli/command.h"
#include "cli/names.h"
#include "cli/numbers.h"
#include "cli/stop_request.h"
#include "cli/version.h"
#include "data/rendering/renderer.h"
#include "data/tokenizer/tokenizer.h"
#include "serve/admin/admin.h"
#include "serve/metrics/registry.h"
#include "serve/model/engine_backend.h"
#include "serve/openai/adapters.h"
#include "serve/openai/api.h"
#include "serve/quotas.h"
#include "serve/settings.h"
#include "serve/store/keys.h"

namespace heddle::cli {
namespace {

constexpr const char* kDataDirectory = "heddle-server";

struct ServeOptions {
  std::string model, name, host = "127.0.0.1", data_directory = kDataDirectory;
  int port = 8000;
  std::vector<std::string> adapters;  ///< NAME=DIR
  std::vector<std::string> settings;
};

struct KeyOptions {
  std::string data_directory = kDataDirectory, tenant, scopes = "train,sample", key;
  double days = 0;                             ///< 0: for ever.
  std::map<std::string, std::int64_t> limits;  ///< By the names of serve::kLimitRows.
};

bool is_loopback(const std::string& host) {
  return host == "127.0.0.1" || host == "::1" || host == "localhost";
}

/// Who sent a request: every key has an owner, and without any key everybody is the same one.
std::function<serve::Caller(const serve::Request&)> identify_by(serve::Keys& keys,
                                                                const serve::Limits& limits) {
  return [&keys, limits](const serve::Request& request) {
    if (keys.is_empty())
      return serve::Caller{"local", "", {"train", "sample", "admin", "read"}, limits};
    std::string key(request.header("x-api-key"));
    constexpr std::string_view kBearer = "Bearer ";
    const std::string_view given = request.header("authorization");
    if (key.empty() && given.starts_with(kBearer)) key = given.substr(kBearer.size());
    if (key.empty()) throw serve::HttpError(401, "no key: send X-API-Key or Authorization: Bearer");
    const auto owner = keys.owner(key, limits);
    if (!owner) throw serve::HttpError(401, "this key is not known, or it was revoked");
    return *owner;
  };
}

/// The inference API on a server, its metrics and the adapters that the command line names.
class InferenceApi {
 public:
  /// `before_metrics`: brings what /metrics tells up to date.
  InferenceApi(serve::Server& server, serve::ModelThread& model, serve::Registry& registry,
               const serve::GenerationMetrics& metrics, const serve::DataDirectory& data,
               bool has_keys, std::function<void()> before_metrics)
      : registry_(registry), service_(make_service(model, metrics)) {
    registry_.declare_counter("heddle_http_requests_total", "Answers, by route and status.");
    server.observe_by([this](const std::string& pattern, int status, double) {
      registry_.add("heddle_http_requests_total",
                    {{"route", pattern}, {"code", std::to_string(status)}});
    });
    const auto tenants_tree = [root = data.path() / "tenants"](const serve::Caller& caller) {
      return root / caller.tenant;
    };
    serve::openai::ApiOptions options{version(), {}};
    if (has_keys) options.adapter_root = tenants_tree;
    for (serve::Route& route : serve::openai::routes(service_, options))
      server.route(std::move(route));
    server.route({"GET", "/metrics",
                  [this, before_metrics](const serve::Request&, const serve::Responder& responder) {
                    before_metrics();
                    responder.answer(200, registry_.text(), serve::Registry::kContentType);
                  },
                  serve::openai::error_body, "admin"});
  }

  /// Throws ConfigError for an entry that is not NAME=DIR, and for an adapter that cannot be
  /// loaded.
  void load(const std::vector<std::string>& adapters) {
    for (const std::string& entry : adapters) {
      const std::size_t equals = entry.find('=');
      if (equals == std::string::npos || equals == 0)
        throw_error<ConfigError>("--adapter: '{}': expected NAME=DIR", text::shown(entry));
      std::promise<std::string> loaded;
      serve::openai::load_adapter(service_, entry.substr(0, equals), entry.substr(equals + 1),
                                  [&](const std::string& error) { loaded.set_value(error); });
      if (const std::string error = loaded.get_future().get(); !error.empty())
        throw_error<ConfigError>("--adapter {}: {}", text::shown(entry), error);
    }
  }

  std::vector<std::string> adapters() const { return service_.models.adapters(); }

 private:
  static serve::openai::Service make_service(serve::ModelThread& model,
                                             const serve::GenerationMetrics& metrics) {
    const serve::ModelFacts& facts = model.facts();
    const std::shared_ptr<const data::Tokenizer> tokenizer = data::Tokenizer::load(facts.directory);
    return {model, tokenizer, data::Renderer(*tokenizer, data::RenderOptions{}),
            serve::openai::Models(facts.name, facts.max_context), metrics};
  }

  serve::Registry& registry_;
  serve::openai::Service service_;
};

int serve_model(const ServeOptions& options, const Session& session) {
  if (options.model.empty()) throw ConfigError("give a model directory: heddle serve MODEL_DIR");
  const serve::Settings settings = serve::read_settings(options.settings);
  serve::DataDirectory data(options.data_directory);
  data.lock();
  serve::Keys keys(data.database());
  if (keys.is_empty() && !is_loopback(options.host))
    throw_error<ConfigError>(
        "--host {}: {} holds no key, and without keys a server listens on 127.0.0.1 alone; make "
        "one: "
        "heddle serve keys add --data-dir {} --tenant NAME",
        options.host, options.data_directory, options.data_directory);
  serve::ServerOptions server_options;
  server_options.most_body_bytes = static_cast<std::size_t>(settings.max_body_bytes);
  server_options.drain_s = settings.drain_s;
  serve::Quotas quotas;
  serve::Server server(server_options);
  server.authenticate_by(identify_by(keys, settings.limits));
  server.meter_by([&quotas](const serve::Caller& caller, serve::Cost cost) {
    return quotas.admit(caller, cost);
  });
  serve::EngineBackendOptions backend;
  backend.directory = find_model(options.model).string();
  backend.name = options.name.empty()
                     ? std::filesystem::weakly_canonical(options.model).filename().string()
                     : options.name;
  backend.settings = settings.of_model;
  backend.max_sequences = settings.max_sequences;
  backend.max_context = settings.max_context;
  backend.pass_tokens = settings.pass_tokens;
  backend.deterministic = settings.deterministic;
  serve::Registry registry;
  serve::PassMetrics passes(registry);
  auto model = std::make_unique<serve::ModelThread>(
      serve::make_engine_backend(backend),
      [&passes](const std::vector<serve::ModelPass>& done, const serve::ModelQueue& queue) {
        for (const serve::ModelPass& pass : done) passes.passed(pass);
        passes.queued(queue);
      });
  serve::tinker::ServiceOptions tinker = settings.tinker;
  tinker.compresses_bodies = !is_loopback(options.host);
  tinker.metrics = std::make_shared<serve::GenerationMetrics>(registry, backend.name);
  tinker.runs.metrics = std::make_shared<serve::TrainingMetrics>(registry);
  serve::tinker::Service service(server, *model, data, tinker);
  service.serve();
  InferenceApi inference(server, *model, registry, *tinker.metrics, data, !keys.is_empty(),
                         [&] { tinker.runs.metrics->now(service.now()); });
  inference.load(options.adapters);
  serve::admin::Admin admin(
      server, {*model, service, data, keys, quotas, [&inference] { return inference.adapters(); }},
      identify_by(keys, settings.limits));
  admin.serve();
  const int port = server.listen(options.host, options.port);
  if (keys.is_empty())
    log::warning("{} holds no key: everybody on this host may train, sample and read here",
                 options.data_directory);
  log::info("model {} as {}, data in {}", text::shown(options.model), text::shown(backend.name),
            options.data_directory);
  const StopRequest stop;  // before the line that says that the server may be asked
  session.out << fmt::format("http://{}:{}\n", options.host, port) << std::flush;
  server.run(
      stop.flag(), [&] { service.drain(); }, [&] { return !service.runs().is_busy(); });
  // Its last job may speak to the service, which goes after it.
  model.reset();
  log::info("the server has ended");
  return 0;
}

int add_key(const KeyOptions& options, const Session& session) {
  serve::DataDirectory data(options.data_directory);
  std::optional<double> expires;
  if (options.days > 0) expires = serve::now_s() + options.days * 24 * 3600;
  session.out
      << serve::Keys(data.database()).add(options.tenant, options.scopes, options.limits, expires)
      << "\n";
  return 0;
}

int list_keys(const KeyOptions& options, const Session& session) {
  serve::DataDirectory data(options.data_directory);
  for (const auto& key : serve::Keys(data.database()).list()) {
    std::string limits;
    for (const auto& [name, value] : key.limits) limits += fmt::format("  {}={}", name, value);
    session.out << fmt::format("{:>4}  {}...  {}  {}  {}{}{}{}\n", key.id, key.prefix,
                               serve::as_utc(key.created), key.tenant, key.scopes, limits,
                               key.expires ? "  expires " + serve::as_utc(*key.expires) : "",
                               key.revoked ? "  revoked " + serve::as_utc(*key.revoked) : "");
  }
  return 0;
}

int revoke_key(const KeyOptions& options, const Session& session) {
  serve::DataDirectory data(options.data_directory);
  const auto key = serve::Keys(data.database()).revoke(options.key);
  session.out << fmt::format("revoked key {} ({}...) of {}\n", key.id, key.prefix, key.tenant);
  return 0;
}

CLI::App* add_key_commands(CLI::App& serve_command, Action& action) {
  auto options = std::make_shared<KeyOptions>();
  CLI::App* keys = serve_command.add_subcommand("keys", "API keys of a server: add, list, revoke");
  keys->require_subcommand(1);
  const auto command = [&](const char* name, const char* meaning,
                           int (*run)(const KeyOptions&, const Session&)) {
    CLI::App* added = keys->add_subcommand(name, meaning);
    added->add_option("--data-dir", options->data_directory, "Of the server, which may be running")
        ->type_name("DIR")
        ->capture_default_str();
    added->callback([options, run, &action] {
      action = [options, run](const Session& session) { return run(*options, session); };
    });
    return added;
  };
  CLI::App* add = command("add", "Make a key and print it; it is shown once", add_key);
  add->add_option("--tenant", options->tenant, "Who owns what is made with the key")
      ->required()
      ->type_name("NAME");
  add->add_option("--scopes", options->scopes, "Of train, sample, admin, read")
      ->type_name("A,B")
      ->capture_default_str();
  add->add_option("--days", options->days, "Days until the key ends; 0: never")
      ->type_name("N")
      ->check(not_below_zero());
  for (const serve::LimitRow& limit : serve::kLimitRows) {
    std::string name = limit.name;
    std::ranges::replace(name, '_', '-');
    add->add_option_function<std::int64_t>(
           "--" + name,
           [options, limit](const std::int64_t& value) { options->limits[limit.name] = value; },
           std::string("Instead of the server's: ") + limit.meaning + "; 0: no limit")
        ->type_name("N")
        ->check(not_below_zero());
  }
  command("list", "Show number, first characters, tenant and scopes of all keys", list_keys);
  command("revoke", "Take a key out of force", revoke_key)
      ->add_option("key", options->key, "Number or first characters of the key")
      ->required()
      ->type_name("NUMBER|PREFIX");
  return keys;
}

/// Keys and defaults, several a line; docs/serve.md has their meanings.
std::string help_of_settings() {
  constexpr std::size_t kWidth = 96;
  std::string text = "Settings and defaults (docs/serve.md):\n", line = " ";
  for (const serve::SettingRow& row : serve::setting_rows()) {
    const std::string setting = fmt::format(" {}={}", row.key, row.value);
    if (line.size() + setting.size() > kWidth) {
      text += line + "\n";
      line = " ";
    }
    line += setting;
  }
  return text + line + "\n";
}

}  // namespace

void add_serve_command(CLI::App& app, Action& action) {
  auto options = std::make_shared<ServeOptions>();
  CLI::App* command =
      app.add_subcommand("serve", "Train adapters and sample for many clients over HTTP");
  command
      ->add_option("model_dir", options->model, "A Hugging Face model directory, the base of all")
      ->type_name("MODEL_DIR");
  command->add_option("--name", options->name, "What clients call it; default the folder's name");
  command->add_option("--host", options->host, "Address to listen on")->capture_default_str();
  command->add_option("--port", options->port, "0: a free one")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str();
  command->add_option("--data-dir", options->data_directory, "Keys, sessions, checkpoints")
      ->type_name("DIR")
      ->capture_default_str();
  command
      ->add_option("--adapter", options->adapters,
                   "A PEFT adapter directory, served as a model of this name")
      ->type_name("NAME=DIR")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command
      ->add_option(
          "settings", options->settings,
          "serve.*, device.*, model.dtype, kernels.*, rollout.state_dtype and other memory")
      ->type_name("[key=value ...]");
  const CLI::App* keys = add_key_commands(*command, action);
  command->footer(help_of_settings() + "\nExample:\n  heddle serve models/base --port 0");
  command->callback([options, keys, &action] {
    if (keys->parsed()) return;
    action = [options](const Session& session) { return serve_model(*options, session); };
  });
}

}  // namespace heddle::cli
