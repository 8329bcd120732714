#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "reward/reward.h"

namespace heddle::reward {

/// The parameters of one verifier or task. Each is asked for once with its default; finish()
/// refuses what nobody asked for. All errors are ConfigErrors that begin with `where` and name the
/// parameter.
class Parameters {
 public:
  /// Throws unless `values` is an object or null.
  Parameters(const Json& values, std::string where);

  std::string text(const std::string& name, const std::string& otherwise);
  /// One of `choices`.
  std::string choice(const std::string& name, const std::string& otherwise,
                     const std::vector<std::string>& choices);
  double number(const std::string& name, double otherwise, double least, double most);
  std::int64_t integer(const std::string& name, std::int64_t otherwise, std::int64_t least,
                       std::int64_t most);
  bool flag(const std::string& name, bool otherwise);
  std::vector<std::string> texts(const std::string& name, std::vector<std::string> otherwise);
  /// A parameter without a default was left out, or does not fit the others.
  [[noreturn]] void refuse(const std::string& name, const std::string& why) const;
  void finish() const;

  const std::string& where() const { return where_; }

 private:
  const Json* find(const std::string& name);

  Json values_;
  std::string where_;
  std::set<std::string> known_;
};

}  // namespace heddle::reward
