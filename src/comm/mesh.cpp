#include "comm/mesh.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "base/errors.h"
#include "comm/group.h"
#include "comm/world.h"

namespace heddle::comm {

const char* name(Dim dim) {
  constexpr std::array<const char*, kDims> kNames = {"tp", "cp", "fsdp", "dp", "pp"};
  return kNames[static_cast<std::size_t>(dim)];
}

struct Mesh::Groups {
  std::mutex mutex;
  std::map<std::vector<Dim>, Group> made;
};

Mesh::Mesh(Sizes sizes, std::int64_t rank, std::int64_t world)
    : sizes_(sizes),
      coordinates_{},
      rank_(rank),
      world_size_(world),
      groups_(std::make_shared<Groups>()) {
  std::int64_t product = 1;
  for (std::size_t i = 0; i < kDims; ++i) {
    if (sizes_[i] < 1) {
      throw_error<ConfigError>("parallel.{} is {}: expected at least 1", name(static_cast<Dim>(i)),
                               sizes_[i]);
    }
    coordinates_[i] = rank / product % sizes_[i];
    product *= sizes_[i];
  }
  if (product != world) {
    throw_error<ConfigError>(
        "the layout {} does not match the {} rank{} that {} started: use `heddle launch --nproc "
        "{}`, "
        "or change parallel.*",
        describe(), world, world == 1 ? "" : "s", world == 1 ? "was" : "were", product);
  }
  if (rank < 0 || rank >= world)
    throw_error<ConfigError>("rank {} is outside the {} rank(s)", rank, world);
}

Mesh::Mesh(Sizes sizes, std::shared_ptr<World> world)
    : Mesh(sizes, world ? world->rank() : 0, world ? world->size() : 1) {
  world_ = std::move(world);
}

std::vector<std::int64_t> Mesh::ranks_along(const std::vector<Dim>& dims) const {
  std::vector<std::int64_t> ranks = {rank_};
  std::int64_t stride = 1;
  for (std::size_t i = 0; i < kDims; ++i) {
    const Dim dim = static_cast<Dim>(i);
    if (std::find(dims.begin(), dims.end(), dim) != dims.end()) {
      std::vector<std::int64_t> more;
      for (std::int64_t c = 0; c < sizes_[i]; ++c) {
        for (const std::int64_t rank : ranks) more.push_back(rank + (c - coordinates_[i]) * stride);
      }
      ranks = std::move(more);
    }
    stride *= sizes_[i];
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

Group Mesh::group(const std::vector<Dim>& dims) const {
  const std::scoped_lock lock(groups_->mutex);
  const auto found = groups_->made.find(dims);
  if (found != groups_->made.end()) return found->second;
  std::vector<std::string> names;
  for (const Dim dim : dims) names.emplace_back(comm::name(dim));
  const std::string label = fmt::format("{}", fmt::join(names, " x "));
  std::vector<std::int64_t> ranks = ranks_along(dims);
  if (ranks.size() > 1 && !world_) {
    throw_error<InternalError>("group {} of {} ranks: this mesh has no processes", label,
                               ranks.size());
  }
  const Group group =
      ranks.size() == 1 ? Group(label) : Group(label, std::move(ranks), world_, label);
  groups_->made.emplace(dims, group);
  return group;
}

Group Mesh::loss_group() const { return group({Dim::kDp, Dim::kFsdp, Dim::kCp}); }

Group Mesh::world_group() const {
  return group({Dim::kTp, Dim::kCp, Dim::kFsdp, Dim::kDp, Dim::kPp});
}

std::string Mesh::describe() const {
  std::string text;
  std::int64_t product = 1;
  for (std::size_t i = 0; i < kDims; ++i) {
    text += fmt::format("{}{} {}", i == 0 ? "" : " x ", name(static_cast<Dim>(i)), sizes_[i]);
    product *= sizes_[i];
  }
  return fmt::format("{} = {} rank{}", text, product, product == 1 ? "" : "s");
}

}  // namespace heddle::comm
