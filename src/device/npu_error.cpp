#include "device/npu_error.h"

#include <array>
#include <cctype>
#include <charconv>

#include <fmt/format.h>

namespace heddle::device {
namespace {

struct Code {
  int code;
  std::string_view meaning;
};

// rt_error_codes.h of CANN, those that a training run meets.
constexpr std::array<Code, 25> kAclCodes = {{
    {107000, "a parameter is invalid"},
    {107001, "there is no device of this number (ASCEND_RT_VISIBLE_DEVICES?)"},
    {107002, "no context is current: the device was used before it was started"},
    {107003, "the stream belongs to another context: the call came from a foreign thread"},
    {107020, "the task exceeded its time"},
    {107030, "the operator cannot run while a graph is captured"},
    {207000, "the chip or this version of CANN does not have the feature"},
    {207001, "out of device memory"},
    {207004, "there is no device; is the driver loaded?"},
    {207007, "no more events"},
    {207008, "no more streams"},
    {207018, "out of device memory"},
    {507010, "the task scheduler gives no sign of life; reset the device"},
    {507011, "a graph failed"},
    {507014, "a kernel on the AI core exceeded its time"},
    {507015, "a kernel on the AI core read or wrote where it may not"},
    {507017, "a kernel on the AI CPU exceeded its time"},
    {507018, "a kernel on the AI CPU failed"},
    {507034, "a kernel on the vector core exceeded its time"},
    {507035, "a kernel on the vector core read or wrote where it may not"},
    {507046, "the stream did not finish in time"},
    {507053, "device memory is damaged"},
    {507054, "device memory is damaged (more than one bit)"},
    {507056, "the link to another device failed"},
    {507899, "the driver failed; do its version and that of CANN fit?"},
}};

// hccl_types.h of CANN.
constexpr std::array<Code, 14> kHcclCodes = {{
    {1, "a parameter is invalid"},
    {2, "a pointer is empty"},
    {3, "out of device memory"},
    {4, "internal error"},
    {5, "HCCL does not support this"},
    {6, "a resource is missing"},
    {7, "a resource is busy: has another job the ports of HCCL_IF_BASE_PORT?"},
    {9, "a rank did not answer in time"},
    {11, "cannot connect to a rank by TCP"},
    {12, "cannot connect to a rank by RoCE"},
    {13, "the TCP transfer broke off"},
    {14, "the RoCE transfer broke off"},
    {19, "the network failed"},
    {21, "a peer reported an error"},
}};

template <std::size_t N>
std::string_view meaning_of(const std::array<Code, N>& codes, int code) {
  for (const Code& one : codes) {
    if (one.code == code) return one.meaning;
  }
  return "see the log of CANN (~/ascend/log)";
}

/// The number after `key`, 0 if there is none.
int number_after(std::string_view text, std::string_view key) {
  const std::size_t at = text.find(key);
  if (at == std::string_view::npos) return 0;
  const std::string_view rest = text.substr(at + key.size());
  const std::size_t digit = rest.find_first_of("0123456789");
  int number = 0;
  if (digit == std::string_view::npos || digit > 2) return 0;
  std::from_chars(rest.data() + digit, rest.data() + rest.size(), number);
  return number;
}

/// The first word that begins with one of these names of CANN's functions.
std::string_view operation_in(std::string_view text) {
  for (const std::string_view start : {"aclnn", "Hccl", "aclrt", "aclmdl"}) {
    for (std::size_t at = text.find(start); at != std::string_view::npos;
         at = text.find(start, at + 1)) {
      std::size_t end = at;
      while (end < text.size() && (std::isalnum(static_cast<unsigned char>(text[end])) != 0)) ++end;
      const bool is_word = at == 0 || std::isalnum(static_cast<unsigned char>(text[at - 1])) == 0;
      if (is_word && end > at + start.size()) return text.substr(at, end - at);
    }
  }
  return "an operation";
}

}  // namespace

std::optional<std::string> explain_npu_error(std::string_view message) {
  const bool is_hccl = message.find("HCCL function error") != std::string_view::npos;
  const bool is_acl = message.find("NPU function error") != std::string_view::npos ||
                      message.find("NPU error") != std::string_view::npos ||
                      (message.find("call aclnn") != std::string_view::npos &&
                       message.find("failed") != std::string_view::npos);
  if (!is_hccl && !is_acl) return std::nullopt;
  const int code = number_after(message, "error code is");
  const std::string_view operation = operation_in(message);
  if (code == 0) return fmt::format("{} failed on the NPU", operation);
  if (is_hccl)
    return fmt::format("{}: HCCL error {}: {}", operation, code, meaning_of(kHcclCodes, code));
  return fmt::format("{}: NPU error {}: {}", operation, code, meaning_of(kAclCodes, code));
}

}  // namespace heddle::device
