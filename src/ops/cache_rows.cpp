#include "ops/cache_rows.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/zeros.h>

#include "device/upload.h"

namespace heddle::ops {

CacheRows CacheRows::from_host(std::vector<std::int64_t> slots, std::vector<std::int64_t> lengths,
                               c10::Device device) {
  TORCH_CHECK(slots.size() == lengths.size(), "cache rows: ", slots.size(), " slots but ",
              lengths.size(), " lengths");
  CacheRows rows;
  for (std::size_t b = 0; b < slots.size(); ++b) {
    TORCH_CHECK(slots[b] >= 0 && lengths[b] >= 0, "cache rows: sequence ", b, " has slot ",
                slots[b], " and length ", lengths[b], "; neither may be negative");
    rows.longest = std::max(rows.longest, lengths[b]);
  }
  rows.slots = device::upload(slots, device);
  rows.lengths = device::upload(lengths, device);
  rows.slots_host = std::move(slots);
  rows.lengths_host = std::move(lengths);
  return rows;
}

CacheRows CacheRows::from_host(std::vector<std::int64_t> slots, std::vector<std::int64_t> lengths,
                               std::vector<std::vector<std::int32_t>> pages, c10::Device device) {
  TORCH_CHECK(slots.size() == pages.size(), "cache rows: ", slots.size(),
              " sequences but the pages of ", pages.size());
  CacheRows rows = from_host(std::move(slots), std::move(lengths), device);
  std::size_t width = 1;
  for (const std::vector<std::int32_t>& row : pages) width = std::max(width, row.size());
  const at::Tensor table = at::zeros(
      {static_cast<std::int64_t>(pages.size()), static_cast<std::int64_t>(width)}, at::kInt);
  for (std::size_t b = 0; b < pages.size(); ++b)
    std::copy(pages[b].begin(), pages[b].end(), table.mutable_data_ptr<std::int32_t>() + b * width);
  rows.pages = device::upload(table, device);
  rows.pages_host = std::move(pages);
  return rows;
}

void CacheRows::check(const char* op, std::int64_t batch, std::int64_t slots_of_cache) const {
  TORCH_CHECK(count() == batch, op, ": ", count(), " cache rows for ", batch, " sequences");
  for (std::size_t b = 0; b < slots_host.size(); ++b) {
    TORCH_CHECK(slots_host[b] < slots_of_cache, op, ": sequence ", b, " has slot ", slots_host[b],
                " of ", slots_of_cache);
  }
}

void CacheRows::check_pages(const char* op, std::int64_t batch, std::int64_t pages_of_cache,
                            std::int64_t page_tokens) const {
  TORCH_CHECK(count() == batch && pages.defined() && pages.size(0) == batch, op, ": ", count(),
              " cache rows, pages of ", pages.defined() ? pages.size(0) : 0, " for ", batch,
              " sequences");
  TORCH_CHECK(batch == 0 || longest < pages.size(1) * page_tokens, op, ": a sequence has ", longest,
              " tokens, and its ", pages.size(1), " pages of ", page_tokens,
              " have no room for another");
  for (std::size_t b = 0; b < pages_host.size(); ++b) {
    const auto room = static_cast<std::int64_t>(pages_host[b].size()) * page_tokens;
    TORCH_CHECK(lengths_host[b] < room, op, ": sequence ", b, " has ", lengths_host[b],
                " tokens and pages for ", room);
    for (const std::int32_t page : pages_host[b]) {
      TORCH_CHECK(page >= 0 && page < pages_of_cache, op, ": sequence ", b, " has page ", page,
                  " of ", pages_of_cache);
    }
  }
}

void CacheRows::append_places(std::size_t b, std::int64_t first, std::int64_t count,
                              std::int64_t page_tokens, std::vector<std::int64_t>& places) const {
  for (std::int64_t t = first; t < first + count; ++t) {
    const std::int64_t page = pages_host[b][static_cast<std::size_t>(t / page_tokens)];
    places.push_back(page * page_tokens + t % page_tokens);
  }
}

}  // namespace heddle::ops
