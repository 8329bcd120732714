#include "data/tokenizer/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace heddle::data {
namespace {

// Above this many symbols a heap beats the scan for the smallest rank.
constexpr std::size_t kShortWord = 48;

std::uint64_t mix(std::uint64_t x) {
  x *= 0x9E3779B97F4A7C15ull;
  return x ^ x >> 32;
}

/// Hash of at most 22 bytes.
std::uint64_t hash_word(std::string_view word) {
  std::uint64_t parts[3] = {word.size(), 0, 0};
  if (word.size() >= 8) {
    std::memcpy(&parts[1], word.data(), 8);
    std::memcpy(&parts[2], word.data() + word.size() - 8, 8);
    if (word.size() > 16) {
      std::uint64_t middle;
      std::memcpy(&middle, word.data() + 8, 8);
      parts[0] += mix(middle);
    }
  } else {
    std::memcpy(&parts[1], word.data(), word.size());
  }
  return mix(mix(parts[0] ^ parts[1]) + parts[2]);
}

}  // namespace

Bpe::Scratch::Scratch() : slots_(kSlots) {}

Bpe::Bpe(const Options& options, const std::vector<Merge>& merges,
         std::unordered_map<std::string, std::int32_t> words)
    : options_(options), words_(std::move(words)) {
  const std::size_t slots = std::bit_ceil(std::max<std::size_t>(16, merges.size() * 2));
  table_.resize(slots);
  mask_ = slots - 1;
  for (std::size_t rank = 0; rank < merges.size(); ++rank) {
    const std::uint64_t pair = key(merges[rank].left, merges[rank].right);
    std::uint64_t slot = mix(pair) & mask_;
    while (table_[slot].rank != kNoRank && table_[slot].pair != pair) slot = (slot + 1) & mask_;
    table_[slot] = {pair, static_cast<std::int32_t>(rank), merges[rank].result};
  }
}

const Bpe::Entry& Bpe::find(std::int32_t left, std::int32_t right) const {
  const std::uint64_t pair = key(left, right);
  for (std::uint64_t slot = mix(pair) & mask_;; slot = (slot + 1) & mask_) {
    if (table_[slot].pair == pair) return table_[slot];
    if (table_[slot].rank == kNoRank) return none_;
  }
}

void Bpe::start(std::string_view word, Scratch& scratch) const {
  scratch.ids_.clear();
  bool previous_unknown = false;
  for (const char c : word) {
    const std::int32_t id = options_.byte_ids[static_cast<unsigned char>(c)];
    if (id >= 0) {
      scratch.ids_.push_back(id);
    } else if (options_.unk_id >= 0 && !(previous_unknown && options_.fuse_unk)) {
      scratch.ids_.push_back(options_.unk_id);
    }
    previous_unknown = id < 0;
  }
}

void Bpe::merge_short(Scratch& scratch) const {
  std::vector<std::int32_t>& ids = scratch.ids_;
  std::vector<std::int32_t>& ranks = scratch.ranks_;  // ranks[i]: of the pair (i, i + 1)
  std::size_t count = ids.size();
  ranks.resize(count);
  for (std::size_t i = 0; i + 1 < count; ++i) ranks[i] = find(ids[i], ids[i + 1]).rank;
  while (count > 1) {
    std::size_t best = 0;
    for (std::size_t i = 1; i + 1 < count; ++i) {
      if (ranks[i] < ranks[best]) best = i;
    }
    if (ranks[best] == kNoRank) break;
    ids[best] = find(ids[best], ids[best + 1]).result;
    --count;
    std::memmove(&ids[best + 1], &ids[best + 1] + 1, (count - best - 1) * sizeof(ids[0]));
    if (best + 1 < count) {
      std::memmove(&ranks[best], &ranks[best] + 1, (count - best - 1) * sizeof(ranks[0]));
      ranks[best] = find(ids[best], ids[best + 1]).rank;
    }
    if (best > 0) ranks[best - 1] = find(ids[best - 1], ids[best]).rank;
  }
  ids.resize(count);
}

void Bpe::merge_long(Scratch& scratch) const {
  using Candidate = Scratch::Candidate;
  std::vector<Scratch::Symbol>& symbols = scratch.symbols_;
  std::vector<Candidate>& heap = scratch.heap_;
  const auto later = [](const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
  };
  const auto count = static_cast<std::int32_t>(scratch.ids_.size());
  symbols.resize(count);
  heap.clear();
  for (std::int32_t i = 0; i < count; ++i) {
    symbols[i] = {scratch.ids_[i], i - 1, i + 1 < count ? i + 1 : -1, 1};
  }
  const auto offer = [&](std::int32_t left) {
    if (left < 0 || symbols[left].next < 0) return;
    const Entry& entry = find(symbols[left].id, symbols[symbols[left].next].id);
    if (entry.rank != kNoRank) heap.push_back({entry.rank, left, entry.result});
  };
  for (std::int32_t i = 0; i + 1 < count; ++i) offer(i);
  std::make_heap(heap.begin(), heap.end(), later);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const Candidate top = heap.back();
    heap.pop_back();
    Scratch::Symbol& left = symbols[top.position];
    if (!left.alive || left.next < 0) continue;
    Scratch::Symbol& right = symbols[left.next];
    // The entry is stale if one of the two has been merged since.
    if (find(left.id, right.id).rank != top.rank) continue;
    left.id = top.result;
    left.next = right.next;
    right.alive = 0;
    if (left.next >= 0) symbols[left.next].previous = top.position;
    for (const std::int32_t position : {left.previous, top.position}) {
      const std::size_t before = heap.size();
      offer(position);
      if (heap.size() > before) std::push_heap(heap.begin(), heap.end(), later);
    }
  }
  scratch.ids_.clear();
  for (const Scratch::Symbol& symbol : symbols) {
    if (symbol.alive) scratch.ids_.push_back(symbol.id);
  }
}

void Bpe::encode(std::string_view word, Scratch& scratch, std::vector<std::int32_t>& out) const {
  Scratch::Slot* slot = nullptr;
  if (word.size() <= Scratch::kLongestWord) {
    slot = &scratch.slots_[hash_word(word) % Scratch::kSlots];
    if (slot->length == word.size() && std::memcmp(slot->word, word.data(), word.size()) == 0) {
      out.insert(out.end(), slot->ids, slot->ids + slot->count);
      return;
    }
  }
  if (options_.ignore_merges) {
    if (const auto whole = words_.find(std::string(word)); whole != words_.end()) {
      out.push_back(whole->second);
      return;
    }
  }
  start(word, scratch);
  if (scratch.ids_.size() <= kShortWord) {
    if (scratch.ids_.size() > 1) merge_short(scratch);
  } else {
    merge_long(scratch);
  }
  const std::vector<std::int32_t>& ids = scratch.ids_;
  out.insert(out.end(), ids.begin(), ids.end());
  if (slot != nullptr && ids.size() <= Scratch::kMostIds) {
    slot->length = static_cast<std::uint8_t>(word.size());
    slot->count = static_cast<std::uint8_t>(ids.size());
    std::memcpy(slot->word, word.data(), word.size());
    std::copy(ids.begin(), ids.end(), slot->ids);
  }
}

}  // namespace heddle::data
