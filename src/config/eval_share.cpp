#include "config/eval_share.h"

#include <charconv>

#include "base/errors.h"
#include "config/config.h"

namespace heddle::config {

std::optional<double> eval_share(const RunConfig& config) {
  if (config.data.eval.size() != 1) return std::nullopt;
  const std::string& text = config.data.eval.front().path;
  double share = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), share);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (share > 0 && share < 1) return share;
  throw_error<ConfigError>("{}: a share of the training rows is above 0 and below 1, found {}",
                           where(config, "data.eval"), text);
}

}  // namespace heddle::config
