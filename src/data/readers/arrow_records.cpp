#include "data/readers/arrow_records.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>
#include <utility>

#include "base/text.h"
#include "data/arrow/arrow_rows.h"
#include "data/readers/byte_source.h"

namespace heddle::data {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLibrary = "libheddle_arrow.so";
/// Names another folder with Arrow's libraries than those that the library looks in by itself.
constexpr const char* kFolderVariable = "HEDDLE_ARROW_DIR";

/// The library beside the program, else where this build made it.
fs::path library_path() {
  std::error_code failed;
  const fs::path beside = fs::read_symlink("/proc/self/exe", failed).parent_path() / kLibrary;
  if (!failed && fs::exists(beside)) return beside;
  return HEDDLE_ARROW_LIBRARY;
}

/// Arrow's libraries of the folder that the user names. Those that are loaded already are taken by
/// what is loaded after them.
void load_named_libraries(const std::string& folder, std::string& failure) {
  for (const char* name : {"libarrow.so.", "libparquet.so."}) {
    std::error_code failed;
    fs::path found;
    for (const auto& entry : fs::directory_iterator(folder, failed)) {
      if (entry.path().filename().string().starts_with(name)) found = entry.path();
    }
    if (found.empty()) {
      failure = fmt::format("{} names {}, which holds no {}*", kFolderVariable, folder, name);
    } else if (dlopen(found.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
      failure = dlerror();
    }
  }
}

struct Library {
  const HeddleArrow* functions = nullptr;
  std::string failure;
};

Library load() {
  Library library;
  const fs::path path = library_path();
  if (path.empty() || !fs::exists(path)) {
    library.failure = fmt::format("{} was not built or is not beside the program", kLibrary);
    return library;
  }
  const char* const folder = std::getenv(kFolderVariable);
  if (folder != nullptr && *folder != '\0') load_named_libraries(folder, library.failure);
  if (!library.failure.empty()) return library;
  void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    library.failure = dlerror();
    return library;
  }
  void* const symbol = dlsym(handle, "heddle_arrow");
  if (symbol != nullptr) library.functions = reinterpret_cast<decltype(&heddle_arrow)>(symbol)();
  if (library.functions == nullptr || library.functions->interface != kHeddleArrowInterface) {
    library.functions = nullptr;
    library.failure = fmt::format("{} is that of another version of Heddle", path.string());
  }
  return library;
}

/// Loaded once, when the first such file is opened.
const HeddleArrow& functions(const std::string& name) {
  static const Library library = load();
  if (library.functions == nullptr) {
    throw_error<DataError>(
        "{}: Parquet and Arrow files need Arrow's C++ libraries: pip install pyarrow=={} beside "
        "Heddle, or set {} to the folder 'pyarrow' of such an installation; or convert the file: "
        "python3 -c \"import datasets; datasets.load_dataset('{}', data_files='{}')['train']"
        ".to_json('data.jsonl')\" ({})",
        name, HEDDLE_PYARROW_VERSION, kFolderVariable,
        name.ends_with(".parquet") ? "parquet" : "arrow", name, library.failure);
  }
  return *library.functions;
}

class ArrowRecords : public RecordReader {
 public:
  ArrowRecords(const fs::path& path, std::size_t max_bytes)
      : name_(ByteSource::name_of(path)),
        max_bytes_(max_bytes),
        file_bytes_(static_cast<double>(fs::file_size(path))),
        functions_(functions(name_)) {
    rows_ = functions_.open(path.c_str(), error());
    if (rows_ == nullptr) throw_error<DataError>("{}: cannot be read: {}", name_, message_.data());
  }
  ~ArrowRecords() override { functions_.close(rows_); }
  ArrowRecords(const ArrowRecords&) = delete;
  ArrowRecords& operator=(const ArrowRecords&) = delete;

  bool next(std::string& json) override {
    if (ended_) return false;
    const char* text = nullptr;
    std::size_t bytes = 0;
    const int got = functions_.next(rows_, &text, &bytes, error());
    ended_ = got == 0 || got == -2;
    if (got == 0) return false;
    ++row_;
    if (got == -2) {
      throw_error<DataError>("{}:{}: the file cannot be read on: {}", name_, row_, message_.data());
    }
    // Who reads can go on after these two.
    if (got == -1) throw_error<UnusableRow>("{}:{}: {}", name_, row_, message_.data());
    if (bytes > max_bytes_) {
      throw_error<UnusableRow>("{}:{}: row is longer than {}", name_, row_,
                               text::format_bytes(static_cast<double>(max_bytes_)));
    }
    json.assign(text, bytes);
    return true;
  }
  std::int64_t line() const override { return row_; }
  std::int64_t blank_lines() const override { return 0; }
  std::uint64_t bytes_consumed() const override {
    return static_cast<std::uint64_t>(functions_.fraction(rows_) * file_bytes_);
  }
  const std::string& name() const override { return name_; }

 private:
  HeddleArrowError error() { return {message_.data(), message_.size()}; }

  std::string name_;
  std::size_t max_bytes_;
  double file_bytes_;
  const HeddleArrow& functions_;
  HeddleArrowRows* rows_ = nullptr;
  std::array<char, 1024> message_{};
  std::int64_t row_ = 0;
  bool ended_ = false;
};

}  // namespace

bool is_arrow_file(const fs::path& path) {
  std::error_code failed;
  if (!fs::is_regular_file(path, failed)) return false;
  std::array<char, 6> head{};
  std::ifstream file(path, std::ios::binary);
  file.read(head.data(), head.size());
  const std::string_view bytes(head.data(), static_cast<std::size_t>(file.gcount()));
  const std::string ending = path.extension().string();
  const bool is_named_stream = ending == ".arrow" || ending == ".arrows";
  return bytes.starts_with("PAR1") || bytes == "ARROW1" ||
         (is_named_stream && bytes.starts_with("\xff\xff\xff\xff"));
}

std::unique_ptr<RecordReader> open_arrow_file(const fs::path& path, std::size_t max_bytes) {
  return std::make_unique<ArrowRecords>(path, max_bytes);
}

}  // namespace heddle::data
