#pragma once

#include <set>
#include <string>
#include <vector>

namespace heddle::ckpt {

/// modules_to_save of an adapter that is to be written, by PEFT's rule (is_saved_whole()).
struct SavedModules {
  std::vector<std::string> entries;
  /// Meaning of those entries: the trained parameters, and others that share a module or an ending
  /// with them, which PEFT then looks for too.
  std::vector<std::string> parameters;
};

/// `trained` are parameters, `all` every parameter and tensor of the model, in one spelling. An
/// entry is the last part of a module's name if that means trained modules alone, else the whole
/// name.
SavedModules modules_to_save(const std::set<std::string>& trained,
                             const std::vector<std::string>& all);

}  // namespace heddle::ckpt
