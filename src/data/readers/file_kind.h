#pragma once

#include <string>
#include <string_view>

namespace heddle::data {

/// Bytes of a file that tell its kind: tar's mark is the last of all, at byte 257.
constexpr std::size_t kKindBytes = 512;

/// Throws DataError that names the kind and the way to convert it where the first bytes are those
/// of a file that holds no rows as text: an archive, another compression than gzip, zstd and xz,
/// Parquet, Arrow, UTF-16, a web page, a pointer of Git LFS, ... `name` is the file in messages.
void refuse_other_kinds(std::string_view head, const std::string& name);

}  // namespace heddle::data
