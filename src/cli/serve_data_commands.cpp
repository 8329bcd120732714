#include "cli/serve_data_commands.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <ostream>
#include <string>

#include "base/quote.h"
#include "cli/option_checks.h"
#include "serve/http/limits.h"
#include "serve/store/audit.h"
#include "serve/store/data_directory.h"
#include "serve/store/keys.h"
#include "serve/store/usage.h"

namespace heddle::cli {
namespace {

constexpr double kDay_s = 24 * 3600;
constexpr std::int64_t kMostEntries = 10'000;  ///< Entries of the audit log in one listing.
/// Stands for a key's first characters in the audit log.
constexpr const char* kCommandLine = "command line";

struct KeyOptions {
  std::string data_directory = kServeDataDirectory, tenant, scopes = "train,sample", key;
  std::string checkpoint;
  double days = 0;                             ///< 0: for ever.
  std::map<std::string, std::int64_t> limits;  ///< By the names of serve::kLimitRows.
};

struct RecordOptions {
  std::string data_directory = kServeDataDirectory, tenant;
  double days = 30;
};

std::optional<double> end_of(const KeyOptions& options) {
  if (options.days > 0) return serve::now_s() + options.days * kDay_s;
  return std::nullopt;
}

int add_key(const KeyOptions& options, const Session& session) {
  serve::DataDirectory data(options.data_directory);
  const std::string key = serve::Keys(data.database())
                              .add(options.tenant, options.scopes, options.limits, end_of(options));
  serve::Audit(data.database())
      .note({options.tenant, kCommandLine, {}}, "key_add", serve::begin_of(key));
  session.out << key << "\n";
  return 0;
}

int grant_checkpoint(const KeyOptions& options, const Session& session) {
  serve::DataDirectory data(options.data_directory);
  serve::Keys keys(data.database());
  const std::string key = keys.grant(options.checkpoint, end_of(options));
  serve::Audit(data.database())
      .note({keys.grantor(key, options.checkpoint).value_or(""), kCommandLine, {}},
            "checkpoint_grant", options.checkpoint);
  session.out << key << "\n";
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
  serve::Audit(data.database()).note({key.tenant, kCommandLine, {}}, "key_revoke", key.prefix);
  session.out << fmt::format("revoked key {} ({}...) of {}\n", key.id, key.prefix, key.tenant);
  return 0;
}

int show_usage(const RecordOptions& options, const Session& session) {
  serve::DataDirectory data(options.data_directory);
  const std::string first = serve::day_of(serve::now_s() - (options.days - 1) * kDay_s);
  session.out << fmt::format("{:10}  {:20}  {:>9}  {:>9}  {:>14}  {:>14}  {:>14}\n", "day",
                             "tenant", "requests", "refused", "tokens trained", "read",
                             "generated");
  for (const auto& row : serve::UsageTable(data.database()).list(first)) {
    session.out << fmt::format("{:10}  {:20}  {:>9}  {:>9}  {:>14}  {:>14}  {:>14}\n", row.day,
                               row.tenant, row.requests, row.refused, row.trained, row.read,
                               row.generated);
  }
  return 0;
}

int show_audit(const RecordOptions& options, const Session& session) {
  serve::DataDirectory data(options.data_directory);
  const double now = serve::now_s();
  const auto entries =
      serve::Audit(data.database())
          .list(now - options.days * kDay_s, now + kDay_s, kMostEntries, options.tenant);
  for (const serve::Audit::Entry& entry : entries) {
    session.out << fmt::format("{}  {}  {}  {}  {}\n", serve::as_utc(entry.time), entry.tenant,
                               entry.key_prefix.empty() ? "-" : entry.key_prefix, entry.event,
                               text::shown(entry.object));
  }
  return 0;
}

/// `usage` and `audit`.
std::vector<const CLI::App*> add_record_commands(CLI::App& serve_command, Action& action) {
  auto options = std::make_shared<RecordOptions>();
  const auto command = [&](const char* name, const char* meaning,
                           int (*run)(const RecordOptions&, const Session&)) {
    CLI::App* added = serve_command.add_subcommand(name, meaning);
    added->add_option("--data-dir", options->data_directory, "Of the server, which may be running")
        ->type_name("DIR")
        ->capture_default_str();
    added->add_option("--days", options->days, "The last so many days")
        ->type_name("N")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    added->callback([options, run, &action] {
      action = [options, run](const Session& session) { return run(*options, session); };
    });
    return added;
  };
  CLI::App* usage =
      command("usage", "Show what tenants used, by day: requests and tokens", show_usage);
  CLI::App* audit = command("audit", "Show who made, read, shared or removed what", show_audit);
  audit->add_option("--tenant", options->tenant, "Of this tenant alone")->type_name("NAME");
  return {usage, audit};
}

const CLI::App* add_key_commands(CLI::App& serve_command, Action& action) {
  auto options = std::make_shared<KeyOptions>();
  CLI::App* keys =
      serve_command.add_subcommand("keys", "API keys of a server: add, grant, list, revoke");
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
  const auto takes_days = [&](CLI::App* made) {
    made->add_option("--days", options->days, "Days until the key ends; 0: never")
        ->type_name("N")
        ->check(not_below_zero());
  };
  takes_days(add);
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
  CLI::App* grant = command("grant", "Make a key for others to load and copy one checkpoint alone",
                            grant_checkpoint);
  grant->add_option("checkpoint", options->checkpoint, "As its owner's client names it")
      ->required()
      ->type_name("tinker://RUN/weights/NAME");
  takes_days(grant);
  command("list", "Show number, first characters, tenant and scopes of all keys", list_keys);
  command("revoke", "Take a key out of force", revoke_key)
      ->add_option("key", options->key, "Number or first characters of the key, or all of it")
      ->required()
      ->type_name("NUMBER|PREFIX");
  return keys;
}

}  // namespace

std::vector<const CLI::App*> add_serve_data_commands(CLI::App& serve_command, Action& action) {
  std::vector<const CLI::App*> added = add_record_commands(serve_command, action);
  added.push_back(add_key_commands(serve_command, action));
  return added;
}

}  // namespace heddle::cli
