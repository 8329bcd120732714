#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "adapters/expert_lora.h"
#include "nn/adapters.h"
#include "nn/expert_weights.h"
#include "nn/linear.h"
#include "nn/low_rank.h"
#include "runtime/context.h"

namespace heddle::adapters {

struct LoraOptions {
  std::int64_t rank = 16;
  double alpha = 32;
  bool rslora = false;  ///< Scale by alpha / sqrt(rank) instead of alpha / rank.
  double dropout = 0;   ///< Probability of dropping an element of the adapter's input in training.
  std::uint64_t seed = 0;
  nn::ExpertFactors expert_factors = nn::ExpertFactors::kPairs;
  std::vector<std::string> excluded;  ///< Globs of modules that "all-linear" leaves out.

  double scaling() const;
};

/// The adapter of one linear layer. "LoRA" (arXiv 2106.09685).
class Lora : public nn::LowRank {
 public:
  /// `module` is the name of the linear layer without ".weight".
  Lora(std::string module, std::int64_t in_features, std::int64_t out_features, double scaling,
       std::int64_t rank, double dropout, std::uint64_t seed,
       const nn::Placement& weight_placement = {});

  const std::string& module() const { return module_; }
  /// A uniform in +-1/sqrt(in) (Kaiming with a = sqrt 5, as PEFT), B zero; keyed by seed, name and
  /// index.
  void initialize();
  /// scaling B A, [out,in], in at least fp32: what merging adds to the weight.
  at::Tensor delta() const;

 private:
  std::string module_;
  std::uint64_t seed_;
};

/// The parts of a model that adapters can sit on.
struct Adaptable {
  std::function<void(const std::function<void(nn::Linear&)>&)> visit_linears;
  std::function<void(const std::function<void(nn::ExpertWeights&)>&)> visit_expert_weights;
};

/// One set of adapters of a model, in the order of its layers. A model may have several; the pass
/// says which rows have which.
class LoraSet : public nn::AdapterSet {
 public:
  /// A Lora for every linear layer whose module name matches a target: a glob over the whole name,
  /// or the name or dotted suffix itself ("q_proj", "linear_attn.in_proj_qkv"), or "all-linear" for
  /// every projection outside routed experts, router, head and classifier, as PEFT does; and an
  /// ExpertLora for the stacked matrices of routed experts whose name matches one of
  /// `target_parameters` in the same ways. Throws ConfigError naming targets that match nothing.
  LoraSet(const Adaptable& model, const std::vector<std::string>& targets,
          const std::vector<std::string>& target_parameters, const LoraOptions& options,
          const runtime::Context& context);

  /// One adapter as it was read from a file.
  struct Module {
    std::string name;  ///< Name of the linear module, or of the experts' parameter.
    std::int64_t rank;
    double scaling;
  };
  /// Adapters for exactly these modules. Throws ModelError naming those that the model does not
  /// have.
  LoraSet(const Adaptable& model, const std::vector<Module>& modules, const LoraOptions& options,
          const runtime::Context& context);
  LoraSet(const LoraSet&) = delete;
  LoraSet& operator=(const LoraSet&) = delete;

  const std::vector<std::unique_ptr<Lora>>& adapters() const { return adapters_; }
  const std::vector<std::unique_ptr<ExpertLora>>& expert_adapters() const { return experts_; }
  /// Draws the start of every adapter: nothing is changed yet.
  void initialize();
  const LoraOptions& options() const { return options_; }
  std::vector<std::string> modules() const;
  void visit_parameters(const std::function<void(nn::Parameter&)>& visit) const;

 private:
  void add(nn::Linear& linear, std::int64_t rank, double scaling, const runtime::Context& context);
  void add(nn::ExpertWeights& weights, std::int64_t rank, double scaling,
           const runtime::Context& context);
  void choose_linears(const Adaptable& model, const std::vector<std::string>& targets,
                      const runtime::Context& context);
  void choose_experts(const Adaptable& model, const std::vector<std::string>& targets,
                      const runtime::Context& context);

  LoraOptions options_;
  std::vector<std::unique_ptr<Lora>> adapters_;
  std::vector<std::unique_ptr<ExpertLora>> experts_;
};

/// The key of the dropout masks of a layer's adapter.
std::uint64_t dropout_key(std::uint64_t seed, const std::string& module);

}  // namespace heddle::adapters
