#include "ops/registry.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/errors.h"
#include "base/text.h"
#include "ops/compute_type.h"

namespace heddle::ops {

KernelInfo KernelInfo::reference() {
  return {.name = "reference", .platforms = {}, .dtypes = reference_dtypes(), .is_reference = true};
}

KernelInfo KernelInfo::cpu(std::string name) {
  return {.name = std::move(name), .platforms = {Platform::kCpu}, .dtypes = cpu_kernel_dtypes()};
}

KernelInfo KernelInfo::cuda(std::string name, std::vector<c10::ScalarType> dtypes) {
  return {.name = std::move(name), .platforms = {Platform::kCuda}, .dtypes = std::move(dtypes)};
}

KernelInfo KernelInfo::ascend(std::string name, std::vector<c10::ScalarType> dtypes) {
  return {.name = std::move(name),
          .platforms = {Platform::kAscend, Platform::kSim},
          .dtypes = std::move(dtypes)};
}

namespace {

bool is_accelerator(Platform platform) {
  return platform != Platform::kCpu && platform != Platform::kShapes;
}

bool runs_on(const KernelInfo& info, Platform platform) {
  return info.platforms.empty() ||
         std::ranges::find(info.platforms, platform) != info.platforms.end();
}

/// The conditions that one table is chosen for.
struct Chooser {
  const Registry& registry;
  const Target& target;
  c10::ScalarType dtype;
  const KernelPolicy& policy;

