#include "comm/mesh.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

#include "base/errors.h"
#include "comm/group.h"
#include "comm/world.h"

namespace heddle::comm {

const char* name(Dim dim) {
  constexpr std::array<const char*, kDims + kExpertDims> kNames = {"tp", "cp", "fsdp",  "dp",
                                                                   "pp", "ep", "efsdp", "edp"};
  return kNames[static_cast<std::size_t>(dim)];
}

std::int64_t nearest_divisor(std::int64_t wanted, const std::vector<std::int64_t>& numbers) {
  std::int64_t all = 0;
  for (const std::int64_t number : numbers) all = std::gcd(all, number);
  std::int64_t nearest = 1;
  for (std::int64_t degree = 1; degree <= all; ++degree) {
    if (all % degree == 0 && std::abs(degree - wanted) < std::abs(nearest - wanted))
      nearest = degree;
  }
  return nearest;
}

struct Mesh::Groups {
  std::mutex mutex;
  std::map<std::vector<Dim>, Group> made;
};

Mesh::Mesh(Sizes sizes, std::int64_t rank, std::int64_t world, std::int64_t ep)
    : rank_(rank), world_size_(world), groups_(std::make_shared<Groups>()) {
  std::int64_t product = 1;
  for (std::size_t i = 0; i < kDims; ++i) {
    if (sizes[i] < 1) {
      throw_error<ConfigError>("parallel.{} is {}: expected at least 1", name(static_cast<Dim>(i)),
                               sizes[i]);
    }
    product *= sizes[i];
  }
  lay_out(Dim::kTp, {sizes.begin(), sizes.end()});
  if (product != world) {
    // One data dimension may be left to the number of ranks.
    const std::int64_t others = product / size(Dim::kDp);
    throw_error<ConfigError>(
        "the layout {} does not match the {} rank{} that {} started: use `heddle launch --nproc "
        "{}`{}, or change parallel.*",
        describe(), world, world == 1 ? "" : "s", world == 1 ? "was" : "were", product,
        world % others == 0 ? fmt::format(", or parallel.dp=auto (here {})", world / others) : "");
  }
  if (rank < 0 || rank >= world)
    throw_error<ConfigError>("rank {} is outside the {} rank(s)", rank, world);
  const std::int64_t stage = product / size(Dim::kPp);
  if (ep < 1 || stage % ep != 0) {
    throw_error<ConfigError>(
        "parallel.ep is {}: it must divide tp x cp x fsdp x dp = {}; the nearest degree that does "
        "is {}",
        ep, stage, nearest_divisor(ep, {stage}));
  }
  const std::int64_t sharding = stage / size(Dim::kDp);
  const std::int64_t efsdp = sharding / std::gcd(sharding, ep);
  lay_out(Dim::kEp, {ep, efsdp, stage / ep / efsdp});
}

Mesh::Mesh(Sizes sizes, std::shared_ptr<World> world, std::int64_t ep)
    : Mesh(sizes, world ? world->rank() : 0, world ? world->size() : 1, ep) {
  world_ = std::move(world);
}

void Mesh::lay_out(Dim first, const std::vector<std::int64_t>& sizes) {
  std::int64_t stride = 1;
  auto axis = axes_.begin() + static_cast<std::ptrdiff_t>(first);
  for (const std::int64_t size : sizes) {
    *axis++ = {size, stride};
    stride *= size;
  }
}

std::vector<std::int64_t> Mesh::ranks_along(const std::vector<Dim>& dims) const {
  std::vector<std::int64_t> ranks = {rank_};
  for (const Dim dim : dims) {
    std::vector<std::int64_t> more;
    for (std::int64_t c = 0; c < size(dim); ++c) {
      for (const std::int64_t rank : ranks)
        more.push_back(rank + (c - coordinate(dim)) * axis(dim).stride);
    }
    ranks = std::move(more);
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

namespace {

/// A group of processes or, without a world, of shapes alone.
Group make_group(const std::string& label, std::vector<std::int64_t> ranks,
                 const std::shared_ptr<World>& world, std::int64_t rank) {
  if (ranks.size() == 1) return Group(label);
  if (world) return Group(label, std::move(ranks), world, label);
  const auto place = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
  return {label, std::move(ranks), place};
}

}  // namespace

Group Mesh::group(const std::vector<Dim>& dims) const {
  const std::scoped_lock lock(groups_->mutex);
  const auto found = groups_->made.find(dims);
  if (found != groups_->made.end()) return found->second;
  std::vector<std::string> names;
  for (const Dim dim : dims) names.emplace_back(comm::name(dim));
  const std::string label = fmt::format("{}", fmt::join(names, " x "));
  std::vector<std::int64_t> ranks = ranks_along(dims);
  const Group group = make_group(label, std::move(ranks), world_, rank_);
  groups_->made.emplace(dims, group);
  return group;
}

Group Mesh::loss_group() const { return group({Dim::kDp, Dim::kFsdp, Dim::kCp, Dim::kPp}); }

Group Mesh::end_stages() const {
  const std::vector<std::int64_t> all = ranks_along({Dim::kPp});
  const bool is_end = rank_ == all.front() || rank_ == all.back();
  if (all.size() == 1 || !is_end) return Group("end stages");
  return make_group("end stages", {all.front(), all.back()}, world_, rank_);
}

Group Mesh::world_group() const {
  return group({Dim::kTp, Dim::kCp, Dim::kFsdp, Dim::kDp, Dim::kPp});
}

std::string Mesh::describe() const {
  const auto product_of = [&](std::size_t first, std::size_t count) {
    std::vector<std::string> parts;
    for (std::size_t i = first; i < first + count; ++i)
      parts.push_back(fmt::format("{} {}", name(static_cast<Dim>(i)), axes_[i].size));
    return fmt::format("{}", fmt::join(parts, " x "));
  };
  const std::int64_t ranks = axes_[kDims - 1].stride * axes_[kDims - 1].size;
  std::string text =
      fmt::format("{} = {} rank{}", product_of(0, kDims), ranks, ranks == 1 ? "" : "s");
  if (size(Dim::kEp) > 1) text += ", experts " + product_of(kDims, kExpertDims);
  return text;
}

}  // namespace heddle::comm
