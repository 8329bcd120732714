#pragma once

#include <map>
#include <string>

#include <nlohmann/json.hpp>

namespace heddle::ckpt {

/// weight_map of an index of shards, tensor name -> file name. Throws ModelError that names `file`
/// and the entry unless it is an object, not empty, whose values are plain file names. Not
/// ordered_json: an index has a hundred thousand keys, which that looks up one by one.
std::map<std::string, std::string> parse_weight_map(const nlohmann::json& index,
                                                    const std::string& file);

}  // namespace heddle::ckpt
