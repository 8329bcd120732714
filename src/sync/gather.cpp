#include "sync/gather.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "base/errors.h"
#include "ops/autograd.h"

namespace heddle::sync {
namespace {

/// The part of `region` that lies in `rows`.
std::optional<Region> intersection(const Region& region, const Rows& rows) {
  const std::int64_t begin = std::max(region.offset[0], rows.first);
  const std::int64_t end = std::min(region.offset[0] + region.size[0], rows.first + rows.count);
  if (begin >= end) return {};
  Region common = region;
  common.offset[0] = begin;
  common.size[0] = end - begin;
  return common;
}

/// The region's place in a bucket.
at::Tensor in_bucket(const at::Tensor& bytes, const TensorInfo& info, const Rows& rows,
                     const Region& region) {
  std::vector<std::int64_t> shape = info.shape;
  shape[0] = rows.count;
  at::Tensor view =
      bytes.narrow(0, rows.offset, rows.count * info.row_bytes()).view(info.dtype).view(shape);
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const std::int64_t first = region.offset[d] - (d == 0 ? rows.first : 0);
    view = view.narrow(static_cast<std::int64_t>(d), first, region.size[d]);
  }
  return view;
}

std::int64_t bytes_of(const TensorInfo& info, const Region& region) {
  return static_cast<std::int64_t>(c10::elementSize(info.dtype)) * region.numel();
}

/// Calls `use` for each region of `held` in a bucket, in an order that both ends of a message
/// know: the tensor's place in it, which region of it, what lies in the bucket, and its
/// rows.
template <class Use>
void for_each_piece(const Manifest& manifest, const Bucket& bucket, const HeldRegions& held,
                    Use use) {
  std::map<std::string, std::size_t> places;
  for (std::size_t k = 0; k < held.tensors.size(); ++k) places[held.tensors[k].name] = k;
  for (const Rows& rows : bucket.rows) {
    const std::size_t tensor = places.at(manifest.tensors()[rows.tensor].name);
    for (std::size_t k = 0; k < held.regions[tensor].size(); ++k) {
      if (const auto common = intersection(held.regions[tensor][k], rows))
        use(tensor, k, *common, rows);
    }
  }
}

/// The rows of a box that a piece of it has.
at::Tensor in_box(const nn::Box& box, const Region& piece) {
  return box.tensor.narrow(0, piece.offset[0] - box.global.offset[0], piece.size[0]);
}

/// Zeros after each tensor up to where the next begins, as the checksum reads them too.
void clear_gaps(const at::Tensor& bytes, const Manifest& manifest, const Bucket& bucket) {
  for (std::size_t k = 0; k < bucket.rows.size(); ++k) {
    const Rows& rows = bucket.rows[k];
    const std::int64_t end = rows.offset + rows.count * manifest.tensors()[rows.tensor].row_bytes(),
                       next = k + 1 < bucket.rows.size() ? bucket.rows[k + 1].offset : bucket.bytes;
    if (end < next) bytes.narrow(0, end, next - end).zero_();
  }
}

std::vector<HeldRegions> exchanged(const comm::Group& trainers, const std::vector<Part>& parts) {
  std::vector<HeldRegions> held;
  for (const std::string& text : trainers.all_gather_objects(HeldRegions::of(parts).to_text()))
    held.push_back(HeldRegions::from_text(text));
  require_each_element_once(held);
  return held;
}

}  // namespace

std::vector<TensorInfo> infos_of(const std::vector<Part>& parts) {
  std::vector<TensorInfo> infos;
  for (const Part& part : parts) {
    if (part.info.shape.empty())
      throw_error<InternalError>("tensor {} has no dimension", part.info.name);
    infos.push_back(part.info);
  }
  return infos;
}

Gather::Gather(comm::Group trainers, std::vector<Part> parts, std::int64_t bucket_bytes,
               c10::Device device)
    : trainers_(std::move(trainers)),
      parts_(std::move(parts)),
      held_(exchanged(trainers_, parts_)),
      device_(device),
      manifest_(infos_of(parts_), bucket_bytes) {}

void Gather::collect(std::size_t number, at::Tensor& bytes) const {
  const ops::NoGradient guard;
  const Bucket& bucket = manifest_.buckets()[number];
  const auto bytes_from = [&](const HeldRegions& held) {
    std::int64_t total = 0;
    for_each_piece(manifest_, bucket, held,
                   [&](std::size_t tensor, std::size_t, const Region& piece, const Rows&) {
                     total += (bytes_of(held.tensors[tensor], piece) + 15) / 16 * 16;
                   });
    return total;
  };
  // A piece in a message, which is as long as its elements and aligned as in a bucket.
  const auto take = [](const at::Tensor& message, std::int64_t& at, const TensorInfo& info,
                       const Region& piece) {
    const std::int64_t count = bytes_of(info, piece);
    const at::Tensor view = message.narrow(0, at, count).view(info.dtype).view(piece.size);
    at += (count + 15) / 16 * 16;
    return view;
  };
  // Libraries of devices carry no single bytes.
  const auto words_of = [&](std::int64_t total) {
    return at::empty({total / 8}, at::TensorOptions(device_).dtype(at::kLong));
  };
  const auto own = static_cast<std::size_t>(trainers_.rank());
  if (own > 0) {
    const std::int64_t total = bytes_from(held_[own]);
    if (total == 0) return;
    const at::Tensor message = words_of(total), bytes_out = message.view(at::kByte);
    std::int64_t at = 0;
    for_each_piece(manifest_, bucket, held_[own],
                   [&](std::size_t tensor, std::size_t k, const Region& piece, const Rows&) {
                     take(bytes_out, at, parts_[tensor].info, piece)
                         .copy_(in_box(parts_[tensor].boxes[k], piece));
                   });
    return trainers_.send(message, 0);
  }
  clear_gaps(bytes, manifest_, bucket);
  for_each_piece(manifest_, bucket, held_[0],
                 [&](std::size_t tensor, std::size_t k, const Region& piece, const Rows& rows) {
                   in_bucket(bytes, parts_[tensor].info, rows, piece)
                       .copy_(in_box(parts_[tensor].boxes[k], piece));
                 });
  for (std::size_t rank = 1; rank < held_.size(); ++rank) {
    const std::int64_t total = bytes_from(held_[rank]);
    if (total == 0) continue;
    at::Tensor words = words_of(total);
    trainers_.receive(words, static_cast<std::int64_t>(rank));
    const at::Tensor message = words.view(at::kByte);
    std::int64_t at = 0;
    const HeldRegions& held = held_[rank];
    for_each_piece(manifest_, bucket, held,
                   [&](std::size_t tensor, std::size_t, const Region& piece, const Rows& rows) {
                     in_bucket(bytes, held.tensors[tensor], rows, piece)
                         .copy_(take(message, at, held.tensors[tensor], piece));
                   });
  }
}

void Scatter::write(const Manifest& manifest, std::size_t number, const at::Tensor& bytes) const {
  const ops::NoGradient guard;
  for_each_piece(manifest, manifest.buckets()[number], HeldRegions::of(parts_),
                 [&](std::size_t tensor, std::size_t k, const Region& piece, const Rows& rows) {
                   in_box(parts_[tensor].boxes[k], piece)
                       .copy_(in_bucket(bytes, parts_[tensor].info, rows, piece));
                 });
}

}  // namespace heddle::sync
