#pragma once

#include <cstdint>

#include "sync/manifest.h"

/// Buckets on their way, in words of 64 bits, as every carrier knows them: the bytes that the
/// manifest lays out, then a trailer: their checksum, which the version does not enter, and version
/// and number. Nothing here makes the host wait for a device.
namespace heddle::sync {

/// Memory for any bucket, zeros.
at::Tensor bucket_memory(const Manifest& manifest, c10::Device device);
/// The words of bucket `number` in such memory, trailer included.
at::Tensor on_wire(const at::Tensor& memory, const Manifest& manifest, std::int64_t number);
/// The bytes before the trailer.
at::Tensor payload(const at::Tensor& wire);

/// Writes the trailer. Returns the checksum, 0-d.
at::Tensor seal(const at::Tensor& wire, std::int64_t version, std::int64_t number);
/// The checksum of what has come, and whether the trailer says another one: 0-d int64, 0 or 1.
struct Inspection {
  at::Tensor sum, is_damaged;
};
Inspection inspect(const at::Tensor& wire, std::int64_t version, std::int64_t number);

}  // namespace heddle::sync
