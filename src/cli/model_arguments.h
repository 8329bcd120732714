#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "assembly/model_on_ranks.h"
#include "comm/agreement.h"
#include "comm/world.h"
#include "data/tokenizer/tokenizer.h"
#include "rollout/cache_options.h"
#include "runtime/context.h"

namespace CLI {
class App;
}

namespace heddle::cli {

/// The arguments of every command that loads a model to use it.
struct ModelArguments {
  std::string directory;
  std::string adapter;
  std::string dtype;   ///< Empty: float32 on the CPU, bfloat16 elsewhere.
  std::string device;  ///< Empty: assembly::usual_device().
  int threads = 0;
  std::vector<std::string> layout;  ///< parallel.*=N, kernels.*=NAME.
  bool takes_caches = false;        ///< The keys of caches_of() may stand there, too.
};

void add_model_arguments(CLI::App& command, ModelArguments& arguments);
runtime::Context context_of(const ModelArguments& arguments);
/// Adds the argument to a command that several ranks run together.
void add_layout_argument(CLI::App& command, ModelArguments& arguments);
/// rollout.state_dtype, kv_page, memory_fraction and graph_batches.
rollout::CacheOptions caches_of(const ModelArguments& arguments);
/// Adds the argument to a command of one process.
void add_kernel_argument(CLI::App& command, ModelArguments& arguments);

/// The tokenizer of the adapter or the model; one without texts where neither has any.
std::shared_ptr<const data::Tokenizer> load_tokenizer(const ModelArguments& arguments,
                                                      const assembly::ModelOnRanks& model);

/// "lm", "classify" or "embed": the head that the adapter was trained with, if it says so (none for
/// ""); else that of the directory as config.json's architectures tell it: "classify" for
/// "...ForSequenceClassification", else "lm". `asked`, unless empty, is taken instead. Throws
/// ConfigError where a language model is asked of a classifier; ModelError.
std::string head_name(const std::string& directory, const std::string& adapter,
                      const std::string& asked);

/// The file that --input means: "-" is the standard input.
std::string input_file(const std::string& argument);
/// An input file as a fact that all ranks compare.
comm::Fact input_fact(const std::string& path);
/// Meets the other ranks that a launcher started; null for one process, whose own arguments errors
/// then name. `facts`: what the ranks must have alike besides model and layout.
std::shared_ptr<comm::World> join_others(const std::string& command,
                                         const ModelArguments& arguments,
                                         const std::vector<comm::Fact>& facts);
/// Places the model of the arguments on the ranks of `world`, null for one. Throws ConfigError,
/// ModelError, DeviceError.
assembly::ModelOnRanks load(const ModelArguments& arguments, assembly::Head head,
                            assembly::Purpose purpose,
                            const std::shared_ptr<comm::World>& world = nullptr);
/// Where its tokenizer lies: the adapter's, if it comes with one (which may know more tokens); else
/// the model's.
std::filesystem::path tokenizer_directory(const ModelArguments& arguments);

}  // namespace heddle::cli
