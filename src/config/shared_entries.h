#pragma once

#include <string>
#include <utility>
#include <vector>

#include "config/run_config.h"

namespace heddle::config {

/// entries() of what the ranks of a job must have alike: without what differs by host, which are
/// paths of what is read (of data files the weights stay), data.cache_dir, threads, the number of
/// the device and log.level. train.output_dir is one directory for all, and stays.
std::vector<std::pair<std::string, std::string>> shared_entries(const RunConfig& config);

}  // namespace heddle::config
