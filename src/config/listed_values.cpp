#include "config/listed_values.h"

#include <algorithm>

#include "base/text.h"
#include "config/field.h"

namespace heddle::config {

std::vector<std::pair<std::string, std::vector<std::string>>> listed_values() {
  std::vector<std::pair<std::string, std::vector<std::string>>> listed;
  for (const Section& section : schema()) {
    for (const Field& field : section.fields) {
      if (field.type.find('|') == std::string::npos) continue;
      std::vector<std::string> values = text::split(field.type, '|');
      // The first of "cuda[:N]" is "cuda".
      for (std::string& value : values) value.resize(std::min(value.size(), value.find("[:")));
      // "auto|number >= 0" is no list.
      const bool is_list = std::all_of(values.begin(), values.end(), [](const std::string& value) {
        return value.find_first_of(" <>[](),") == std::string::npos;
      });
      if (!is_list) continue;
      if (field.key == section.scalar_key) listed.emplace_back(section.key, values);
      listed.emplace_back(field.key, std::move(values));
    }
  }
  return listed;
}

}  // namespace heddle::config
