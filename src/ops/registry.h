#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

/// One operator, several kernels, chosen once (docs/design.md 3.2).
///
/// An operator is a struct `Op` with `static constexpr const char* kName` and `struct Functions`
/// (its forward and backward as plain function pointers, so that they are always chosen as a pair).
/// A kernel is one set of Functions with the device, the dtypes and the static dimensions it works
/// for.
namespace heddle::ops {

/// Static dimensions that decide whether a kernel fits, after sharding: {"head_k_dim", 128},
/// {"num_v_heads", 32}.
using Dims = std::map<std::string, std::int64_t, std::less<>>;

struct KernelInfo {
  std::string op;                         ///< Filled by Registry::add.
  std::string name;                       ///< "cpu.chunk", "cuda.sm90.chunk64", "reference".
  std::optional<c10::DeviceType> device;  ///< None: any device (written in ATen operators).
  std::vector<c10::ScalarType> dtypes;    ///< Dtypes of the activations it accepts.
  bool is_reference = false;              ///< Differentiable, on every device, slow.
  /// Why the kernel cannot run with these dimensions, with the numbers; none if it can. Empty: it
  /// always can.
  std::function<std::optional<std::string>(const Dims&)> refuse;
  /// On-chip memory that one block of work needs, in bytes. Empty: not limited.
  std::function<std::int64_t(const Dims&)> on_chip_bytes;
  /// Why the kernel, though it fits, runs slower with these dimensions than with others near them.
  std::function<std::optional<std::string>(const Dims&)> slowed_by = {};
};

/// All kernels this binary holds. Filled by builtin_registry() and immutable afterwards.
class Registry {
 public:
  /// Kernels of one operator are tried in the order in which they were added; the reference comes
  /// last.
  template <class Op>
  void add(KernelInfo info, typename Op::Functions functions) {
    info.op = Op::kName;
    entries_.push_back({std::move(info), std::make_shared<typename Op::Functions>(functions)});
  }

  struct Entry {
    KernelInfo info;
    std::shared_ptr<const void> functions;
  };
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
};

/// What one model asks of one operator.
struct OpRequest {
  std::string op;
  std::vector<Dims> dims;  ///< Every set of dimensions it is called with; a kernel must fit all.
};

struct KernelPolicy {
  bool allow_fallback = false;  ///< `kernels.fallback: allow`
  std::map<std::string, std::string>
      chosen_by_user;                    ///< operator -> kernel name, from `kernels.<op>`
  std::int64_t on_chip_limit_bytes = 0;  ///< 0: unknown
};

/// The kernels of one model on one rank: filled once from its dimensions after sharding, then
/// frozen.
class KernelTable {
 public:
  struct Choice {
    std::string op;
    std::string kernel;
    bool is_reference = false;
    std::vector<std::string> refused;  ///< "name: reason" of the faster kernels that do not fit
    std::vector<std::string> slowed_by;
  };

  /// Chooses the first kernel that fits for each request. Throws, naming operator, kernels and
  /// reasons, DeviceError when none fits, or when on an accelerator only the reference fits
  /// although a faster kernel exists there and the policy does not allow the fallback, and
  /// ConfigError when the user's kernel does not exist or fit or is of an operator not requested.
  static KernelTable choose(const Registry& registry, c10::DeviceType device, c10::ScalarType dtype,
                            const std::vector<OpRequest>& requests,
                            const KernelPolicy& policy = {});

  template <class Op>
  const typename Op::Functions& get() const {
    return *static_cast<const typename Op::Functions*>(find(Op::kName));
  }

  const std::vector<Choice>& choices() const { return choices_; }
  /// "gated_delta_rule: cpu.chunk", one line each.
  std::vector<std::string> lines() const;
  /// Of the operators that run slower for a kernel that does not fit, or dimensions that do not
  /// suit it, a line each: the kernel that runs, those that would have come before it, and why they
  /// cannot.
  std::vector<std::string> losses() const;

 private:
  const void* find(const char* op) const;  // throws InternalError if the operator was not requested

  std::vector<Choice> choices_;
  std::map<std::string, std::shared_ptr<const void>, std::less<>> functions_;
};

/// Every kernel of this build, made on the first call.
const Registry& builtin_registry();

}  // namespace heddle::ops
