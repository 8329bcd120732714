#include "serve/admin/admin.h"

#include <algorithm>

#include "base/random_hex.h"
#include "base/text.h"
#include "serve/admin/html.h"

namespace heddle::serve::admin {
namespace {

constexpr double kLogin_s = 12 * 3600;
constexpr std::size_t kMostLogins = 100;  ///< The oldest goes.
constexpr const char* kCookie = "heddle_admin";
constexpr const char* kHtml = "text/html; charset=utf-8";

Headers page_headers() {
  return {{"Content-Security-Policy",
           "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
           "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"},
          {"X-Content-Type-Options", "nosniff"},
          {"X-Frame-Options", "DENY"},
          {"Referrer-Policy", "no-referrer"},
          {"Cache-Control", "no-store"}};
}

std::string cookie_of(const Request& request) {
  for (const std::string& part : text::split(std::string(request.header("cookie")), ';')) {
    const std::size_t first = std::min(part.find_first_not_of(' '), part.size());
    const std::string pair = part.substr(first);
    if (pair.starts_with(std::string(kCookie) + "=")) return pair.substr(pair.find('=') + 1);
  }
  return "";
}

/// The field of a form.
std::string field_of(const std::string& form, const std::string& name) {
  for (const std::string& pair : text::split(form, '&')) {
    if (pair.starts_with(name + "="))
      return percent_decoded(pair.substr(name.size() + 1), true).value_or("");
  }
  return "";
}

/// A proxy in front speaks TLS: then the cookie never travels without.
std::string cookie_attributes(const Request& request) {
  return std::string("; Path=/admin; HttpOnly; SameSite=Strict") +
         (request.header("x-forwarded-proto") == "https" ? "; Secure" : "");
}

void redirect(const Responder& responder, Headers headers) {
  headers["Location"] = "/admin";
  responder.answer(303, "", kHtml, std::move(headers));
}

}  // namespace

Admin::Admin(Server& server, Sources sources, std::function<Caller(const Request&)> identify)
    : server_(server), state_(std::move(sources)), identify_(std::move(identify)) {}

bool Admin::has_admin_key(const Request& request) const {
  try {
    return identify_(request).may("admin");
  } catch (const HttpError&) {
    return false;
  }
}

bool Admin::is_admin(const Request& request) {
  if (has_admin_key(request)) return true;
  const auto found = logins_.find(sha256_hex(cookie_of(request)));
  if (found == logins_.end()) return false;
  Request with_key;
  with_key.headers["x-api-key"] = found->second.key;
  if (now_s() < found->second.until && has_admin_key(with_key)) return true;
  logins_.erase(found);
  return false;
}

void Admin::login(const Request& request, const Responder& responder) {
  Request with_key;
  with_key.headers["x-api-key"] = field_of(request.body, "key");
  if (!has_admin_key(with_key))
    return responder.answer(401, login_page("This key is not known, or it lacks the scope admin."),
                            kHtml, page_headers());
  if (logins_.size() >= kMostLogins)
    logins_.erase(std::ranges::min_element(logins_, {},
                                           [](const auto& entry) { return entry.second.until; }));
  const std::string cookie = random_hex(32);
  logins_[sha256_hex(cookie)] = {with_key.headers["x-api-key"], now_s() + kLogin_s};
  redirect(responder, {{"Set-Cookie", fmt::format("{}={}{}; Max-Age={:.0f}", kCookie, cookie,
                                                  cookie_attributes(request), kLogin_s)}});
}

void Admin::logout(const Request& request, const Responder& responder) {
  logins_.erase(sha256_hex(cookie_of(request)));
  redirect(responder,
           {{"Set-Cookie", fmt::format("{}={}; Max-Age=0", kCookie, cookie_attributes(request))}});
}

void Admin::show(const Request& request, const Responder& responder) {
  if (is_admin(request))
    return responder.answer(200, page_of(state_.json()), kHtml, page_headers());
  responder.answer(401, login_page(""), kHtml, page_headers());
}

void Admin::serve() {
  const auto add = [this](const char* method, const char* pattern,
                          std::function<void(const Request&, const Responder&)> handler) {
    Route route{method, pattern, std::move(handler), {}, ""};
    route.error_body = [](int, const std::string& message) { return message + "\n"; };
    route.is_public = true;  // the page asks for a key in its own way
    server_.route(std::move(route));
  };
  const auto fixed = [](const char* text, const char* type) {
    return [text, type](const Request&, const Responder& responder) {
      responder.answer(200, text, type, page_headers());
    };
  };
  // For the page's script and for programs.
  const auto part = [this](std::string (*make)(const nlohmann::json&), const char* type) {
    return [this, make, type](const Request& request, const Responder& responder) {
      if (!is_admin(request)) throw HttpError(401, "log in at /admin with a key of scope admin");
      responder.answer(200, make(state_.json()), type, page_headers());
    };
  };
  add("GET", "/", [](const Request&, const Responder& responder) { redirect(responder, {}); });
  add("GET", "/admin",
      [this](const Request& request, const Responder& responder) { show(request, responder); });
  add("POST", "/admin/login",
      [this](const Request& request, const Responder& responder) { login(request, responder); });
  add("POST", "/admin/logout",
      [this](const Request& request, const Responder& responder) { logout(request, responder); });
  add("GET", "/admin/content", part(content_of, kHtml));
  add("GET", "/admin/state.json", part(tinker::dump, "application/json"));
  add("GET", "/admin/script.js", fixed(kScript, "text/javascript; charset=utf-8"));
  add("GET", "/admin/style.css", fixed(kStyle, "text/css; charset=utf-8"));
  tick();
}

void Admin::tick() {
  state_.sample();
  server_.post_after(State::kSample_s, [this] { tick(); });
}

}  // namespace heddle::serve::admin
