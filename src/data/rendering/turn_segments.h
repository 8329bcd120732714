// The assistant's turns in two renderings of a whole conversation: as it is, and with every
// assistant's content a marker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "data/jinja/chat_template.h"

namespace heddle::data {

/// Bytes [begin, end) of a rendering; begin == end where the assistant said nothing.
struct TextSpan {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const TextSpan&) const = default;
};

namespace turn_segments {

/// Private-use characters, which no template treats specially and no ordinary text holds.
constexpr std::string_view kMarker = "\xee\x80\x80turn\xee\x80\x81";

std::size_t common_prefix(std::string_view a, std::string_view b);
std::size_t without_trailing_space(std::string_view text);

/// Whether `said` holds, in order, the texts of a message that a template shows in any case: what
/// follows the thinking, or each part.
bool holds_visible_texts(std::string_view said, const nlohmann::ordered_json& message);

/// A turn's message with its content a marker and its thinking gone; tool calls stay, since later
/// turns may depend on them.
nlohmann::ordered_json marked_message(const nlohmann::ordered_json& message);

/// One span for each of `turns` (indices of messages), or nothing where the two renderings do not
/// tell: what the template wrote for the message, from after `generation_prompt` or its beginning
/// that both share, to what closes the turn. Empty as a whole if anything but the turns differs
/// between the renderings.
std::vector<std::optional<TextSpan>> spans_of(const nlohmann::ordered_json& messages,
                                              const std::vector<std::size_t>& turns,
                                              const ChatTemplate::Rendered& full,
                                              const ChatTemplate::Rendered& marked,
                                              std::string_view generation_prompt);

/// Places in `turns` of the first and the last turn of each kind, in order: kinds differ in what a
/// template may look at, such as thinking, calls, the roles before and after, a later question.
std::vector<std::size_t> samples_of(const nlohmann::ordered_json& messages,
                                    const std::vector<std::size_t>& turns);

}  // namespace turn_segments
}  // namespace heddle::data
