// A worker as a user might write one, with every fault on request: the completion says what to do.
#include <fcntl.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

using nlohmann::json;

namespace {

/// Rows with meta {"turns": n} have n turns, all but the last worth a quarter.
std::optional<json> turn_of(const json& sample) {
  const json& meta = sample.at("meta");
  if (!meta.is_object() || !meta.contains("turns")) return {};
  const json past = sample.value("turns", json::array());
  if (past.size() + 1 == meta.at("turns")) return json{{"reward", 1}};
  for (const json& turn : past) {
    if (turn.at("observation") != " again:") return json{{"error", "another observation"}};
  }
  return json{{"observation", " again:"}, {"reward", 0.25}};
}

std::string made_at_end;
void make(const std::string& file) { std::ofstream(file) << "x"; }
/// Returns once the file is there.
void wait_for(const std::string& file) {
  const int watch = ::inotify_init1(IN_CLOEXEC);
  ::inotify_add_watch(watch, std::filesystem::path(file).parent_path().c_str(), IN_CREATE);
  char events[4096];
  while (!std::filesystem::exists(file) && ::read(watch, events, sizeof events) > 0) continue;
  ::close(watch);
}

/// Rows with meta {"waits_for": file}, {"makes": file}, {"race": file} or {"fails": text}. In a
/// race the first completion to come has two turns; the others wait until its second one is there.
std::optional<json> met(const json& sample) {
  const json& meta = sample.at("meta");
  if (!meta.is_object()) return {};
  if (meta.contains("fails")) return json{{"error", meta.at("fails")}};
  if (meta.contains("waits_for")) wait_for(meta.at("waits_for").get<std::string>());
  if (meta.contains("makes")) make(meta.at("makes").get<std::string>());
  if (meta.contains("race")) {
    const auto file = meta.at("race").get<std::string>();
    if (sample.contains("turns") && !sample.at("turns").empty()) {
      make(file + "-second");
    } else if (::open((file + "-first").c_str(), O_CREAT | O_EXCL, 0600) >= 0) {
      return json{{"observation", " again:"}};
    } else {
      wait_for(file + "-second");
    }
  }
  return json{{"reward", 1}};
}

json judged(const json& sample) {
  if (const auto answer = turn_of(sample)) return *answer;
  if (const auto answer = met(sample)) return *answer;
  const auto completion = sample.at("completion").get<std::string>();
  const auto argument = completion.substr(completion.find(' ') + 1);
  if (completion == "die") ::_exit(3);
  if (completion == "sleep") ::pause();
  if (completion == "child") {
    // A process of the worker's own, which must not outlive it.
    if (::fork() == 0) {
      std::ofstream(sample.at("truth").get<std::string>()) << ::getpid() << std::endl;
      ::pause();
    }
    ::pause();
  }
  if (completion == "rubbish") return "rubbish";
  if (completion == "close-output") {
    ::close(STDOUT_FILENO);
    ::pause();
  }
  if (completion == "endless-line") {
    while (std::cout << std::string(1 << 20, 'x')) continue;
  }
  if (completion == "flood") {
    for (int i = 0; i < 20'000; ++i) std::cerr << "a line of a loop that prints " << i << '\n';
  }
  if (completion.starts_with("child-holds ")) {
    // A process of the worker's own that lives on and keeps this file open.
    const int held = ::open(argument.c_str(), O_WRONLY | O_CLOEXEC);
    if (::fork() == 0) {
      for (;;) ::pause();
    }
    ::close(held);
    return {{"reward", 1}};
  }
  if (completion == "spin") {
    for (volatile bool spins = true; spins;) continue;
  }
  if (completion == "memory") {
    const bool is_limited =
        ::mmap(nullptr, std::size_t{1} << 33, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED;
    return {{"reward", is_limited ? 1 : 0}};
  }
  if (completion.starts_with("die-once")) {
    if (!std::ifstream(argument)) {
      std::ofstream(argument) << "x";
      ::_exit(3);
    }
  }
  if (completion.starts_with("variable "))
    return {{"reward", std::getenv(argument.c_str()) == nullptr ? 0 : 1}};
  if (completion.starts_with("make ")) make(argument);
  if (completion.starts_with("make-at-end ")) made_at_end = argument;
  if (completion.starts_with("wait-for ")) wait_for(argument);
  if (completion == "error") return {{"error", "no such problem"}};
  if (completion == "nan" || completion == "NaN") return {{"reward", nullptr}};
  if (completion == "pid") return {{"reward", ::getpid()}};
  if (completion.size() < 8) std::cerr << "judged " << completion << std::endl;
  return {{"reward", static_cast<double>(completion.size())},
          {"parts", {{"length", completion.size()}}}};
}

struct Episode {
  json meta;
  int sum = 0, turns = 0;
};
std::map<long, Episode> episodes;

/// Appends to the file of meta {"notes": file}.
void note(const Episode& episode, const char* what) {
  if (episode.meta.is_object() && episode.meta.contains("notes"))
    std::ofstream(episode.meta.at("notes").get<std::string>(), std::ios::app) << what << std::flush;
}

/// The prompt of meta {"opens": text or messages} or {"opens_apart": true}; else of the row.
json opened(const Episode& episode, long number) {
  const json& meta = episode.meta;
  if (!meta.is_object()) return {{"observation", "start " + std::to_string(episode.sum)}};
  if (meta.contains("opens_apart")) return {{"observation", "episode " + std::to_string(number)}};
  if (!meta.contains("opens")) return json::object();
  return {{meta.at("opens").is_string() ? "observation" : "messages", meta.at("opens")}};
}

/// Rows with meta {"turns": n} have n turns, all but the last worth a quarter. With {"replies":
/// text} a tool says it after the first turn. Others have a sum that actions bring to zero.
json stepped(const json& request) {
  const auto operation = request.at("op").get<std::string>();
  const auto number = request.at("episode").get<long>();
  Episode& episode = episodes[number];
  if (operation == "close") {
    if (episode.meta.is_object() && episode.meta.contains("dies_at_close")) ::_exit(3);
    note(episode, "-");
    episodes.erase(number);
    return json::object();
  }
  if (operation == "reset") {
    const json& row = request.at("row");
    episode = {row.at("meta"), row.at("answer").is_number() ? row.at("answer").get<int>() : 0};
    note(episode, "+");
    return opened(episode, number);
  }
  if (request.at("action") == "die") ::_exit(3);
  ++episode.turns;
  const json& meta = episode.meta;
  if (meta.is_object() && meta.contains("replies") && episode.turns == 1) {
    return {{"messages", {{{"role", "tool"}, {"content", meta.at("replies")}}}},
            {"reward", request.at("message").at("role") == "assistant" ? 0.5 : 0}};
  }
  if (meta.is_object()) {
    if (meta.value("dies_at", 0) == episode.turns) ::_exit(3);
    if (meta.contains("dies_once") &&
        ::open(meta.at("dies_once").get<std::string>().c_str(), O_CREAT | O_EXCL, 0600) >= 0)
      ::_exit(3);
    if (meta.value("turns", 1) <= episode.turns) return {{"reward", 1}, {"done", true}};
    return {{"observation", " again:"}, {"reward", 0.25}};
  }
  if (request.at("action").get_ref<const std::string&>().starts_with("last-words "))
    return {{"reward", 1}, {"observation", "on"}};
  episode.sum -= std::stoi(request.at("action").get<std::string>());
  return {{"observation", std::to_string(episode.sum)},
          {"reward", episode.sum == 0 ? 1 : 0},
          {"done", episode.sum <= 0}};
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    const json request = json::parse(line);
    json answer = request.contains("op") ? stepped(request) : judged(request);
    if (answer.is_object()) answer["id"] = request.at("id");
    std::string text = answer.dump();
    // Python's json.dumps writes it so, which is no JSON.
    if (request.value("completion", "") == "NaN") text.replace(text.find("null"), 4, "NaN");
    std::cout << text << std::endl;
    const std::string action = request.value("action", "");
    if (action.starts_with("last-words ")) {
      // Ends while nobody asks it anything. Whoever sees the end of the pipe finds the output
      // closed.
      if (::open(action.substr(action.find(' ') + 1).c_str(), O_WRONLY | O_CLOEXEC) < 0) return 4;
      ::close(STDOUT_FILENO);
      ::_exit(3);
    }
  }
  if (!made_at_end.empty()) make(made_at_end);
}
