#pragma once

#include <cstdint>
#include <cstdio>
#include <map>
#include <regex>
#include <string>
#include <vector>

#include "base/files.h"
#include "testing/paths.h"

namespace heddle::testing {

/// The entry points of torch_npu, ACL and HCCL that a source calls, and from how many places; by
/// the names that device::sim::entry_calls() has. `source` lies below src/.
inline std::map<std::string, int> entry_points_of(const std::string& source) {
  const std::string text = files::read(source_path("src/" + source));
  // Forms of calls, and the parts of their names.
  static const std::vector<std::pair<std::regex, std::string>> kForms = {
      {std::regex(R"(\b((?:c10_npu|torch_npu)::[a-z]\w*)\()"), "$1"},
      {std::regex(R"(\b(c10_npu::NPU\w*Guard) \w)"), "$1"},
      {std::regex(R"(c10_npu::(\w+)::get\(\)->(\w+)\()"), "$1::$2"},
      {std::regex(R"(\bgraph_\.(\w+)\()"), "NPUGraph::$1"},
      {std::regex(R"(\bevent\.(\w+)\()"), "NPUEvent::$1"},
      {std::regex(R"(\b(ProcessGroupHCCL::Options::create)\()"), "$1"},
      {std::regex(R"(make_intrusive<(ProcessGroupHCCL)>)"), "c10d_npu::$1"},
      {std::regex(R"(\b((?:acl\w+|Hccl\w+|GetCANNVersion))\()"), "$1"}};
  std::map<std::string, int> found;
  for (const auto& [form, name] : kForms) {
    for (std::sregex_iterator match(text.begin(), text.end(), form), end; match != end; ++match)
      ++found[match->format(name)];
  }
  return found;
}

/// Prints a line for each entry point of the sources; returns those that were never stood in for.
inline std::vector<std::string> print_coverage(const std::vector<std::string>& sources,
                                               const std::map<std::string, std::int64_t>& calls) {
  std::vector<std::string> missing;
  for (const std::string& source : sources) {
    for (const auto& [entry, sites] : entry_points_of(source)) {
      const auto called = calls.find(entry);
      std::printf("%-26s %-40s %d call site%s  simulated %lld times\n", source.c_str(),
                  entry.c_str(), sites, sites == 1 ? " " : "s",
                  called == calls.end() ? 0LL : static_cast<long long>(called->second));
      if (called == calls.end()) missing.push_back(entry);
    }
  }
  std::fflush(stdout);
  return missing;
}

}  // namespace heddle::testing
