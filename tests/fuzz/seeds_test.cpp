// The fuzz programs' functions on their seeds and on seeded changes of these: what a minute of
// libFuzzer would find first. libFuzzer itself needs clang and time (fuzz/README.md).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#define TARGET(name)                                                      \
  extern "C" int fuzz_##name(const std::uint8_t* data, std::size_t size); \
  extern "C" __attribute__((weak)) int begin_##name(int* argc, char*** argv);
HEDDLE_FUZZ_TARGETS
#undef TARGET

namespace heddle {
namespace {

namespace fs = std::filesystem;

struct Target {
  std::string name;
  int (*run)(const std::uint8_t*, std::size_t);
  int (*begin)(int*, char***);  ///< Null where the program has none.
};

const std::vector<Target>& targets() {
#define TARGET(name) {#name, fuzz_##name, begin_##name},
  static const std::vector<Target> all = {HEDDLE_FUZZ_TARGETS};
#undef TARGET
  return all;
}

std::vector<std::string> seeds_of(const std::string& target) {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(fs::path(HEDDLE_FUZZ_SEEDS) / target))
    paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> seeds;
  for (const auto& path : paths) {
    std::ifstream file(path, std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return seeds;
}

/// A seed with one to four bytes replaced, cut short, or with a part of it repeated.
std::string changed(std::string seed, std::mt19937& random) {
  const auto place = [&] {
    return std::uniform_int_distribution<std::size_t>(0, seed.size() - 1)(random);
  };
  switch (random() % 4) {
    case 0:
      return seed.substr(0, place());
    case 1: {
      const std::size_t from = place();
      return seed.insert(place(), seed.substr(from, random() % 64));
    }
    default:
      for (auto n = random() % 4 + 1; n > 0; --n) seed[place()] = static_cast<char>(random());
      return seed;
  }
}

class ReadersUnderFuzzing : public ::testing::TestWithParam<Target> {
 protected:
  void SetUp() override {
    if (GetParam().begin != nullptr) {
      int argc = 0;
      char** argv = nullptr;
      ASSERT_EQ(GetParam().begin(&argc, &argv), 0);
    }
    seeds_ = seeds_of(GetParam().name);
    ASSERT_FALSE(seeds_.empty()) << "fuzz/seeds/" << GetParam().name << " has no file";
  }

  /// Anything but a refusal that the program expects ends the process or throws.
  void run(const std::string& input) {
    EXPECT_EQ(GetParam().run(reinterpret_cast<const std::uint8_t*>(input.data()), input.size()), 0);
  }

  std::vector<std::string> seeds_;
};

TEST_P(ReadersUnderFuzzing, TakeTheirSeeds) {
  run("");
  for (const auto& seed : seeds_) run(seed);
}

TEST_P(ReadersUnderFuzzing, TakeChangesOfTheirSeeds) {
  constexpr int kChanges = 500;  // of each seed
  std::mt19937 random(20);
  for (const auto& seed : seeds_)
    for (int i = 0; i < kChanges && !seed.empty(); ++i) run(changed(seed, random));
}

INSTANTIATE_TEST_SUITE_P(Each, ReadersUnderFuzzing, ::testing::ValuesIn(targets()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace heddle
