#pragma once

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "testing/paths.h"
#include "testing/process.h"
#include "testing/temporary_directory.h"

namespace heddle::testing {

/// Starts the program with all that it prints in `log`.
inline pid_t start_heddle(const std::vector<std::string>& arguments,
                          const std::filesystem::path& log,
                          const std::map<std::string, std::string>& environment = {}) {
  return start_heddle(arguments, log, log, environment);
}

/// A folder with tiny models and rows, in which runs are launched.
class LaunchedRuns {
 public:
  LaunchedRuns() {
    std::ofstream rows(directory_ / "train.jsonl");
    for (int i = 0; i < 64; ++i) {
      std::string text = "row " + std::to_string(i);
      for (int j = 0; j < i * 7 % 11; ++j) text += " holds " + std::to_string(i * 37 % 91 + j);
      rows << nlohmann::json{{"text", text}} << "\n";
    }
    std::ofstream pairs(directory_ / "pairs.jsonl");
    for (int i = 0; i < 64; ++i) {
      const auto text = [&](int j) {
        return "text " + std::to_string(i * 7 + j) +
               std::string(static_cast<std::size_t>((i + j) % 5), '!');
      };
      nlohmann::json row = {
          {"query", text(0)}, {"positive", text(1)}, {"negatives", nlohmann::json::array()}};
      for (int j = 0; j < i % 3; ++j) row["negatives"].push_back(text(2 + j));
      pairs << row << "\n";
    }
    std::ofstream answers(directory_ / "answers.jsonl");
    for (int i = 0; i < 64; ++i) {
      const std::string prompt(static_cast<std::size_t>(i % 3 == 0 ? 40 : 2), '?');
      answers << nlohmann::json{{"prompt", prompt + std::to_string(i)},
                                {"completion", "is " + std::to_string(i * i)}}
              << "\n";
    }
    // One token with loss at the end of each row.
    std::ofstream endings(directory_ / "endings.jsonl");
    for (int i = 0; i < 24; ++i) {
      std::vector<int> ids, labels(static_cast<std::size_t>(24 + i * 7 % 23), -100);
      for (std::size_t t = 0; t < labels.size(); ++t)
        ids.push_back(100 + (i * 37 + static_cast<int>(t) * 11) % 900);
      labels.back() = ids.back();
      endings << nlohmann::json{{"input_ids", ids}, {"labels", labels}} << "\n";
    }
    std::ofstream preferences(directory_ / "preferences.jsonl");
    for (int i = 0; i < 64; ++i) {
      const std::string prompt(static_cast<std::size_t>(i % 4 == 0 ? 24 : 2), '?');
      preferences << nlohmann::json{{"prompt", prompt + std::to_string(i)},
                                    {"chosen", " is " + std::to_string(i * i)},
                                    {"rejected", " was " + std::string(i % 5 * 3, '!')}}
                  << "\n";
    }
    std::ofstream labelled(directory_ / "labelled.jsonl");
    for (int i = 0; i < 64; ++i) {
      labelled << nlohmann::json{{"text", "number " + std::to_string(i * 37)}, {"label", i % 3}}
               << "\n";
    }
    for (std::ofstream* file : {&rows, &pairs, &answers, &endings, &preferences, &labelled})
      file->close();
    for (const char* name : {"train", "pairs", "answers", "endings", "preferences", "labelled"})
      write_first_rows(std::string(name) + ".jsonl");
  }

  /// The folder of a model: dense, moe, qwen3, qwen3_vl or qwen3_moe, made when it is first asked
  /// for, or one that the test has made.
  std::filesystem::path model(const std::string& name) const {
    std::filesystem::path folder = directory() / name;
    if (std::filesystem::exists(folder / "config.json")) return folder;
    if (name == "dense") make_model(name, false);
    if (name == "moe") make_model(name, true);
    if (name == "qwen3" || name == "qwen3_vl")
      make_model(name, false, {{"model_type", name == "qwen3" ? "qwen3" : "qwen3_vl_text"}});
    // A dense layer among those with experts.
    if (name == "qwen3_moe") {
      make_model(name, true,
                 {{"model_type", "qwen3_moe"}, {"norm_topk_prob", true}, {"mlp_only_layers", {1}}});
    }
    return folder;
  }

