// Speed of the tokenizer and of chat rendering on the example data. Compared with the `tokenizers`
// library by bench/data/tokenizer_speed.py.
#include <benchmark/benchmark.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "base/threads.h"
#include "data/jinja/chat_template.h"
#include "data/tokenizer/tokenizer.h"

namespace {

using heddle::data::ChatTemplate;
using heddle::data::Tokenizer;

const std::string kSource = HEDDLE_SOURCE_DIR;

std::shared_ptr<const Tokenizer> tokenizer() {
  return Tokenizer::load(kSource + "/examples/tokenizer-4k");
}

std::vector<nlohmann::ordered_json> rows() {
  std::vector<nlohmann::ordered_json> out;
  std::ifstream file(kSource + "/examples/instructions/train.jsonl");
  for (std::string line; std::getline(file, line);) {
    out.push_back(nlohmann::ordered_json::parse(line));
  }
  return out;
}

/// Every conversation as rendered text: 1.3 MB.
std::vector<std::string> texts() {
  const auto chat = ChatTemplate::parse(*tokenizer()->chat_template(), "example");
  std::vector<std::string> out;
  for (const auto& row : rows()) out.push_back(chat.render(row["messages"], {}).text);
  return out;
}

void BM_EncodeBatch(benchmark::State& state) {
  const auto reader = tokenizer();
  const auto input = texts();
  std::size_t bytes = 0;
  for (const std::string& text : input) bytes += text.size();
  for (auto _ : state) {
    benchmark::DoNotOptimize(reader->encode_batch(input, static_cast<int>(state.range(0))));
  }
  state.SetBytesProcessed(static_cast<std::int64_t>(bytes * state.iterations()));
}
BENCHMARK(BM_EncodeBatch)->Arg(1)->Arg(2)->Arg(4)->Unit(benchmark::kMillisecond)->UseRealTime();

void BM_EncodeOneLongWord(benchmark::State& state) {
  const auto reader = tokenizer();
  const std::string word(static_cast<std::size_t>(state.range(0)), 'a');
  for (auto _ : state) benchmark::DoNotOptimize(reader->encode(word));
  state.SetBytesProcessed(static_cast<std::int64_t>(word.size() * state.iterations()));
}
BENCHMARK(BM_EncodeOneLongWord)->RangeMultiplier(10)->Range(100, 1000000);

void BM_Decode(benchmark::State& state) {
  const auto reader = tokenizer();
  const auto ids = reader->encode_batch(texts(), 1);
  std::size_t count = 0;
  for (const auto& row : ids) count += row.size();
  for (auto _ : state) {
    for (const auto& row : ids) benchmark::DoNotOptimize(reader->decode(row));
  }
  state.SetItemsProcessed(static_cast<std::int64_t>(count * state.iterations()));
}
BENCHMARK(BM_Decode)->Unit(benchmark::kMillisecond);

void BM_RenderConversation(benchmark::State& state) {
  const auto chat = ChatTemplate::parse(*tokenizer()->chat_template(), "example");
  const auto input = rows();
  std::size_t at = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(chat.render(input[at++ % input.size()]["messages"], {}));
  }
  state.SetItemsProcessed(state.iterations());
}
BENCHMARK(BM_RenderConversation);

void BM_LoadTokenizer(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(tokenizer());
}
BENCHMARK(BM_LoadTokenizer)->Unit(benchmark::kMillisecond);

}  // namespace

BENCHMARK_MAIN();
