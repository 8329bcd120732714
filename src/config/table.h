#pragma once

// Inside src/config only: sections of keys, bound to members of the configuration's structs.

#include <concepts>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "config/codec.h"
#include "config/field.h"

namespace heddle::config {

struct Extra {
  Range range = {};
  std::vector<std::string> aliases = {};
  bool required = false;
  /// Never printed: a token (Secret::kWhole), or a URL that may hold a password (kPassword).
  Secret secret = Secret::kNone;
};

/// Finds a section struct in a configuration.
template <class Owner>
struct Location {
  std::function<Owner&(RunConfig&)> in;
  std::function<const Owner&(const RunConfig&)> in_const;
};

/// Binds members of one section struct to keys.
template <class Owner>
class Table {
 public:
  Table(Section& section, Owner RunConfig::*owner)
      : section_(section),
        location_{[owner](RunConfig& c) -> Owner& { return c.*owner; },
                  [owner](const RunConfig& c) -> const Owner& { return c.*owner; }} {}
  template <class Parent>
  Table(Section& section, Parent RunConfig::*parent, Owner Parent::*owner)
      : section_(section),
        location_{[=](RunConfig& c) -> Owner& { return c.*parent.*owner; },
                  [=](const RunConfig& c) -> const Owner& { return c.*parent.*owner; }} {}

  /// `Wire` is the type whose codec reads and writes the member; the member's own unless given.
  template <class Wire = void, class T, class Declares>
  requires std::derived_from<Owner, Declares> Table& key(const std::string& name,
                                                         T Declares::*member, std::string doc,
                                                         Extra extra = {}) {
    using W = std::conditional_t<std::is_void_v<Wire>, T, Wire>;
    Field field;
    field.key = section_.key + "." + name;
    field.type = Codec<W>::type(extra.range);
    field.doc = std::move(doc);
    field.aliases = std::move(extra.aliases);
    field.required = extra.required;
    field.set = [location = location_, member, range = extra.range](RunConfig& c,
                                                                    const YAML::Node& node) {
      location.in(c).*member = from_wire<T>(Codec<W>::read(node, range));
    };
    field.secret = extra.secret;
    field.get = [location = location_, member, secret = extra.secret](const RunConfig& c) {
      return without_secret(Codec<W>::write(W{location.in_const(c).*member}), secret);
    };
    section_.fields.push_back(std::move(field));
    return *this;
  }

  /// Keys of any name, kept in a map.
  template <class T>
  Table& open(std::string placeholder, std::map<std::string, T> Owner::*member, std::string doc) {
    section_.open = OpenKeys{
        std::move(placeholder),
        Codec<T>::type({}),
        std::move(doc),
        [location = location_, member](RunConfig& c, const std::string& name,
                                       const YAML::Node& node) {
          (location.in(c).*member)[name] = Codec<T>::read(node, {});
        },
        [location = location_, member](const RunConfig& c) {
          Json object = Json::object();
          for (const auto& [name, value] : location.in_const(c).*member) {
            object[name] = Codec<T>::write(value);
          }
          return object;
        },
        [location = location_, member](RunConfig& c) { (location.in(c).*member).clear(); }};
    return *this;
  }

 private:
  template <class T, class W>
  static T from_wire(W value) {
    if constexpr (std::is_same_v<W, Bytes>) {
      return value.count;
    } else {
      return value;
    }
  }

  Section& section_;
  Location<Owner> location_;
};

inline Section make(std::string key, std::string doc) {
  Section section;
  section.key = std::move(key);
  section.doc = std::move(doc);
  return section;
}

/// Sections of `heddle rl` (schema_rl.cpp).
std::vector<Section> rl_sections();

}  // namespace heddle::config
