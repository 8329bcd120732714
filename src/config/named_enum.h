#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <string_view>
#include <type_traits>

namespace heddle::config {

/// The spellings of an enumeration, in the order of its values.
template <class E>
inline constexpr std::array<std::string_view, 0> kNames{};

template <class E>
concept NamedEnum = std::is_enum_v<E> &&(kNames<E>.size() > 0);

template <NamedEnum E>
constexpr std::string_view to_string(E value) {
  return kNames<E>[static_cast<std::size_t>(value)];
}

}  // namespace heddle::config
