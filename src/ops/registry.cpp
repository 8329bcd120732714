#include "ops/registry.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/errors.h"
#include "base/text.h"

namespace heddle::ops {
namespace {

std::optional<std::string> why_not(const KernelInfo& info, c10::ScalarType dtype,
                                   const OpRequest& request, const KernelPolicy& policy) {
  if (std::find(info.dtypes.begin(), info.dtypes.end(), dtype) == info.dtypes.end()) {
    return fmt::format("does not take {}", c10::toString(dtype));
  }
  for (const Dims& dims : request.dims) {
    if (info.refuse) {
      if (auto reason = info.refuse(dims)) return reason;
    }
    if (info.on_chip_bytes && policy.on_chip_limit_bytes > 0) {
      const std::int64_t needed = info.on_chip_bytes(dims);
      if (needed > policy.on_chip_limit_bytes) {
        return fmt::format("needs {} bytes of on-chip memory, the device has {}", needed,
                           policy.on_chip_limit_bytes);
      }
    }
  }
  return std::nullopt;
}

}  // namespace

KernelTable KernelTable::choose(const Registry& registry, c10::DeviceType device,
                                c10::ScalarType dtype, const std::vector<OpRequest>& requests,
                                const KernelPolicy& policy) {
  KernelTable table;
  for (const auto& [op, kernel] : policy.chosen_by_user) {
    const bool requested =
        std::any_of(requests.begin(), requests.end(),
                    [&, &name = op](const OpRequest& r) { return r.op == name; });
    if (!requested) throw_error<ConfigError>("kernels.{}: this model has no such operator", op);
  }
  for (const OpRequest& request : requests) {
    Choice choice{request.op, "", false, {}, {}};
    const auto by_user = policy.chosen_by_user.find(request.op);
    const Registry::Entry* chosen = nullptr;
    std::vector<std::string> known;
    bool faster_exists = false, wants_half = false;
    for (const bool reference_pass : {false, true}) {
      for (const Registry::Entry& entry : registry.entries()) {
        const KernelInfo& info = entry.info;
        if (info.op != request.op || info.is_reference != reference_pass) continue;
        if (info.device && *info.device != device) continue;
        known.push_back(info.name);
        faster_exists = faster_exists || !info.is_reference;
        if (chosen != nullptr) continue;
        if (by_user != policy.chosen_by_user.end() && by_user->second != info.name) continue;
        if (const auto reason = why_not(info, dtype, request, policy)) {
          choice.refused.push_back(fmt::format("{}: {}", info.name, *reason));
          wants_half = wants_half ||
                       (dtype != at::kBFloat16 && !why_not(info, at::kBFloat16, request, policy));
        } else {
          chosen = &entry;
        }
      }
    }
    if (chosen == nullptr) {
      const std::string found = fmt::format(
          "{} in {}; kernels of this build: {}; refused: {}", c10::DeviceTypeName(device, true),
          c10::toString(dtype), known.empty() ? "none" : text::join(known, ", "),
          choice.refused.empty() ? "none" : text::join(choice.refused, "; "));
      if (by_user == policy.chosen_by_user.end())
        throw_error<DeviceError>("no kernel for {} on {}", request.op, found);
      throw_error<ConfigError>("kernels.{}: no kernel '{}' that fits on {}", request.op,
                               by_user->second, found);
    }
    choice.kernel = chosen->info.name;
    choice.is_reference = chosen->info.is_reference;
    if (chosen->info.slowed_by) {
      for (const Dims& dims : request.dims) {
        if (const auto reason = chosen->info.slowed_by(dims)) choice.slowed_by.push_back(*reason);
      }
    }
    if (choice.is_reference && faster_exists && device != c10::DeviceType::CPU &&
        !policy.allow_fallback && by_user == policy.chosen_by_user.end()) {
      throw_error<DeviceError>(
          "{}: only the slow reference kernel fits on {} ({}); set {}kernels.fallback=allow to run "
          "with it",
          request.op, c10::DeviceTypeName(device, true), text::join(choice.refused, "; "),
          wants_half ? "model.dtype=bfloat16 (--dtype), or " : "");
    }
    table.functions_[request.op] = chosen->functions;
    table.choices_.push_back(std::move(choice));
  }
  return table;
}

std::vector<std::string> KernelTable::lines() const {
  std::vector<std::string> lines;
  for (const Choice& choice : choices_)
    lines.push_back(fmt::format("{}: {}", choice.op, choice.kernel));
  return lines;
}

std::vector<std::string> KernelTable::losses() const {
  std::vector<std::string> lines;
  for (const Choice& choice : choices_) {
    if (!choice.refused.empty()) {
      lines.push_back(fmt::format("{} runs {}: no faster kernel fits ({})", choice.op,
                                  choice.kernel, text::join(choice.refused, "; ")));
    }
    if (!choice.slowed_by.empty()) {
      lines.push_back(fmt::format("{} runs {} slower than it could: {}", choice.op, choice.kernel,
                                  text::join(choice.slowed_by, "; ")));
    }
  }
  return lines;
}

const void* KernelTable::find(const char* op) const {
  const auto it = functions_.find(op);
  if (it == functions_.end())
    throw_error<InternalError>("operator {} was not requested at start-up", op);
  return it->second.get();
}

}  // namespace heddle::ops
