#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/batch.h"
#include "data/loader/dataset.h"
#include "data/tokenizer/tokenizer.h"

namespace heddle::data::testing {

/// A byte-level BPE with 256 bytes, a few merges (also across newlines) and the special tokens
/// <|im_start|>, <|im_end|>,
/// <|endoftext|> (eos), <think> and </think>; splits text as Qwen does and normalises to NFC.
std::shared_ptr<const Tokenizer> make_tokenizer(std::string_view chat_template = {});

/// A template that behaves like Qwen3.5's: drops the thinking of turns before the last question,
/// opens the last turns with a think block, asks the assistant to think in the generation prompt,
/// and renders tools and tool calls.
std::string thinking_template();
/// A plain ChatML template.
std::string chatml_template();

/// Writes the lines, each with a newline.
std::filesystem::path write_lines(const std::filesystem::path& path,
                                  const std::vector<std::string>& lines);

/// `count` rows {"input_ids": [...]} of 2..longest tokens; every row's tokens are its number and
/// position, so that order and place of each can be read off a batch.
std::vector<std::string> numbered_rows(int count, int longest, std::uint64_t seed);

std::vector<std::int64_t> to_list(const at::Tensor& tensor);
std::vector<double> to_doubles(const at::Tensor& tensor);

/// Rows of a file as a data set in memory.
std::shared_ptr<const Dataset> open_rows(const std::filesystem::path& path,
                                         const Tokenizer& tokenizer);

}  // namespace heddle::data::testing
