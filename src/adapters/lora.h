#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "adapters/dropout.h"
#include "adapters/expert_lora.h"
#include "nn/expert_weights.h"
#include "nn/linear.h"
#include "runtime/context.h"

namespace heddle::adapters {

struct LoraOptions {
  std::int64_t rank = 16;
  double alpha = 32;
  bool rslora = false;  ///< Scale by alpha / sqrt(rank) instead of alpha / rank.
  double dropout = 0;   ///< Of the adapter's input, while training.
  std::uint64_t seed = 0;
  std::vector<std::string> excluded;  ///< Globs of modules that "all-linear" leaves out.

  double scaling() const;
};

/// y = x W^T + scaling (dropout(x) A^T) B^T. "LoRA" (arXiv 2106.09685). A [rank,in], B [out,rank].
class Lora : public nn::LinearAdapter {
 public:
  /// `module` is the name of the linear layer without ".weight"; A and B are divided as its weight.
  Lora(std::string module, std::int64_t in_features, std::int64_t out_features, double scaling,
       std::int64_t rank, double dropout, std::uint64_t seed,
       const nn::Placement& weight_placement = {});

  std::vector<at::Tensor> forward(const ops::KernelTable& kernels, const nn::LinearInput& x,
                                  const std::vector<nn::Linear*>& layers) override;
  void visit_parameters(const std::function<void(nn::Parameter&)>& visit) override;

  const std::string& module() const { return module_; }
  nn::Parameter& a() { return a_; }
  nn::Parameter& b() { return b_; }
  std::int64_t rank() const { return a_.global_shape()[0]; }
  double scaling() const { return scaling_; }
  /// A uniform in +-1/sqrt(in) (Kaiming with a = sqrt 5, as PEFT), B zero; keyed by seed, name and
  /// index.
  void initialize();
  /// See DropoutScope.
  void set_dropout(const Dropout& dropout) { dropout_ = dropout; }
  /// What of its input x [T,in] the pass that runs drops; nothing if it drops nothing.
  std::optional<ops::DropoutMask> mask_of(const at::Tensor& x);
  /// scaling B A, [out,in], in at least fp32: what merging adds to the weight.
  at::Tensor delta() const;

 private:
  std::string module_;
  nn::Parameter a_, b_;
  double scaling_, dropout_probability_;
  std::uint64_t seed_;
  Dropout dropout_;
  at::Tensor features_;            ///< [in] of this rank, their numbers in the whole input.
  bool features_in_runs_ = false;  ///< See ops::DropoutMask.
};

/// What of a model adapters can sit on.
struct Adaptable {
  std::function<void(const std::function<void(nn::Linear&)>&)> visit_linears;
  std::function<void(const std::function<void(nn::ExpertWeights&)>&)> visit_expert_weights;
};

/// All adapters of one model, in the order of its layers.
class LoraSet {
 public:
  /// Puts a Lora on every linear layer whose module name matches a target: a glob over the whole
  /// name, or the name or dotted suffix itself ("q_proj", "linear_attn.in_proj_qkv"), or
  /// "all-linear" for every projection outside routed experts, router, head and classifier, as PEFT
  /// does; and an ExpertLora on the stacked matrices of routed experts whose name matches one of
  /// `target_parameters` in the same ways. Throws ConfigError naming targets that match nothing.
  LoraSet(const Adaptable& model, const std::vector<std::string>& targets,
          const std::vector<std::string>& target_parameters, const LoraOptions& options,
          const runtime::Context& context);

  /// One adapter as it was read from a file.
  struct Module {
    std::string name;  ///< Of the linear module, or of the experts' parameter.
    std::int64_t rank;
    double scaling;
  };
  /// Puts adapters on exactly these modules. Throws ModelError naming those that the model does not
  /// have.
  LoraSet(const Adaptable& model, const std::vector<Module>& modules, const LoraOptions& options,
          const runtime::Context& context);

  const std::vector<std::shared_ptr<Lora>>& adapters() const { return adapters_; }
  const std::vector<std::shared_ptr<ExpertLora>>& expert_adapters() const { return experts_; }
  /// Draws the start of every adapter: nothing is changed yet.
  void initialize();
  const LoraOptions& options() const { return options_; }
  std::vector<std::string> modules() const;
  void visit_parameters(const std::function<void(nn::Parameter&)>& visit);

 private:
  friend class DropoutScope;
  void set_dropout(const Dropout& dropout);
  void add(nn::Linear& linear, std::int64_t rank, double scaling, const runtime::Context& context);
  void add(nn::ExpertWeights& weights, std::int64_t rank, double scaling,
           const runtime::Context& context);
  void choose_linears(const Adaptable& model, const std::vector<std::string>& targets,
                      const runtime::Context& context);
  void choose_experts(const Adaptable& model, const std::vector<std::string>& targets,
                      const runtime::Context& context);

  LoraOptions options_;
  std::vector<std::shared_ptr<Lora>> adapters_;
  std::vector<std::shared_ptr<ExpertLora>> experts_;
};

/// Dropout of the passes in its life, forward and backward (a recomputation draws the same);
/// without one there is none. `adapters` may be null.
class DropoutScope {
 public:
  DropoutScope(LoraSet* adapters, const Dropout& dropout) : adapters_(adapters) {
    if (adapters_ != nullptr) adapters_->set_dropout(dropout);
  }
  ~DropoutScope() {
    if (adapters_ != nullptr) adapters_->set_dropout({});
  }
  DropoutScope(const DropoutScope&) = delete;
  DropoutScope& operator=(const DropoutScope&) = delete;

 private:
  LoraSet* adapters_;
};

/// The module name of a parameter: without ".weight".
std::string module_of(const std::string& parameter);

}  // namespace heddle::adapters
