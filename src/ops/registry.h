#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "ops/target.h"

/// One operator, several kernels, chosen once (docs/design.md 3.2).
///
/// An operator is a struct `Op` with `static constexpr const char* kName`, `struct Dims` (the
/// static dimensions that decide whether a kernel fits, after sharding) and `struct Functions` (its
/// forward and backward as plain function pointers, so that they are always chosen as a pair). A
/// kernel is one set of Functions with the platforms, the dtypes and the dimensions it works for.
namespace heddle::ops {

/// Dims of an operator whose kernels take every size.
struct AnyDims {};

/// A kernel's description, apart from rules about dimensions.
struct KernelInfo {
  std::string name;                     ///< "cpu.chunk", "cuda.sm90.chunk64", "reference".
  std::vector<Platform> platforms;      ///< Empty: all (written in ATen operators).
  std::vector<c10::ScalarType> dtypes;  ///< Dtypes of the activations it accepts.
  bool is_reference = false;            ///< Differentiable, on every platform, slow.
  bool only_by_name = false;            ///< Runs only where `kernels.<op>` names it.
  std::optional<Use> only_for = {};     ///< Runs only for this use; none: for each.
  /// Made for the shapes of some models: others are not told that it was refused, unless they name
  /// it.
  bool for_some_shapes = false;
  std::string falls_back = {};  ///< Calls that another kernel takes; empty: none.
  /// Reason why the device cannot run the kernel; none if it can. Empty: each device can.
  std::function<std::optional<std::string>(const Target&)> refuse_device = {};
  std::string op = {};  ///< Filled by Registry::add.

  /// The kernel written in ATen operators: each platform, each floating dtype.
  static KernelInfo reference();
  /// A kernel of the CPU for fp32, bf16 and fp64.
  static KernelInfo cpu(std::string name);
  /// A kernel of CUDA devices, for fp32 and bf16 unless said otherwise.
  static KernelInfo cuda(std::string name, std::vector<c10::ScalarType> dtypes = {
                                               c10::ScalarType::Float, c10::ScalarType::BFloat16});
  /// A kernel of Ascend NPUs and of the simulated one.
  static KernelInfo ascend(std::string name, std::vector<c10::ScalarType> dtypes);
};

/// A kernel's rules about its operator's dimensions; an empty rule does not apply.
template <class Dims>
struct KernelRules {
  /// Reason why the kernel cannot run with these dimensions, with the numbers; none if it can.
  std::function<std::optional<std::string>(const Dims&)> refuse = {};
  /// On-chip memory that one block of work needs, in bytes.
  std::function<std::int64_t(const Dims&)> on_chip_bytes = {};
  /// Sentences for the user of a kernel that fits: why it runs slower with these dimensions than
  /// with others near them, or in a narrower type than the model's.
  std::function<std::vector<std::string>(const Dims&)> warnings = {};
};

/// A model's request for one operator.
struct OpRequest {
  std::string op;
  std::shared_ptr<const void> dims;  ///< Op::Dims
  Use use = Use::kTraining;

  template <class Op>
  static OpRequest of(typename Op::Dims dims = {}, Use use = Use::kTraining) {
    return {Op::kName, std::make_shared<typename Op::Dims>(std::move(dims)), use};
  }
};

/// All kernels this binary holds. Filled by builtin_registry() and immutable afterwards.
class Registry {
 public:
  /// Kernels of one operator are tried in the order in which they were added; the reference comes
  /// last.
  template <class Op>
  void add(KernelInfo info, typename Op::Functions functions,
           KernelRules<typename Op::Dims> rules = {}) {
    info.op = Op::kName;
    entries_.push_back({std::move(info), std::make_shared<typename Op::Functions>(functions),
                        untyped<typename Op::Dims>(std::move(rules))});
  }

  struct Entry {
    KernelInfo info;
    std::shared_ptr<const void> functions;
    KernelRules<std::shared_ptr<const void>> rules;
  };
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  template <class Dims>
  static KernelRules<std::shared_ptr<const void>> untyped(KernelRules<Dims> rules) {
    const auto wrap = [](auto rule) {
      return [rule = std::move(rule)](const std::shared_ptr<const void>& dims) {
        return rule(*static_cast<const Dims*>(dims.get()));
      };
    };
    KernelRules<std::shared_ptr<const void>> result;
    if (rules.refuse) result.refuse = wrap(std::move(rules.refuse));
    if (rules.on_chip_bytes) result.on_chip_bytes = wrap(std::move(rules.on_chip_bytes));
    if (rules.warnings) result.warnings = wrap(std::move(rules.warnings));
    return result;
  }

  std::vector<Entry> entries_;
};

struct KernelPolicy {
  /// A kernel that goes before the registry's order.
  struct Wish {
    std::string kernel;
    bool is_needed = false;  ///< Else the registry's order follows where it does not fit.
  };

  bool allow_fallback = false;               ///< `kernels.fallback: allow`
  std::map<std::string, std::string> named;  ///< operator -> kernel name, from `kernels.<op>`
  /// operator -> wish, from `kernels.fp8`; for operators that are requested and not named.
  std::map<std::string, Wish> wishes;
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
    std::vector<std::string> warnings;
  };

  /// Chooses the first kernel that fits for each request. Throws, naming operator, kernels and
  /// reasons, DeviceError when none fits, or when on an accelerator only the reference fits
  /// although a faster kernel exists there and the policy does not allow the fallback, and
  /// ConfigError when the user's kernel does not exist or fit or is of an operator not requested,
  /// or when a needed wish does not fit.
  static KernelTable choose(const Registry& registry, const Target& target, c10::ScalarType dtype,
                            const std::vector<OpRequest>& requests,
                            const KernelPolicy& policy = {});

  template <class Op>
  const typename Op::Functions& get() const {
    return *static_cast<const typename Op::Functions*>(find(Op::kName));
  }

  const std::vector<Choice>& choices() const { return choices_; }
  /// "gated_delta_rule: cpu.chunk", one line each.
  std::vector<std::string> lines() const;
  /// Warnings: for each operator the faster kernels that do not fit, with the reasons, and what the
  /// chosen kernel itself says of these dimensions.
  std::vector<std::string> warnings() const;

 private:
  const void* find(const char* op) const;  // throws InternalError if the operator was not requested

  std::vector<Choice> choices_;
  std::map<std::string, std::shared_ptr<const void>, std::less<>> functions_;
};

/// Every kernel of this build, made on the first call.
const Registry& builtin_registry();

}  // namespace heddle::ops
