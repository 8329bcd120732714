#include "ckpt/companions.h"

#include <array>
#include <system_error>

#include "base/errors.h"
#include "base/hash.h"
#include "ckpt/label_names.h"

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
    "config_sentence_transformers.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "README.md",
};

constexpr std::array kOutputFiles = {
    kLabelNamesFile,           "modules.json", "sentence_bert_config.json", "1_Pooling/config.json",
    "2_Normalize/config.json",
};

/// Throws as files::read().
std::string text_of(const Companion& file) {
  Path folder = file.path;
  for ([[maybe_unused]] const Path& part : Path(file.name)) folder = folder.parent_path();
  return files::read(file.path, files::kTokenizerLimit, folder);
}

std::string content_of(const std::string& text) { return hash::Hasher().add(text).hex(); }

}  // namespace

std::vector<Companion> find_companions(const Path& directory, Companions which) {
  std::vector<Companion> found;
  const auto add_file = [&](const Path& name) {
    Companion& file = found.emplace_back(Companion{name.string(), directory / name, ""});
    try {
      file.content = content_of(text_of(file));
    } catch (const Error&) {
      // Named by whoever needs its text: a command that copies nothing does not.
    }
  };
  const auto add = [&](const char* name) {
    std::error_code ignored;
    if (std::filesystem::is_regular_file(directory / name, ignored)) add_file(name);
  };
  if (which != Companions::kTokenizer) {
    for (const char* name : kOtherFiles) add(name);
  }
  if (which == Companions::kOther) return found;
  for (const char* name : kTokenizerFiles) add(name);
  if (which == Companions::kAdapter) {
    for (const char* name : kOutputFiles) add(name);
  }
  // Named templates beside the default one.
  std::error_code ignored;
  const Path templates = "additional_chat_templates";
  for (const auto& entry : std::filesystem::directory_iterator(directory / templates, ignored)) {
    if (entry.path().extension() == ".jinja" && entry.is_regular_file(ignored))
      add_file(templates / entry.path().filename());
  }
  return found;
}

void copy_files(const std::vector<Companion>& sources, const Path& directory) {
  for (const Companion& source : sources) {
    const std::string text = text_of(source);
    // The bytes that are written are the bytes that are compared: nothing can change in between.
    if (content_of(text) != source.content) {
      throw_error<UserError>(
          "{} was changed while it was in use; put back what it held when the command began, and "
          "begin again (a licence or README may stay as it is now)",
          source.path.string());
    }
    files::make_writable_directory((directory / source.name).parent_path());
    files::write_atomically(directory / source.name, text);
  }
}

void write_files(const Files& files, const Path& directory) {
  for (const auto& [name, content] : files) {
    files::make_writable_directory((directory / name).parent_path());
    files::write_atomically(directory / name, content);
  }
}

void copy_tokenizer(const TokenizerSource& source, const Path& directory) {
  copy_files(source.files, directory);
  write_files(source.changed, directory);
}

}  // namespace heddle::ckpt
