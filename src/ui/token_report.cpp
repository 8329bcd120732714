#include "ui/token_report.h"

#include <fmt/format.h>

#include "base/html.h"
#include "ui/curve.h"
#include "ui/report_page.h"

namespace heddle::ui {
namespace {

constexpr std::string_view kTokenStyle = R"css(
.tokens { white-space: pre-wrap; overflow-wrap: anywhere; }
.tokens span { border-radius: 3px; box-shadow: inset -1px 0 var(--line); }
.tokens .loss { background: color-mix(in srgb, var(--good) 24%, transparent); }
.tokens .special { color: var(--s2); font-weight: 600; }
)css";

/// Control characters as escapes; a line break is shown and breaks the line.
std::string visible_in_report(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out += "\\n\n";
    } else if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

std::string tokens_of(const TokenSample& sample) {
  std::string out;
  for (const TokenText& token : sample.tokens) {
    out +=
        fmt::format("<span class='{}{}'>{}</span>", token.has_loss ? "loss" : "",
                    token.is_special ? " special" : "", escape_html(visible_in_report(token.text)));
  }
  return out;
}

}  // namespace

std::string render_token_report(const std::string& title, std::span<const TokenSource> sources) {
  std::string body = fmt::format(
      "<h1>{}</h1>\n<p class='soft tokens'><span class='loss'>carries loss</span> &nbsp; <span>no "
      "loss</span> &nbsp; <span class='special'>special token</span></p>\n",
      escape_html(title));
  for (const TokenSource& source : sources) {
    body += fmt::format("<h2>{}</h2>\n<p class='soft'>{}</p>\n", escape_html(source.name),
                        escape_html(source.summary));
    for (const TokenSample& sample : source.samples) {
      body += fmt::format(
          "<div class='card block'><div class='head'><h3>{}</h3><span class='soft'>{}: "
          "{}</span></div><pre class='tokens'>{}</pre></div>\n",
          escape_html(sample.place), escape_html(sample.why), escape_html(sample.note),
          tokens_of(sample));
    }
  }
  return fmt::format(
      "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><meta name='viewport' "
      "content='width=device-width'><title>{}</title><style>{}{}</style></head><body><main>\n"
      "{}</main></body></html>\n",
      escape_html(title), kReportStyle, kTokenStyle, body);
}

}  // namespace heddle::ui
