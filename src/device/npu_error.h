#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace heddle::device {

/// A message of torch_npu, ACL or HCCL in one line: the operation that failed, its code
/// in words, and what to do. Nothing if the message is of something else. Kernels of an NPU fail
/// asynchronously, so the operation is the one the device names, not the one that was called last.
/// Codes: acl/error_codes/rt_error_codes.h and hccl/hccl_types.h of CANN.
std::optional<std::string> explain_npu_error(std::string_view message);

}  // namespace heddle::device
