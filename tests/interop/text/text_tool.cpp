// Drives the tokenizer and the chat template for the comparison scripts beside it:
//   text_tool encode DIR IN OUT [THREADS]   IN, OUT: records of a 64-bit length and so many bytes /
//   int32 ids text_tool decode DIR IN OUT             the reverse; with StreamDecoder's pieces
//   checked against decode() text_tool render CASES OUT              CASES: a JSON line each
//   {template, messages, tools, add_generation_prompt, variables}
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iostream>
#include <map>

#include "base/errors.h"
#include "base/files.h"
#include "data/jinja/chat_template.h"
#include "data/tokenizer/tokenizer.h"

namespace {

using heddle::data::ChatTemplate;
using heddle::data::Tokenizer;

std::vector<std::string> read_records(const std::string& path) {
  const std::string bytes = heddle::files::read(path);
  std::vector<std::string> records;
  for (std::size_t at = 0; at + 8 <= bytes.size();) {
    std::uint64_t length;
    std::memcpy(&length, bytes.data() + at, 8);
    records.push_back(bytes.substr(at + 8, length));
    at += 8 + length;
  }
  return records;
}

void write_record(std::ofstream& out, const void* data, std::uint64_t bytes) {
  out.write(reinterpret_cast<const char*>(&bytes), 8);
  out.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void encode(const std::string& directory, const std::string& in, const std::string& out,
            int threads) {
  auto begin = std::chrono::steady_clock::now();
  const auto tokenizer = Tokenizer::load(directory);
  const double load_s = seconds_since(begin);
  const double load_cpu_s = static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
  const std::vector<std::string> texts = read_records(in);
  const std::clock_t cpu_begin = std::clock();
  begin = std::chrono::steady_clock::now();
  const auto ids = tokenizer->encode_batch(texts, threads);
  const double encode_s = seconds_since(begin);
  const double encode_cpu_s = static_cast<double>(std::clock() - cpu_begin) / CLOCKS_PER_SEC;
  std::size_t bytes = 0;
  for (const std::string& text : texts) bytes += text.size();
  std::printf(
      "{\"load_s\": %.4f, \"load_cpu_s\": %.4f, \"encode_s\": %.4f, \"encode_cpu_s\": %.4f, "
      "\"bytes\": %zu}\n",
      load_s, load_cpu_s, encode_s, encode_cpu_s, bytes);
  std::ofstream file(out, std::ios::binary);
  for (const auto& row : ids) write_record(file, row.data(), row.size() * sizeof(row[0]));
}

void decode(const std::string& directory, const std::string& in, const std::string& out) {
  const auto tokenizer = Tokenizer::load(directory);
  std::ofstream file(out, std::ios::binary);
  for (const std::string& record : read_records(in)) {
    std::vector<std::int32_t> ids(record.size() / sizeof(std::int32_t));
    std::memcpy(ids.data(), record.data(), record.size());
    const std::string text = tokenizer->decode(ids);
    heddle::data::StreamDecoder stream(tokenizer);
    std::string joined;
    for (const std::int32_t id : ids) joined += stream.push(id);
    joined += stream.finish();
    if (joined != text)
      heddle::throw_error<heddle::InternalError>("streamed text differs from decoded text");
    write_record(file, text.data(), text.size());
  }
}

void render(const std::string& in, const std::string& out) {
  std::ifstream file(in);
  std::ofstream results(out);
  std::map<std::string, ChatTemplate> parsed;
  for (std::string line; std::getline(file, line);) {
    const auto row = nlohmann::ordered_json::parse(line);
    nlohmann::ordered_json result;
    try {
      const std::string source = row["template"];
      auto found = parsed.find(source);
      if (found == parsed.end()) {
        found = parsed.emplace(source, ChatTemplate::parse(source, row.value("name", "template")))
                    .first;
      }
      ChatTemplate::Options options;
      options.tools = row["tools"];
      options.add_generation_prompt = row["add_generation_prompt"];
      options.variables = row["variables"];
      const ChatTemplate::Rendered rendered = found->second.render(row["messages"], options);
      result["text"] = rendered.text;
      result["spans"] = rendered.generation_spans;
    } catch (const heddle::DataError& error) {
      result["error"] = error.what();
    }
    results << result.dump() << '\n';
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    if (arguments.size() >= 4 && arguments[0] == "encode") {
      encode(arguments[1], arguments[2], arguments[3],
             arguments.size() > 4 ? std::stoi(arguments[4]) : 1);
    } else if (arguments.size() == 4 && arguments[0] == "decode") {
      decode(arguments[1], arguments[2], arguments[3]);
    } else if (arguments.size() == 3 && arguments[0] == "render") {
      render(arguments[1], arguments[2]);
    } else {
      std::cerr << "usage: text_tool encode|decode DIR IN OUT | render CASES OUT\n";
      return 2;
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
