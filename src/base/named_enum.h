#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <string_view>
#include <type_traits>

/// Enumerations that users spell in configurations and read in messages. Beside such an enumeration
/// stands its `names_of`, in the order of the values:
///
///     enum class Head { kLanguageModel, kClassify };
///     constexpr auto names_of(Head) { return spelled("lm", "classify"); }
namespace heddle {

template <std::convertible_to<std::string_view>... Names>
constexpr std::array<std::string_view, sizeof...(Names)> spelled(Names... names) {
  return {names...};
}

template <class E>
concept NamedEnum = std::is_enum_v<E> && requires(E value) {
  names_of(value);
};

template <NamedEnum E>
inline constexpr auto kNames = names_of(E{});

template <NamedEnum E>
constexpr std::string_view to_string(E value) {
  return kNames<E>[static_cast<std::size_t>(value)];
}

}  // namespace heddle
