#include "ckpt/companions.h"

#include <array>
#include <system_error>

namespace heddle::ckpt {
namespace {

constexpr std::array kTokenizerFiles = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
};
constexpr std::array kOtherFiles = {
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "README.md",
};

}  // namespace

std::vector<std::pair<std::string, Path>> find_companions(const Path& directory, Companions which) {
  std::vector<std::pair<std::string, Path>> found;
  const auto add = [&](const char* name) {
    std::error_code ignored;
    if (std::filesystem::is_regular_file(directory / name, ignored))
      found.emplace_back(name, directory / name);
  };
  if (which != Companions::kTokenizer) {
    for (const char* name : kOtherFiles) add(name);
  }
  if (which == Companions::kOther) return found;
  for (const char* name : kTokenizerFiles) add(name);
  // Named templates beside the default one.
  std::error_code ignored;
  const Path templates = "additional_chat_templates";
  for (const auto& entry : std::filesystem::directory_iterator(directory / templates, ignored)) {
    if (entry.path().extension() == ".jinja" && entry.is_regular_file(ignored)) {
      found.emplace_back((templates / entry.path().filename()).string(), entry.path());
    }
  }
  return found;
}

void copy_files(const std::vector<std::pair<std::string, Path>>& sources, const Path& directory) {
  for (const auto& [name, source] : sources) {
    Path folder = source;
    for ([[maybe_unused]] const Path& part : Path(name)) folder = folder.parent_path();
    files::make_writable_directory((directory / name).parent_path());
    files::write_atomically(directory / name, files::read(source, files::kTokenizerLimit, folder));
  }
}

void copy_tokenizer(const TokenizerSource& source, const Path& directory) {
  copy_files(find_companions(source.directory, Companions::kTokenizer), directory);
  for (const auto& [name, content] : source.changed)
    files::write_atomically(directory / name, content);
}

}  // namespace heddle::ckpt
