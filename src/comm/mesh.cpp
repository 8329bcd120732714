#include "comm/mesh.h"

#include <utility>

#include "base/errors.h"

namespace heddle::comm {

const char* name(Dim dim) {
  constexpr std::array<const char*, kDims> kNames = {"tp", "cp", "fsdp", "dp", "pp"};
  return kNames[static_cast<std::size_t>(dim)];
}

Group::Group(std::string name, std::int64_t rank, std::int64_t size)
    : name_(std::move(name)), rank_(rank), size_(size) {
  if (size != 1) {
    throw_error<CommError>("group {} of {} ranks: this version runs one rank", name_, size);
  }
}

void Group::all_reduce_sum(at::Tensor&) const {}
double Group::all_reduce_sum(double value) const { return value; }
bool Group::any(bool value) const { return value; }

Mesh::Mesh(std::array<std::int64_t, kDims> sizes, std::int64_t rank, std::int64_t world)
    : sizes_(sizes), coordinates_{}, rank_(rank), world_(world) {
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
    throw_error<ConfigError>("the mesh {} does not match the {} rank(s) that were started",
                             describe(), world);
  }
  if (rank < 0 || rank >= world)
    throw_error<ConfigError>("rank {} is outside the {} rank(s)", rank, world);
}

Group Mesh::loss_group() const {
  return Group("dp x fsdp x cp", data_rank() * size(Dim::kCp) + coordinate(Dim::kCp),
               data_size() * size(Dim::kCp));
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
