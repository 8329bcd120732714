#include "ckpt/saved_modules.h"

#include <algorithm>

#include "ckpt/adapter_names.h"

namespace heddle::ckpt {
namespace {

/// The module that holds a parameter.
std::string holder(const std::string& parameter) {
  return parameter.substr(0, parameter.rfind('.'));
}

bool lies_in(const std::string& module, const std::string& outer) {
  return module.size() > outer.size() && module.starts_with(outer) && module[outer.size()] == '.';
}

}  // namespace

SavedModules modules_to_save(const std::set<std::string>& trained,
                             const std::vector<std::string>& all) {
  std::set<std::string> modules;
  for (const std::string& parameter : trained) modules.insert(holder(parameter));
  // A module inside another one comes with it.
  std::erase_if(modules, [&](const std::string& module) {
    return std::any_of(modules.begin(), modules.end(),
                       [&](const std::string& outer) { return lies_in(module, outer); });
  });
  const auto means_trained_alone = [&](const std::string& entry) {
    return std::all_of(all.begin(), all.end(), [&](const std::string& parameter) {
      return trained.contains(parameter) || !is_saved_whole({entry}, parameter);
    });
  };
  std::set<std::string> entries;
  for (const std::string& module : modules) {
    const std::string last = module.substr(module.rfind('.') + 1);
    entries.insert(means_trained_alone(last) ? last : module);
  }
  SavedModules result{{entries.begin(), entries.end()}, {}};
  std::copy_if(
      all.begin(), all.end(), std::back_inserter(result.parameters),
      [&](const std::string& parameter) { return is_saved_whole(result.entries, parameter); });
  return result;
}

}  // namespace heddle::ckpt
