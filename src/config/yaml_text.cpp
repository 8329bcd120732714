#include "config/yaml_text.h"

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>

#include "base/utf8_character.h"

namespace heddle::config {
namespace {

bool is_forbidden(std::uint32_t code) {
  return (code < 0x20 && code != '\t' && code != '\n' && code != '\r') || code == 0x7f;
}

[[noreturn]] void fail(std::string_view before, const std::string& message) {
  YAML::Mark mark;
  mark.line = static_cast<int>(std::count(before.begin(), before.end(), '\n'));
  throw YAML::ParserException(mark, message);
}

/// Takes a document and keeps nothing of it.
class Passing final : public YAML::EventHandler {
  using Mark = YAML::Mark;
  using Anchor = YAML::anchor_t;
  using Text = std::string;
  void OnDocumentStart(const Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const Mark&, Anchor) override {}
  void OnAlias(const Mark&, Anchor) override {}
  void OnScalar(const Mark&, const Text&, Anchor, const Text&) override {}
  void OnSequenceStart(const Mark&, const Text&, Anchor, YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const Mark&, const Text&, Anchor, YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}
};

}  // namespace

bool has_second_document(const std::string& text) {
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  Passing passing;
  return parser.HandleNextDocument(passing) && parser.HandleNextDocument(passing);
}

void require_yaml_text(std::string_view yaml) {
  std::uint32_t code = 0;
  for (std::size_t at = 0, bytes = 0; at < yaml.size(); at += bytes) {
    bytes = text::character_bytes(yaml.substr(at), code);
    if (bytes == 0)
      fail(yaml.substr(0, at),
           fmt::format("byte {:#04x} is not UTF-8 text", static_cast<unsigned char>(yaml[at])));
    if (is_forbidden(code))
      fail(yaml.substr(0, at), fmt::format("a control character, {:#04x}", code));
  }
}

}  // namespace heddle::config
