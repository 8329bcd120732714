#include "serve/http/router.h"

#include <algorithm>
#include <span>

namespace heddle::serve {
namespace {

std::vector<std::string_view> segments_of(std::string_view path) {
  std::vector<std::string_view> segments;
  while (!path.empty()) {
    path.remove_prefix(1);  // the slash
    const std::size_t end = std::min(path.find('/'), path.size());
    segments.push_back(path.substr(0, end));
    path.remove_prefix(end);
  }
  return segments;
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

using Segments = std::span<const std::string_view>;

/// Fills the parameters from the last segments to the first.
bool matches(Segments pattern, Segments path, std::map<std::string, std::string>& parameters) {
  if (pattern.empty()) return path.empty();
  if (path.empty()) return false;
  const std::string_view head = pattern.front();
  if (!head.starts_with('{'))
    return head == path.front() && matches(pattern.subspan(1), path.subspan(1), parameters);
  const bool takes_more = head.ends_with("+}");
  const std::string name(head.substr(1, head.size() - (takes_more ? 3 : 2)));
  std::string value;
  const std::size_t most = takes_more ? path.size() : 1;
  for (std::size_t count = 1; count <= most; ++count) {
    const auto segment = percent_decoded(path[count - 1], false);
    if (!segment) return false;
    value += (count == 1 ? "" : "/") + *segment;
    if (matches(pattern.subspan(1), path.subspan(count), parameters)) {
      parameters[name] = value;
      return true;
    }
  }
  return false;
}

std::size_t common_prefix(std::string_view a, std::string_view b) {
  return static_cast<std::size_t>(
      std::mismatch(a.begin(),
                    a.begin() + static_cast<std::ptrdiff_t>(std::min(a.size(), b.size())),
                    b.begin())
          .first -
      a.begin());
}

}  // namespace

std::optional<std::string> percent_decoded(std::string_view text, bool is_query) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (c == '%') {
      if (i + 2 >= text.size()) return std::nullopt;
      const int high = hex_digit(text[i + 1]), low = hex_digit(text[i + 2]);
      if (high < 0 || low < 0) return std::nullopt;
      c = static_cast<char>(high * 16 + low);
      i += 2;
    } else if (c == '+' && is_query) {
      c = ' ';
    }
    if (c == '\0') return std::nullopt;
    out += c;
  }
  return out;
}

Router::Match Router::find(std::string_view method, std::string_view path) const {
  Match match;
  const auto asked = segments_of(path);
  std::size_t nearest = 0;
  for (const Route& route : routes_) {
    const std::size_t common = common_prefix(route.pattern, path);
    if (!match.error_body || common > nearest) {
      nearest = common;
      match.error_body = route.error_body;
    }
    std::map<std::string, std::string> parameters;
    if (!matches(segments_of(route.pattern), asked, parameters)) continue;
    match.has_path = true;
    match.error_body = route.error_body;
    if (route.method != method) {
      match.methods += (match.methods.empty() ? "" : ", ") + route.method;
      continue;
    }
    match.route = &route;
    match.parameters = std::move(parameters);
    return match;
  }
  return match;
}

}  // namespace heddle::serve
