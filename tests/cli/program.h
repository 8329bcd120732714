// The program itself, started on a folder with a small model and rows.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/files.h"
#include "cli/run_command.h"
#include "testing/paths.h"
#include "testing/process.h"
#include "testing/small_config.h"
#include "testing/temporary_directory.h"

namespace heddle::cli {

namespace fs = std::filesystem;
using Arguments = std::vector<std::string>;

/// A folder with a small model, good rows, and whatever a case spoils.
class Folder {
 public:
  Folder() {
    write("config.json", testing::small_config().dump());
    const Outcome made =
        run_command({"init", "--config", at("config.json"), "--tokenizer",
                     testing::source_path("examples/tokenizer-4k"), "--output", at("model")});
    EXPECT_EQ(made.status, 0) << made.err;
    std::string rows;
    for (int i = 0; i < 64; ++i)
      rows +=
          R"({"text": "row )" + std::to_string(i) + R"( holds )" + std::to_string(7 * i) + "\"}\n";
    write("train.jsonl", rows);
  }

  std::string at(const std::string& name) const { return (directory_ / name).string(); }
  void write(const std::string& name, const std::string& text) const {
    files::write_atomically(directory_ / name, text);
  }
  /// Puts the pattern's replacement into a file that must hold it.
  void replace(const std::string& name, const std::string& from, const std::string& to) const {
    std::string text = files::read(directory_ / name);
    const std::size_t place = text.find(from);
    ASSERT_NE(place, std::string::npos) << name;
    write(name, text.replace(place, from.size(), to));
  }
  /// Makes the first value of a tensor of the model a NaN.
  void spoil(const std::string& tensor) const {
    std::string file = files::read(directory_ / "model/model.safetensors");
    std::uint64_t length = 0;
    std::memcpy(&length, file.data(), sizeof length);
    const auto header = nlohmann::json::parse(file.substr(8, length));
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(file.data() + 8 + length + header.at(tensor)["data_offsets"][0].get<std::size_t>(),
                &nan, sizeof nan);
    write("model/model.safetensors", file);
  }
  /// A training command; later arguments win.
  Arguments train(Arguments more = {}) const {
    more.insert(more.begin(), {"pt", "model.path=" + at("model"), "data.train=" + at("train.jsonl"),
                               "data.max_length=64", "train.max_steps=3",
                               "train.global_batch_size=2", "train.output_dir=" + at("run"),
                               "log.report=false", "log.tensorboard=false", "device.threads=1"});
    return more;
  }
  Arguments with_rows(const std::string& rows, Arguments more = {}) const {
    write("bad.jsonl", rows);
    more.push_back("data.train=" + at("bad.jsonl"));
    return train(more);
  }

 private:
  testing::TemporaryDirectory directory_;
};

/// Starts the program with its output in files of the folder.
inline pid_t start(const Folder& folder, const Arguments& arguments,
                   const std::string& standard_output = "") {
  return testing::start_heddle(arguments,
                               standard_output.empty() ? folder.at("stdout") : standard_output,
                               folder.at("stderr"));
}

using testing::wait_for;

/// Output of the program on its standard error.
inline std::string message(const Folder& folder) { return files::read(folder.at("stderr")); }

}  // namespace heddle::cli
