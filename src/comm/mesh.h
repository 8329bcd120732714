#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace heddle::comm {

class Group;
class World;

/// Dimensions of the mesh from fastest to slowest varying rank, and those of the experts' view of
/// the same ranks (docs/design.md 3.4).
enum class Dim { kTp, kCp, kFsdp, kDp, kPp, kEp, kEfsdp, kEdp };
constexpr std::size_t kDims = 5;        ///< The world is the product of their sizes.
constexpr std::size_t kExpertDims = 3;  ///< tp x cp x fsdp x dp is the product of their sizes.
const char* name(Dim dim);

/// The divisor of all `numbers` that is nearest to `wanted`, the smaller of two.
std::int64_t nearest_divisor(std::int64_t wanted, const std::vector<std::int64_t>& numbers);

/// All ranks as a product of named dimensions, and this rank's place in it. Experts see the ranks
/// tp x cp x fsdp x dp of a pipeline stage as ep x efsdp x edp, ep varying fastest: each rank along
/// ep has its own experts, their parameters are sharded over efsdp and replicated over edp. Of tp x
/// cp x fsdp, what ep leaves is efsdp.
class Mesh {
 public:
  using Sizes = std::array<std::int64_t, kDims>;

  /// The geometry alone, without processes: its groups carry shapes (comm/group.h). Throws
  /// ConfigError if `world` is not the product of the sizes, rank is outside it, or `ep` does not
  /// divide tp x cp x fsdp x dp.
  Mesh(Sizes sizes, std::int64_t rank, std::int64_t world, std::int64_t ep = 1);
  /// A mesh of the processes of a job.
  Mesh(Sizes sizes, std::shared_ptr<World> world, std::int64_t ep = 1);
  /// One rank, every dimension 1; needs no environment and opens no socket.
  static Mesh single() { return Mesh({1, 1, 1, 1, 1}, 0, 1); }

  std::int64_t size(Dim dim) const { return axis(dim).size; }
  std::int64_t coordinate(Dim dim) const { return rank_ / axis(dim).stride % axis(dim).size; }
  std::int64_t world_size() const { return world_size_; }
  std::int64_t rank() const { return rank_; }
  /// The processes of the job; null for one rank.
  const std::shared_ptr<World>& world() const { return world_; }

  /// Data ranks: those that read different rows (dp x fsdp), and this rank's place among them.
  std::int64_t data_size() const { return size(Dim::kDp) * size(Dim::kFsdp); }
  std::int64_t data_rank() const {
    return coordinate(Dim::kDp) * size(Dim::kFsdp) + coordinate(Dim::kFsdp);
  }

  /// The ranks that differ from this one in these dimensions alone, in the order of their numbers.
  /// Dimensions of one view.
  std::vector<std::int64_t> ranks_along(const std::vector<Dim>& dims) const;
  /// Their group, made when it is asked for first and the same from then on. All members ask for
  /// their groups in the same order.
  Group group(const std::vector<Dim>& dims) const;
  /// The ranks over which losses and token counts are summed (dp x fsdp x cp x pp): each has its
  /// part, along pp the last stage that of the head.
  Group loss_group() const;
  Group world_group() const;
  /// The first and the last rank along pp, if this is one of them; else of this rank alone.
  Group end_stages() const;
  /// "tp 1 x cp 1 x fsdp 1 x dp 1 x pp 1 = 1 rank", and the experts' view if ep is not 1.
  std::string describe() const;

 private:
  struct Groups;
  struct Axis {
    std::int64_t size = 1, stride = 1;
  };

  const Axis& axis(Dim dim) const { return axes_[static_cast<std::size_t>(dim)]; }
  void lay_out(Dim first, const std::vector<std::int64_t>& sizes);

  std::array<Axis, kDims + kExpertDims> axes_;
  std::int64_t rank_, world_size_;
  std::shared_ptr<World> world_;
  std::shared_ptr<Groups> groups_;  ///< Shared by the copies of a mesh.
};

}  // namespace heddle::comm