  std::optional<std::string> why_not(const Registry::Entry& entry, c10::ScalarType wanted,
                                     const OpRequest& request) const;
  KernelTable::Choice choose(const OpRequest& request, const Registry::Entry*& chosen) const;
  /// The kernel that `kernels.fp8` wishes for; null: none, or it does not fit, which `choice` says.
  const Registry::Entry* wished(const OpRequest& request, KernelTable::Choice& choice) const;
  [[noreturn]] void nothing_fits(const OpRequest& request, const std::string* named,
                                 const std::vector<std::string>& known,
                                 const std::vector<std::string>& refused) const;
  void require_fast(const OpRequest& request, const KernelTable::Choice& choice) const;
};

std::optional<std::string> Chooser::why_not(const Registry::Entry& entry, c10::ScalarType wanted,
                                            const OpRequest& request) const {
  const KernelInfo& info = entry.info;
  if (info.only_for && *info.only_for != request.use) {
    return fmt::format("is for {} alone",
                       *info.only_for == Use::kTraining ? "training" : "generation");
  }
  if (std::ranges::find(info.dtypes, wanted) == info.dtypes.end())
    return fmt::format("does not take {}", c10::toString(wanted));
  if (info.refuse_device) {
    if (auto reason = info.refuse_device(target)) return reason;
  }
  if (entry.rules.refuse) {
    if (auto reason = entry.rules.refuse(request.dims)) return reason;
  }
  if (entry.rules.on_chip_bytes && target.on_chip_bytes > 0) {
    const std::int64_t needed = entry.rules.on_chip_bytes(request.dims);
    if (needed > target.on_chip_bytes) {
      return fmt::format("needs {} bytes of on-chip memory, the device has {}", needed,
                         target.on_chip_bytes);
    }
  }
  return std::nullopt;
}

void Chooser::nothing_fits(const OpRequest& request, const std::string* named,
                           const std::vector<std::string>& known,
                           const std::vector<std::string>& refused) const {
  const std::string found =
      fmt::format("{} in {}; kernels of this build: {}; refused: {}", to_string(target.platform),
                  c10::toString(dtype), known.empty() ? "none" : text::join(known, ", "),
                  refused.empty() ? "none" : text::join(refused, "; "));
  if (named == nullptr) throw_error<DeviceError>("no kernel for {} on {}", request.op, found);
  throw_error<ConfigError>("kernels.{}: no kernel '{}' that fits on {}", request.op, *named, found);
}

void Chooser::require_fast(const OpRequest& request, const KernelTable::Choice& choice) const {
  if (policy.allow_fallback || !is_accelerator(target.platform)) return;
  bool faster_exists = false, half_fits = false;
  for (const Registry::Entry& entry : registry.entries()) {
    if (entry.info.op != request.op || entry.info.is_reference || entry.info.only_by_name ||
        !runs_on(entry.info, target.platform))
      continue;
    faster_exists = true;
    half_fits = half_fits || (dtype != at::kBFloat16 && !why_not(entry, at::kBFloat16, request));
  }
  if (!faster_exists) return;
  throw_error<DeviceError>(
      "{}: only the slow reference kernel fits on {} ({}); set {}kernels.fallback=allow to run "
      "with it",
      request.op, to_string(target.platform), text::join(choice.refused, "; "),
      half_fits ? "model.dtype=bfloat16 (--dtype), or " : "");
}

const Registry::Entry* Chooser::wished(const OpRequest& request,
                                       KernelTable::Choice& choice) const {
  const auto wish = policy.wishes.find(request.op);
  if (wish == policy.wishes.end() || policy.named.contains(request.op)) return nullptr;
  const auto& [kernel, is_needed] = wish->second;
  std::string reason = fmt::format("this build has none for {}", to_string(target.platform));
  for (const Registry::Entry& entry : registry.entries()) {
    if (entry.info.op != request.op || entry.info.name != kernel ||
        !runs_on(entry.info, target.platform))
      continue;
    const auto refusal = why_not(entry, dtype, request);
    if (!refusal) return &entry;
    reason = *refusal;
  }
  if (is_needed) {
    throw_error<ConfigError>(
        "kernels.fp8: {} cannot run {} on {} in {} ({}); 8-bit floats need a Hopper GPU and "
        "model.dtype=bfloat16, so leave the key out",
        request.op, kernel, to_string(target.platform), c10::toString(dtype), reason);
  }
  choice.refused.push_back(fmt::format("{}: {}", kernel, reason));
  return nullptr;
}

KernelTable::Choice Chooser::choose(const OpRequest& request,
                                    const Registry::Entry*& chosen) const {
  KernelTable::Choice choice{request.op, "", false, {}, {}};
  const auto by_user = policy.named.find(request.op);
  const std::string* named = by_user == policy.named.end() ? nullptr : &by_user->second;
  chosen = wished(request, choice);
  std::vector<std::string> known;
  for (const bool reference_pass : {false, true}) {
    for (const Registry::Entry& entry : registry.entries()) {
      const KernelInfo& info = entry.info;
      if (info.op != request.op || info.is_reference != reference_pass ||
          !runs_on(info, target.platform))
        continue;
      known.push_back(info.name);
      if (chosen != nullptr) continue;
      if (named != nullptr ? *named != info.name : info.only_by_name) continue;
      // A kernel for another use is no faster kernel that was missed.
      if (named == nullptr && info.only_for && *info.only_for != request.use) continue;
      const auto reason = why_not(entry, dtype, request);
      if (!reason) {
        chosen = &entry;
      } else if (named != nullptr || !info.for_some_shapes) {
        choice.refused.push_back(fmt::format("{}: {}", info.name, *reason));
      }
    }
  }
  if (chosen == nullptr) nothing_fits(request, named, known, choice.refused);
  choice.kernel = chosen->info.name;
  choice.is_reference = chosen->info.is_reference;
  if (chosen->rules.warnings) choice.warnings = chosen->rules.warnings(request.dims);
  if (choice.is_reference && named == nullptr) require_fast(request, choice);
  return choice;
}

}  // namespace

KernelTable KernelTable::choose(const Registry& registry, const Target& target,
                                c10::ScalarType dtype, const std::vector<OpRequest>& requests,
                                const KernelPolicy& policy) {
  for (const auto& [op, kernel] : policy.named) {
    const bool requested = std::ranges::any_of(
        requests, [&, &name = op](const OpRequest& request) { return request.op == name; });
    if (!requested)
      throw_error<ConfigError>("kernels.{}: this model has no such operator in this kind of run",
                               op);
  }
  const Chooser chooser{registry, target, dtype, policy};
  KernelTable table;
  for (const OpRequest& request : requests) {
    const Registry::Entry* chosen = nullptr;
    table.choices_.push_back(chooser.choose(request, chosen));
    table.functions_[request.op] = chosen->functions;
  }
  return table;
}

std::vector<std::string> KernelTable::lines() const {
  std::vector<std::string> lines;
  for (const Choice& choice : choices_)
    lines.push_back(fmt::format("{}: {}", choice.op, choice.kernel));
  return lines;
}

std::vector<std::string> KernelTable::warnings() const {
  std::vector<std::string> lines;
  for (const Choice& choice : choices_) {
    if (!choice.refused.empty()) {
      lines.push_back(fmt::format("{} runs {}: no faster kernel fits ({})", choice.op,
                                  choice.kernel, text::join(choice.refused, "; ")));
    }
    for (const std::string& warning : choice.warnings)
      lines.push_back(fmt::format("{} runs {}: {}", choice.op, choice.kernel, warning));
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
