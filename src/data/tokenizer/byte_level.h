#pragma once

#include <string>
#include <string_view>

/// The spelling of bytes as printable characters that byte-level BPE files use ("Language Models
/// are Unsupervised Multitask Learners", Radford et al. 2019): a printable Latin-1 byte is itself,
/// the 68 others are U+0100 upwards.
namespace heddle::data::byte_level {

/// One character, in UTF-8.
std::string spelling(unsigned char byte);

/// The bytes that a token of the vocabulary spells. False if a character is not of the alphabet.
bool to_bytes(std::string_view token, std::string& bytes);

/// As to_bytes, but a token that is not of the alphabet stands for its own UTF-8.
std::string to_bytes_or_self(std::string_view token);

}  // namespace heddle::data::byte_level
