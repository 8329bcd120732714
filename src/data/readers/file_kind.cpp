#include "data/readers/file_kind.h"

#include "base/errors.h"

namespace heddle::data {
namespace {

struct Kind {
  std::size_t offset;
  std::string_view mark;
  std::string_view name;
  std::string_view remedy;  ///< {} stands for the file
};

using namespace std::string_view_literals;

constexpr Kind kKinds[] = {
    {4, "1AY&SY"sv, "a bzip2 file", "decompress it: bzip2 -dc '{}' > data.jsonl"},
    {0, "\x5d\x00\x00"sv, "an lzma file", "decompress it: xz -dc '{}' > data.jsonl"},
    {0, "\x04\x22\x4d\x18"sv, "an lz4 file", "decompress it: lz4 -dc '{}' > data.jsonl"},
    {0, "\x1f\x9d"sv, "a compress (.Z) file", "decompress it: gzip -dc '{}' > data.jsonl"},
    {0, "PK\x03\x04"sv, "a zip archive", "unpack it: unzip '{}'"},
    {0, "PK\x05\x06"sv, "an empty zip archive", "give the file itself"},
    {0, "7z\xbc\xaf\x27\x1c"sv, "a 7-Zip archive", "unpack it: 7z x '{}'"},
    {0, "Rar!\x1a\x07"sv, "a rar archive", "unpack it: unrar x '{}'"},
    {257, "ustar"sv, "a tar archive", "unpack it: tar xf '{}'"},
    // Read from files of their own, by their first bytes (arrow_records).
    {0, "PAR1"sv, "a Parquet file",
     "give the name of the file itself, neither packed nor as a pipe"},
    {0, "ARROW1"sv, "an Arrow file",
     "give the name of the file itself, neither packed nor as a pipe"},
    {0, "\xff\xff\xff\xff"sv, "an Arrow stream", "give it as a file whose name ends in .arrow"},
    {0, "Obj\x01"sv, "an Avro file", "convert it to JSON Lines, for example with fastavro"},
    {0, "SQLite format 3"sv, "an SQLite database",
     "convert it: sqlite3 '{}' with .mode json, then jq -c '.[]'"},
    {0, "\x89HDF"sv, "an HDF5 file", "convert it to JSON Lines"},
    {0, "\x93NUMPY"sv, "a NumPy array",
     "write rows of {{\"input_ids\": [...]}} as JSON Lines instead"},
    {0, "MMIDIDX"sv, "an index of Megatron",
     "write rows of {{\"input_ids\": [...]}} as JSON Lines instead"},
    {0, "\x80\x04\x95"sv, "a Python pickle", "write its rows as JSON Lines with Python"},
    {0, "%PDF-"sv, "a PDF file", "take the text out: pdftotext '{}'"},
    {0, "\xd0\xcf\x11\xe0"sv, "an old Excel or Word file", "save it as CSV in UTF-8"},
    {0, "\xff\xfe\x00\x00"sv, "a text in UTF-32",
     "convert it: iconv -f UTF-32 -t UTF-8 '{}' > NEW"},
    {0, "\xff\xfe"sv, "a text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 '{}' > NEW"},
    {0, "\xfe\xff"sv, "a text in UTF-16", "convert it: iconv -f UTF-16 -t UTF-8 '{}' > NEW"},
    {0, "{\x00"sv, "a text in UTF-16", "convert it: iconv -f UTF-16LE -t UTF-8 '{}' > NEW"},
    {0, "\x00{"sv, "a text in UTF-16", "convert it: iconv -f UTF-16BE -t UTF-8 '{}' > NEW"},
    {0, "version https://git-lfs"sv, "a pointer of Git LFS, not the data",
     "fetch the data: git lfs pull"},
};

}  // namespace

void refuse_other_kinds(std::string_view head, const std::string& name) {
  for (const Kind& kind : kKinds) {
    if (kind.offset > head.size() || !head.substr(kind.offset).starts_with(kind.mark)) continue;
    throw_error<DataError>(
        "{}: row 1 cannot be read: this is {}, expected JSON Lines, a JSON list, CSV, TSV or text "
        "(plain, gzip, zstd or xz); {}",
        name, kind.name, fmt::format(fmt::runtime(kind.remedy), name));
  }
}

}  // namespace heddle::data