  /// A model directory of random weights; `changes` replaces parts of its configuration. The
  /// program makes each configuration once for all tests of this process: its start takes longer
  /// than all else here.
  void make_model(const std::string& name, bool moe,
                  const nlohmann::ordered_json& changes = nlohmann::ordered_json::object()) const {
    nlohmann::ordered_json config = {{"model_type", moe ? "qwen3_5_moe_text" : "qwen3_5_text"},
                                     {"vocab_size", 4096},
                                     {"hidden_size", 32},
                                     {"intermediate_size", 48},
                                     {"num_hidden_layers", 4},
                                     {"num_attention_heads", 4},
                                     {"num_key_value_heads", 2},
                                     {"head_dim", 16},
                                     {"linear_num_key_heads", 4},
                                     {"linear_num_value_heads", 8},
                                     {"linear_key_head_dim", 16},
                                     {"linear_value_head_dim", 16},
                                     {"num_experts", 8},
                                     {"num_experts_per_tok", 2},
                                     {"moe_intermediate_size", 16},
                                     {"shared_expert_intermediate_size", 24},
                                     {"output_router_logits", moe},
                                     {"router_aux_loss_coef", 0.01},
                                     {"initializer_range", 0.1},
                                     {"tie_word_embeddings", !moe}};
    config.update(changes);
    const std::filesystem::path folder = directory() / name;
    std::map<std::string, std::string>& made = made_models()[config.dump()];
    if (!made.empty()) {
      std::filesystem::create_directory(folder);
      for (const auto& [file, bytes] : made)
        std::ofstream(folder / file, std::ios::binary) << bytes;
      return;
    }
    files::write_atomically(directory() / (name + ".json"), config.dump());
    const int status =
        wait_for(start_heddle({"init", "--config", (directory() / (name + ".json")).string(),
                               "--tokenizer", testing::source_path("examples/tokenizer-4k"),
                               "--output", folder.string(), "--seed", "3", "--dtype", "float32"},
                              directory() / "init.log"));
    EXPECT_EQ(status, 0) << files::read(directory() / "init.log");
    if (status != 0) return;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      made[entry.path().filename()] = files::read(entry.path());
  }

  const std::filesystem::path& directory() const { return directory_.path(); }

  /// A few rows of a file, for evaluations that need no more.
  std::filesystem::path first_rows(const std::string& name) const {
    return directory() / ("first-" + name);
  }

  /// The overrides of a run of ten steps. A micro-batch holds several packs: fewer collectives take
  /// less time.
  std::vector<std::string> overrides(const std::string& run, const std::string& model,
                                     const std::vector<std::string>& more) const {
    std::vector<std::string> all = {"model.path=" + this->model(model).string(),
                                    "data.train=" + (directory() / "train.jsonl").string(),
                                    "data.max_length=48",
                                    "data.truncation=keep_start",
                                    "train.global_batch_size=8",
                                    "train.micro_batch_tokens=192",
                                    "train.max_steps=10",
                                    "optim.lr=1e-4",
                                    "ckpt.every=0",
                                    "log.report=false",
                                    "log.tensorboard=false",
                                    "device.threads=1",
                                    "parallel.timeout_s=120",
                                    "train.output_dir=" + (directory() / run).string()};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  /// `heddle launch --nproc ranks -- pt ...`, or `heddle pt ...` for 0 ranks; returns the exit
  /// status. What it printed is in log_of(run).
  int run(const std::string& run, std::int64_t ranks, const std::string& model,
          const std::vector<std::string>& more,
          const std::map<std::string, std::string>& environment = {}) const {
    return wait_for(start_heddle(command(run, ranks, model, more), log_of(run), environment));
  }
  std::vector<std::string> command(const std::string& run, std::int64_t ranks,
                                   const std::string& model,
                                   const std::vector<std::string>& more) const {
    std::vector<std::string> words;
    if (ranks > 0) {
      words = {"launch",
               "--nproc",
               std::to_string(ranks),
               "--log-dir",
               (directory() / (run + ".logs")).string(),
               "--"};
    }
    words.push_back("pt");
    for (std::string& word : overrides(run, model, more)) words.push_back(std::move(word));
    return words;
  }

  std::filesystem::path log_of(const std::string& run) const {
    return directory() / (run + ".log");
  }
  std::string printed(const std::string& run) const { return files::read(log_of(run)); }

  struct Step {
    double loss, grad_norm, tokens;
    double entropy, eval_loss, aux_loss, expert_load, grad_cos_prev;  ///< 0 where there is none
  };
  std::vector<Step> metrics(const std::string& run) const {
    std::vector<Step> steps;
    std::ifstream file(directory() / run / "metrics.jsonl");
    // A row without its end is being written.
    for (std::string line; std::getline(file, line) && !file.eof();) {
      const auto row = nlohmann::json::parse(line);
      steps.push_back({row.at("loss"), row.at("grad_norm"), row.at("tokens"),
                       row.value("entropy", 0.0), row.value("eval_loss", 0.0),
                       row.value("aux_loss", 0.0), row.value("moe_load_max_over_mean_avg", 0.0),
                       row.value("grad_cos_prev", 0.0)});
    }
    return steps;
  }

 private:
  /// Bytes by file of the models that were made, by their config.json.
  static std::map<std::string, std::map<std::string, std::string>>& made_models() {
    static std::map<std::string, std::map<std::string, std::string>> made;
    return made;
  }

  void write_first_rows(const std::string& name) const {
    std::ifstream all(directory() / name);
    std::ofstream few(first_rows(name));
    std::string row;
    for (int i = 0; i < 13 && std::getline(all, row); ++i) few << row << "\n";
  }

  TemporaryDirectory directory_;
};

}  // namespace heddle::testing
