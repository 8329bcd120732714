#pragma once

#include <array>
#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

namespace heddle::comm {

/// Dimensions of the mesh from fastest to slowest varying rank (docs/design.md 3.4).
enum class Dim { kTp, kCp, kFsdp, kDp, kPp };
constexpr std::size_t kDims = 5;
const char* name(Dim dim);

/// The ranks along one dimension. A group of size 1 has no process group: its collectives are the
/// identity.
class Group {
 public:
  Group(std::string name, std::int64_t rank, std::int64_t size);

  const std::string& name() const { return name_; }
  std::int64_t rank() const { return rank_; }
  std::int64_t size() const { return size_; }

  /// Sum over the group, in place.
  void all_reduce_sum(at::Tensor& tensor) const;
  double all_reduce_sum(double value) const;
  /// True everywhere if true anywhere.
  bool any(bool value) const;

 private:
  std::string name_;
  std::int64_t rank_, size_;
};

/// All ranks as a product of named dimensions, and this rank's place in it.
class Mesh {
 public:
  /// Throws ConfigError if `world` is not the product of the sizes, or rank is outside it.
  Mesh(std::array<std::int64_t, kDims> sizes, std::int64_t rank, std::int64_t world);
  /// One rank, every dimension 1; needs no environment and opens no socket.
  static Mesh single() { return Mesh({1, 1, 1, 1, 1}, 0, 1); }

  std::int64_t size(Dim dim) const { return sizes_[static_cast<std::size_t>(dim)]; }
  std::int64_t coordinate(Dim dim) const { return coordinates_[static_cast<std::size_t>(dim)]; }
  std::int64_t world() const { return world_; }
  std::int64_t rank() const { return rank_; }
  /// Data ranks: those that read different rows (dp x fsdp), and this rank's place among them.
  std::int64_t data_size() const { return size(Dim::kDp) * size(Dim::kFsdp); }
  std::int64_t data_rank() const {
    return coordinate(Dim::kDp) * size(Dim::kFsdp) + coordinate(Dim::kFsdp);
  }
  /// The ranks over which losses and token counts are summed (dp x fsdp x cp).
  Group loss_group() const;
  /// "tp 1 x cp 1 x fsdp 1 x dp 1 x pp 1 = 1 rank"
  std::string describe() const;

 private:
  std::array<std::int64_t, kDims> sizes_;
  std::array<std::int64_t, kDims> coordinates_;
  std::int64_t rank_, world_;
};

}  // namespace heddle::comm
