#include "sync/part.h"

#include <algorithm>
#include <map>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/errors.h"
#include "base/json.h"

namespace heddle::sync {
namespace {

using Json = nlohmann::ordered_json;

TensorInfo info_of(const nn::Parameter& parameter) {
  return {parameter.name(), parameter.global_shape(), parameter.value().scalar_type()};
}

/// Frozen values that stay whole have no owner; the first replica has them.
bool sends(const nn::Parameter& parameter, const comm::Mesh& mesh) {
  if (!parameter.is_held() || parameter.is_copy()) return false;
  const bool is_owned = !parameter.owned().is_alias_of(parameter.value());
  return is_owned || mesh.coordinate(parameter.is_expert() ? comm::Dim::kEdp : comm::Dim::kDp) == 0;
}

}  // namespace

std::vector<Part> sent_parts(const Visit& visit, const comm::Mesh& mesh) {
  std::vector<Part> parts;
  visit([&](nn::Parameter& parameter) {
    parts.push_back({info_of(parameter), {}});
    if (sends(parameter, mesh)) parts.back().boxes = parameter.boxes(parameter.owned().detach());
  });
  return parts;
}

std::vector<Part> received_parts(const Visit& visit) {
  std::vector<Part> parts;
  visit([&](nn::Parameter& parameter) {
    parts.push_back({info_of(parameter), {}});
    if (parameter.is_held()) parts.back().boxes = parameter.boxes(parameter.owned().detach());
  });
  return parts;
}

HeldRegions HeldRegions::of(const std::vector<Part>& parts) {
  HeldRegions held;
  for (const Part& part : parts) {
    held.tensors.push_back(part.info);
    held.regions.emplace_back();
    for (const nn::Box& box : part.boxes) held.regions.back().push_back(box.global);
  }
  return held;
}

std::string HeldRegions::to_text() const {
  Json list = Json::array();
  for (std::size_t k = 0; k < tensors.size(); ++k) {
    Json boxes = Json::array();
    for (const Region& region : regions[k]) boxes.push_back({region.offset, region.size});
    list.push_back({{"name", tensors[k].name},
                    {"shape", tensors[k].shape},
                    {"dtype", static_cast<int>(tensors[k].dtype)},
                    {"boxes", boxes}});
  }
  return list.dump();
}

HeldRegions HeldRegions::from_text(const std::string& text) {
  HeldRegions held;
  const Json list = json::parse_as<InternalError>(text, "regions of a rank");
  for (const Json& tensor : list) {
    held.tensors.push_back({tensor.at("name"), tensor.at("shape"),
                            static_cast<c10::ScalarType>(tensor.at("dtype").get<int>())});
    held.regions.emplace_back();
    for (const Json& box : tensor.at("boxes")) held.regions.back().push_back({box[0], box[1]});
  }
  return held;
}

void require_each_element_once(const std::vector<HeldRegions>& ranks) {
  std::map<std::string, TensorInfo> infos;
  std::map<std::string, Coverage> coverages;
  for (const HeldRegions& held : ranks) {
    for (std::size_t k = 0; k < held.tensors.size(); ++k) {
      const TensorInfo& info = held.tensors[k];
      const auto [place, is_new] = infos.emplace(info.name, info);
      if (!is_new && !(place->second == info))
        throw_error<InternalError>("ranks disagree about the shape or dtype of {}", info.name);
      for (const Region& region : held.regions[k]) coverages[info.name].add(region);
    }
  }
  for (const auto& [name, info] : infos) {
    try {
      coverages[name].check(name, info.shape);
    } catch (const ModelError& error) {
      throw InternalError(error.what());
    }
  }
}

}  // namespace heddle::sync
