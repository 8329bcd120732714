#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace heddle::data {

/// The merge table of a byte-level BPE model and the merging of one word. Immutable.
class Bpe {
 public:
  struct Merge {
    std::int32_t left;
    std::int32_t right;
    std::int32_t result;
  };
  struct Options {
    /// The id of each byte; -1: the byte is not in the vocabulary and gives unk_id, or nothing.
    std::array<std::int32_t, 256> byte_ids;
    std::int32_t unk_id = -1;
    /// Neighbouring unknown bytes give one unk_id.
    bool fuse_unk = false;
    /// A word that is a token as a whole is not merged step by step.
    bool ignore_merges = false;
  };

  /// `merges` in the order of their rank; of equal pairs the last counts. `words` (bytes of a token
  /// -> id) is used with ignore_merges only.
  Bpe(const Options& options, const std::vector<Merge>& merges,
      std::unordered_map<std::string, std::int32_t> words);

  /// Working space of one thread, with a cache of short words.
  class Scratch {
   public:
    Scratch();

   private:
    friend class Bpe;
    static constexpr std::size_t kSlots = std::size_t{1} << 15;
    static constexpr std::size_t kLongestWord = 22;
    static constexpr std::size_t kMostIds = 10;
    struct alignas(64) Slot {
      std::uint8_t length = 0;  // 0: free
      std::uint8_t count = 0;
      char word[kLongestWord];
      std::int32_t ids[kMostIds];
    };
    static_assert(sizeof(Slot) == 64);  // one cache line
    struct Symbol {
      std::int32_t id;
      std::int32_t previous;
      std::int32_t next;
      std::int32_t alive;
    };
    struct Candidate {
      std::int32_t rank;
      std::int32_t position;
      std::int32_t result;
    };
    std::vector<Slot> slots_;
    std::vector<std::int32_t> ids_;
    std::vector<std::int32_t> ranks_;
    std::vector<Symbol> symbols_;
    std::vector<Candidate> heap_;
  };

  /// Appends the ids of a word given as its bytes. O(n log n) in its length.
  void encode(std::string_view word, Scratch& scratch, std::vector<std::int32_t>& out) const;

 private:
  static constexpr std::int32_t kNoRank = 0x7FFFFFFF;
  struct Entry {
    std::uint64_t pair = ~std::uint64_t{0};
    std::int32_t rank = kNoRank;
    std::int32_t result = -1;
  };

  static std::uint64_t key(std::int32_t left, std::int32_t right) {
    return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
           static_cast<std::uint32_t>(right);
  }
  const Entry& find(std::int32_t left, std::int32_t right) const;
  /// Symbols of a word before any merge, into scratch.ids_.
  void start(std::string_view word, Scratch& scratch) const;
  void merge_short(Scratch& scratch) const;
  void merge_long(Scratch& scratch) const;

  Options options_;
  std::unordered_map<std::string, std::int32_t> words_;
  std::vector<Entry> table_;  // open addressing, a power of two
  std::uint64_t mask_;
  Entry none_;
};

}  // namespace heddle::data
