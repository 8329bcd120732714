#include "base/layout.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "base/errors.h"

namespace heddle {
namespace {

std::string text_of(const Region& region) {
  return fmt::format("[{}] from [{}] on", fmt::join(region.size, ", "),
                     fmt::join(region.offset, ", "));
}

}  // namespace

std::int64_t Region::numel() const {
  return std::accumulate(size.begin(), size.end(), std::int64_t{1}, std::multiplies<>());
}

bool Region::is_within(const Sizes& shape) const {
  if (offset.size() != shape.size() || size.size() != shape.size()) return false;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (offset[d] < 0 || offset[d] + size[d] > shape[d]) return false;
  }
  return true;
}

Region whole_region(const Sizes& shape) { return {Sizes(shape.size(), 0), shape}; }

std::optional<Region> intersect(const Region& a, const Region& b) {
  Region common;
  for (std::size_t d = 0; d < a.offset.size(); ++d) {
    const std::int64_t begin = std::max(a.offset[d], b.offset[d]);
    const std::int64_t end = std::min(a.offset[d] + a.size[d], b.offset[d] + b.size[d]);
    if (begin >= end) return std::nullopt;
    common.offset.push_back(begin);
    common.size.push_back(end - begin);
  }
  return common;
}

Layout Layout::whole(const Sizes& shape) {
  return {shape, shape, {{whole_region(shape), Sizes(shape.size(), 0)}}};
}

std::vector<LayoutCopy> copies_between(const Layout& from, const Layout& to) {
  if (from.global_shape != to.global_shape) {
    throw_error<InternalError>("layouts of a tensor [{}] and of one [{}]",
                               fmt::join(from.global_shape, ", "),
                               fmt::join(to.global_shape, ", "));
  }
  const auto place = [](const Layout::Part& part, const Region& common) {
    Sizes local = part.local;
    for (std::size_t d = 0; d < local.size(); ++d)
      local[d] += common.offset[d] - part.global.offset[d];
    return local;
  };
  std::vector<LayoutCopy> copies;
  for (const Layout::Part& source : from.parts) {
    for (const Layout::Part& target : to.parts) {
      if (const auto common = intersect(source.global, target.global))
        copies.push_back({place(source, *common), place(target, *common), common->size});
    }
  }
  return copies;
}

// Sorted by offset, the regions that a pair of neighbours could share lie near each other only
// along dimension 0: comparing each with those that begin before it ends there is enough.
void Coverage::check(const std::string& name, const Sizes& shape) const {
  std::vector<Region> sorted = regions_;
  std::ranges::sort(sorted, {}, &Region::offset);
  std::int64_t held = 0;
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const Region& region = sorted[i];
    if (!region.is_within(shape)) {
      throw_error<ModelError>("{} [{}]: a rank owns {}", name, fmt::join(shape, ", "),
                              text_of(region));
    }
    held += region.numel();
    for (std::size_t j = i + 1; j < sorted.size(); ++j) {
      if (!shape.empty() && sorted[j].offset[0] >= region.offset[0] + region.size[0]) break;
      if (const auto common = intersect(region, sorted[j]))
        throw_error<ModelError>("{}: {} is owned by two ranks", name, text_of(*common));
    }
  }
  const std::int64_t all = whole_region(shape).numel();
  if (held != all)
    throw_error<ModelError>("{}: {} of {} elements are owned by no rank", name, all - held, all);
}

nlohmann::ordered_json to_json(const Layout& layout) {
  nlohmann::ordered_json parts = nlohmann::ordered_json::array();
  for (const Layout::Part& part : layout.parts) {
    parts.push_back(
        {{"offset", part.global.offset}, {"size", part.global.size}, {"local", part.local}});
  }
  return {
      {"global_shape", layout.global_shape}, {"local_shape", layout.local_shape}, {"parts", parts}};
}

Layout layout_of(const nlohmann::ordered_json& json) {
  try {
    Layout layout{json.at("global_shape").get<Sizes>(), json.at("local_shape").get<Sizes>(), {}};
    for (const auto& part : json.at("parts")) {
      layout.parts.push_back({{part.at("offset").get<Sizes>(), part.at("size").get<Sizes>()},
                              part.at("local").get<Sizes>()});
    }
    return layout;
  } catch (const nlohmann::ordered_json::exception& error) {
    throw_error<InternalError>("a layout of a tensor: {}", error.what());
  }
}

}  // namespace heddle
