#include "serve/admin/html.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "base/html.h"

namespace heddle::serve::admin {
namespace {

using Json = nlohmann::json;

constexpr int kWidth = 240, kHeight = 48;  ///< For a curve, in pixels.

/// A value as text: strings bare, objects as NAME=VALUE, nothing for what is absent.
std::string text_of(const Json& value) {
  if (value.is_null()) return "";
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (!value.is_object()) return value.dump(-1, ' ', false, Json::error_handler_t::replace);
  std::string text;
  for (const auto& [name, entry] : value.items())
    text += (text.empty() ? "" : " ") + name + "=" + text_of(entry);
  return text;
}

/// A line through the numbers, with its last and its largest one.
std::string curve(std::vector<double> numbers) {
  std::erase_if(numbers, [](double number) { return !std::isfinite(number); });
  if (numbers.empty()) return "";
  const auto [least, most] = std::ranges::minmax(numbers);
  const double height = most > least ? most - least : 1,
               steps = static_cast<double>(std::max<std::size_t>(1, numbers.size() - 1));
  std::string points;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    points += fmt::format("{:.1f},{:.1f} ", static_cast<double>(i) / steps * kWidth,
                          kHeight - (numbers[i] - least) / height * kHeight);
  }
  return fmt::format(
      "<svg viewBox='-2 -2 {} {}' width='{}' height='{}' role='img'><polyline fill='none' "
      "stroke='currentColor' stroke-width='1.5' points='{}'/></svg> {:.4g} (most {:.4g})",
      kWidth + 4, kHeight + 4, kWidth + 4, kHeight + 4, points, numbers.back(), most);
}

std::vector<double> numbers_of(const Json& list) {
  std::vector<double> numbers;
  for (const Json& each : list) numbers.push_back(each.is_number() ? each.get<double>() : NAN);
  return numbers;
}

struct Column {
  const char* title;
  const char* field;
};

std::string table(const char* title, const Json& rows, std::span<const Column> columns) {
  std::string html = fmt::format("<h2>{} <small>{}</small></h2>\n", title, rows.size());
  if (rows.empty()) return html;
  html += "<table>\n<tr>";
  for (const Column& column : columns) html += fmt::format("<th>{}</th>", column.title);
  html += "</tr>\n";
  for (const Json& row : rows) {
    html += "<tr>";
    for (const Column& column : columns) {
      const Json value = row.is_object() ? row.value(column.field, Json()) : row;
      // Names may hold marks of another direction of writing: <bdi> keeps them in their cell.
      html += value.is_array() ? fmt::format("<td>{}</td>", curve(numbers_of(value)))
                               : fmt::format("<td{}><bdi>{}</bdi></td>",
                                             value.is_number() ? " class='number'" : "",
                                             escape_html(text_of(value)));
    }
    html += "</tr>\n";
  }
  return html + "</table>\n";
}

constexpr const char* kHead =
    "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
    "<meta name='viewport' content='width=device-width'><title>Heddle</title>"
    "<link rel='stylesheet' href='/admin/style.css'>";

}  // namespace

std::string content_of(const Json& state) {
  constexpr Column kRuns[] = {{"run", "run"},         {"session", "session_name"},
                              {"tenant", "tenant"},   {"rank", "rank"},
                              {"steps", "steps"},     {"tokens", "tokens"},
                              {"state", "state"},     {"next", "next_seq"},
                              {"waiting", "waiting"}, {"loss of a token, by step", "loss"}};
  constexpr Column kTenants[] = {
      {"tenant", "tenant"},  {"requests", "requests"},   {"tokens trained", "trained"},
      {"read", "read"},      {"generated", "generated"}, {"answers under way", "answers_under_way"},
      {"refused", "refused"}};
  constexpr Column kAdapters[] = {{"name", ""}};
  constexpr Column kCheckpoints[] = {{"path", "path"},     {"tenant", "tenant"},
                                     {"bytes", "bytes"},   {"created", "created"},
                                     {"public", "public"}, {"expires", "expires"}};
  constexpr Column kKeys[] = {{"number", "number"},   {"begins with", "begins"},
                              {"tenant", "tenant"},   {"scopes", "scopes"},
                              {"limits", "limits"},   {"created", "created"},
                              {"revoked", "revoked"}, {"expires", "expires"}};
  const Json &model = state.at("model"), &queue = state.at("queue"), &series = state.at("series");
  const auto line = [&](const char* title, const char* name) {
    return fmt::format("<tr><th>{}</th><td>{}</td></tr>\n", title,
                       curve(numbers_of(series.at(name))));
  };
  std::string html = fmt::format("<h1><bdi>{}</bdi></h1>\n<p>{}, {} tokens of context; {}</p>\n",
                                 escape_html(text_of(model.at("name"))),
                                 escape_html(text_of(model.at("architecture"))),
                                 text_of(model.at("max_context")), text_of(state.at("time")));
  html += fmt::format(
      "<h2>Queue</h2>\n<p>{} training requests wait, {} answers are under way, {} promises are "
      "open.</p>\n<table>\n{}{}{}</table>\n",
      text_of(queue.at("training_requests")), text_of(queue.at("answers")),
      text_of(queue.at("promises")), line("tokens/s", "tokens_per_s"),
      line("training requests", "waiting"), line("answers", "answers"));
  html += table("Runs", state.at("runs"), kRuns);
  html += table("Tenants", state.at("tenants"), kTenants);
  html += table("Adapters", state.at("adapters"), kAdapters);
  html += table("Checkpoints", state.at("checkpoints"), kCheckpoints);
  return html + table("Keys", state.at("keys"), kKeys);
}

std::string page_of(const Json& state) {
  return fmt::format(
      "{}<script src='/admin/script.js' defer></script></head>\n<body>\n<form method='post' "
      "action='/admin/logout'><button>Log out</button></form>\n<main>\n{}</main>\n</body></html>\n",
      kHead, content_of(state));
}

std::string login_page(const std::string& message) {
  return fmt::format(
      "{}</head>\n<body><main><h1>Heddle</h1><form method='post' action='/admin/login'>"
      "<label>Key with the scope admin <input type='password' name='key' autocomplete='off' "
      "required autofocus></label> <button>Log in</button></form><p>{}</p></main></body></html>\n",
      kHead, escape_html(message));
}

const char* const kScript =
    R"(// Renews the tables; the server has escaped them, and the page's policy runs no script of theirs.
const main = document.querySelector("main");
setInterval(async () => {
  if (document.hidden) return;
  try {
    const answer = await fetch("/admin/content", {credentials: "same-origin"});
    if (answer.status === 401) location.reload();
    if (answer.ok) main.innerHTML = await answer.text();
  } catch { /* the server is away; the next time may find it */ }
}, 2000);
)";

const char* const kStyle =
    R"(body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; color: #222; background: #fff; }
body > form { float: right; }
h1 { font-size: 1.3em; margin: 0; }
h2 { font-size: 1.05em; margin: 1.4em 0 .3em; }
small { color: #777; font-weight: normal; }
table { border-collapse: collapse; }
th, td { text-align: left; padding: .15em .8em .15em 0; border-bottom: 1px solid #ddd; max-width: 40em; overflow-wrap: anywhere; }
th { white-space: nowrap; }
td.number { text-align: right; }
svg { color: #06c; vertical-align: middle; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818; } th, td { border-color: #444; } svg { color: #6af; } }
)";

}  // namespace heddle::serve::admin
