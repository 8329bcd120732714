#pragma once

#include <span>
#include <string>
#include <vector>

#include "ui/token_colors.h"

namespace heddle::ui {

/// A row of a data file as the model sees it.
struct TokenSample {
  std::string place;  ///< "chat.jsonl:12"
  std::string why;    ///< why it is shown: "first rows", "longest", ...
  std::string note;   ///< "340 tokens, 52 with loss"
  std::vector<TokenText> tokens;
};

/// The rows of one file.
struct TokenSource {
  std::string name;
  std::string summary;
  std::vector<TokenSample> samples;
};

/// A page that needs no network: the tokens of each row, those that carry loss coloured.
std::string render_token_report(const std::string& title, std::span<const TokenSource> sources);

}  // namespace heddle::ui
