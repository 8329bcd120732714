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

std::int64_t volume(const std::vector<std::int64_t>& sizes) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  return count;
}

bool overlap(const Region& a, const Region& b) {
  for (std::size_t d = 0; d < a.offset.size(); ++d) {
    if (a.offset[d] + a.size[d] <= b.offset[d] || b.offset[d] + b.size[d] <= a.offset[d])
      return false;
  }
  return true;
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

Layout Layout::of(const std::vector<Part>& parts) {
  Layout layout;
  for (const Part& part : parts) {
    layout.tensors.push_back(part.info);
    layout.regions.emplace_back();
    for (const nn::Box& box : part.boxes) layout.regions.back().push_back(box.global);
  }
  return layout;
}

std::string Layout::to_text() const {
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

Layout Layout::from_text(const std::string& text) {
  Layout layout;
  const Json list = json::parse_as<InternalError>(text, "layout of a rank");
  for (const Json& tensor : list) {
    layout.tensors.push_back({tensor.at("name"), tensor.at("shape"),
                              static_cast<c10::ScalarType>(tensor.at("dtype").get<int>())});
    layout.regions.emplace_back();
    for (const Json& box : tensor.at("boxes")) layout.regions.back().push_back({box[0], box[1]});
  }
  return layout;
}

void require_each_element_once(const std::vector<Layout>& ranks) {
  std::map<std::string, std::vector<Region>> found;
  std::map<std::string, TensorInfo> infos;
  for (const Layout& layout : ranks) {
    for (std::size_t k = 0; k < layout.tensors.size(); ++k) {
      const TensorInfo& info = layout.tensors[k];
      const auto [place, is_new] = infos.emplace(info.name, info);
      if (!is_new && !(place->second == info))
        throw_error<InternalError>("ranks disagree about the shape or dtype of {}", info.name);
      auto& regions = found[info.name];
      regions.insert(regions.end(), layout.regions[k].begin(), layout.regions[k].end());
    }
  }
  for (const auto& [name, regions] : found) {
    std::int64_t elements = 0;
    for (std::size_t a = 0; a < regions.size(); ++a) {
      elements += volume(regions[a].size);
      for (std::size_t b = 0; b < a; ++b) {
        if (overlap(regions[a], regions[b]))
          throw_error<InternalError>("two ranks send the same elements of {}", name);
      }
    }
    const std::int64_t all = volume(infos.at(name).shape);
    if (elements != all)
      throw_error<InternalError>("the ranks send {} of {} elements of {}", elements, all, name);
  }
}

}  // namespace heddle::sync
