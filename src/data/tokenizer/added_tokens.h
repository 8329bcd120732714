#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace heddle::data {

/// A token that is looked for in the text itself, before words are made.
struct AddedToken {
  std::int32_t id = 0;
  std::string content;
  bool single_word = false;  // only where no word character touches it
  bool lstrip = false;       // swallows the white space to its left
  bool rstrip = false;       // swallows the white space to its right
  bool normalized = false;   // looked for in the normalised text
  bool special = false;
};

/// Finds the leftmost-longest added tokens of one kind (normalised or not) in a text.
class AddedTokenFinder {
 public:
  /// Words are looked up as `content`; an empty one is ignored.
  explicit AddedTokenFinder(std::vector<AddedToken> tokens);

  struct Piece {
    std::int32_t id;  // -1: text between added tokens
    std::size_t begin;
    std::size_t end;
  };
  /// Appends the pieces of valid UTF-8 `text`, in order and without empty ones. With
  /// `skip_special`, special tokens that are found stay text.
  void split(std::string_view text, bool skip_special, std::vector<Piece>& pieces) const;
  bool empty() const { return tokens_.empty(); }

 private:
  /// The longest token that begins at `at`, or -1; an index into tokens_.
  std::int32_t longest_at(std::string_view text, std::size_t at) const;

  struct Node {
    std::int32_t token = -1;
    std::vector<std::pair<unsigned char, std::int32_t>> children;
  };
  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;
  std::array<std::int32_t, 256> roots_;
};

}  // namespace heddle::data
