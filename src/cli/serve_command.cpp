#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <memory>
#include <ostream>

#include "base/errors.h"
#include "base/log.h"
#include "base/quote.h"
#include "cli/command.h"
#include "cli/names.h"
#include "cli/serve_data_commands.h"
#include "cli/stop_request.h"
#include "cli/version.h"
#include "data/rendering/renderer.h"
#include "data/tokenizer/tokenizer.h"
#include "serve/admin/admin.h"
#include "serve/metrics/registry.h"
#include "serve/model/engine_backend.h"
#include "serve/openai/adapters.h"
#include "serve/openai/api.h"
#include "serve/openai/error.h"
#include "serve/quotas.h"
#include "serve/settings.h"
#include "serve/store/audit.h"
#include "serve/store/keys.h"
#include "serve/usage_keeper.h"

namespace heddle::cli {
namespace {

constexpr double kWatch_s = 10;
constexpr int kStuckStatus = 70;  ///< EX_SOFTWARE of sysexits.h

struct ServeOptions {
  std::string model, name, host = "127.0.0.1", data_directory = kServeDataDirectory;
  int port = 8000;
  std::vector<std::string> adapters;  ///< NAME=DIR
  std::vector<std::string> settings;
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
               const serve::GenerationMetrics& metrics,
               std::shared_ptr<serve::SamplesInFlight> samples, serve::DataDirectory& data,
               bool has_keys, std::function<void()> before_metrics)
      : registry_(registry), service_(make_service(model, metrics, std::move(samples))) {
    registry_.declare_counter("heddle_http_requests_total", "Answers, by route and status.");
    server.observe_by([this](const std::string& pattern, int status, double) {
      registry_.add("heddle_http_requests_total",
                    {{"route", pattern}, {"code", std::to_string(status)}});
    });
    const auto tenants_tree = [root = data.path() / "tenants"](const serve::Caller& caller) {
      return root / caller.tenant;
    };
    serve::openai::ApiOptions options{version(), {}};
    options.note = [&server, &data](const serve::Caller& caller, const std::string& event,
                                    const std::string& adapter) {
      server.post([&data, caller, event, adapter] {
        serve::Audit(data.database()).note(caller, event, adapter);
      });
    };
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
      if (service_.models.has(entry.substr(0, equals)))
        throw_error<ConfigError>(
            "--adapter {}: the model, or another adapter, has this name: give another NAME",
            text::shown(entry));
      std::promise<std::string> loaded;
      serve::openai::load_adapter(service_, entry.substr(0, equals), entry.substr(equals + 1),
                                  [&](const std::string& error) { loaded.set_value(error); });
      if (const std::string error = loaded.get_future().get(); !error.empty())
        throw_error<ConfigError>("--adapter {}: {}", text::shown(entry), error);
    }
  }

  /// Checkpoints of the training API are models too.
  void serve_checkpoints_of(serve::tinker::Service& training) {
    service_.models.look_also(serve::tinker::kScheme,
                              [&training](const std::string& path, const serve::Caller& caller,
                                          serve::WantsWeights wants) {
                                training.find_weights(path, caller, std::move(wants));
                              });
  }

  std::vector<std::string> adapters() const { return service_.models.adapters(); }

 private:
  static serve::openai::Service make_service(serve::ModelThread& model,
                                             const serve::GenerationMetrics& metrics,
                                             std::shared_ptr<serve::SamplesInFlight> samples) {
    const serve::ModelFacts& facts = model.facts();
    const std::shared_ptr<const data::Tokenizer> tokenizer = data::Tokenizer::load(facts.directory);
    return {model,
            tokenizer,
            data::Renderer(*tokenizer, data::RenderOptions{}),
            serve::openai::Models(facts.name, facts.max_context),
            metrics,
            std::move(samples)};
  }

  serve::Registry& registry_;
  serve::openai::Service service_;
};

/// Ends the process where a turn of the model does not end: a device that is stuck is so for all,
/// and only a new process gets it back. What was promised is on the disk.
void watch(serve::Server& server, const serve::ModelThread& model, double turn_s) {
  if (const auto taken = model.overdue(turn_s, std::chrono::steady_clock::now())) {
    log::error(
        "a turn of the model has taken {:.0f} s (serve.turn_s={}): the device is stuck, and the "
        "server ends so that its supervisor starts it again",
        *taken, turn_s);
    std::_Exit(kStuckStatus);
  }
  server.post_after(kWatch_s, [&server, &model, turn_s] { watch(server, model, turn_s); });
}

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
  // The clients of either API find its words.
  server_options.error_body = [](int status, const std::string& message) {
    serve::openai::Json body = serve::openai::error_object(status, message);
    body["detail"] = message;
    return serve::openai::dump(body);
  };
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
  serve::PassMetrics passes(registry, settings.max_sequences);
  auto model = std::make_unique<serve::ModelThread>(
      serve::make_engine_backend(backend),
      [&passes](const std::vector<serve::ModelPass>& done, const serve::ModelQueue& queue) {
        for (const serve::ModelPass& pass : done) passes.passed(pass);
        passes.queued(queue);
      });
  serve::tinker::ServiceOptions tinker = settings.tinker;
  tinker.samples = std::make_shared<serve::SamplesInFlight>(settings.max_samples);
  tinker.compresses_bodies = !is_loopback(options.host);
  tinker.metrics = std::make_shared<serve::GenerationMetrics>(registry, backend.name);
  tinker.runs.metrics = std::make_shared<serve::TrainingMetrics>(registry);
  serve::tinker::Service service(server, *model, data, tinker);
  service.serve();
  InferenceApi inference(server, *model, registry, *tinker.metrics, tinker.samples, data,
                         !keys.is_empty(), [&] { tinker.runs.metrics->now(service.now()); });
  inference.serve_checkpoints_of(service);
  inference.load(options.adapters);
  serve::admin::Admin admin(
      server, {*model, service, data, keys, quotas, [&inference] { return inference.adapters(); }},
      identify_by(keys, settings.limits));
  admin.serve();
  serve::UsageKeeper usage(server, quotas, data.database());
  usage.serve();
  if (settings.turn_s > 0) watch(server, *model, settings.turn_s);
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
  usage.save();
  log::info("the server has ended");
  return 0;
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
      ->type_name("NAME=DIR");
  command
      ->add_option(
          "settings", options->settings,
          "serve.*, device.*, model.dtype, kernels.*, rollout.state_dtype and other memory")
      ->type_name("[key=value ...]");
  const std::vector<const CLI::App*> others = add_serve_data_commands(*command, action);
  command->footer(help_of_settings() + "\nExample:\n  heddle serve models/base --port 0");
  command->callback([options, others, &action] {
    if (std::ranges::any_of(others, [](const CLI::App* other) { return other->parsed(); })) return;
    action = [options](const Session& session) { return serve_model(*options, session); };
  });
}

}  // namespace heddle::cli
