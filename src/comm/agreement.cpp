#include "comm/agreement.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <numeric>
#include <utility>

#include "base/errors.h"
#include "base/text.h"
#include "comm/look.h"
#include "comm/world.h"

namespace heddle::comm {
namespace {

using Clock = std::chrono::steady_clock;

// A message stays readable: the first differences, values and characters say where to look.
constexpr std::size_t kShownFacts = 4, kShownValues = 3, kShownCharacters = 100;

constexpr char kSame = '=', kDifferent = '!';

void append_piece(std::string& out, const std::string& piece) {
  out += std::to_string(piece.size()) + ":" + piece;
}

std::string encode(const std::vector<Fact>& facts) {
  std::string out;
  for (const Fact& fact : facts) {
    for (const std::string* piece : {&fact.name, &fact.value, &fact.shown})
      append_piece(out, *piece);
  }
  return out;
}

std::vector<Fact> decode(const std::string& text) {
  std::size_t at = 0;
  const auto piece = [&] {
    const std::size_t colon = text.find(':', at);
    const std::size_t length = std::stoul(text.substr(at, colon - at));
    at = colon + 1 + length;
    return text.substr(colon + 1, length);
  };
  std::vector<Fact> facts;
  while (at < text.size()) {
    std::string name = piece(), value = piece();
    facts.push_back({std::move(name), std::move(value), piece()});
  }
  return facts;
}

/// "rank 3", "ranks 0, 2 to 5".
std::string list_ranks(const std::vector<std::int64_t>& ranks) {
  std::vector<std::string> runs;
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    runs.push_back(end - i == 1 ? std::to_string(ranks[i])
                                : fmt::format("{} to {}", ranks[i], ranks[end - 1]));
    i = end;
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + text::list_some(runs);
}

std::string shown(const Fact* fact) {
  if (fact == nullptr) return "not there";
  const std::string& text = fact->shown.empty() ? fact->value : fact->shown;
  if (text.empty()) return "''";
  return text.size() <= kShownCharacters ? text
                                         : fmt::format("{}...", text.substr(0, kShownCharacters));
}

/// The ranks that say the same, and one of their facts; null where they say nothing.
struct Party {
  const Fact* fact = nullptr;
  std::vector<std::int64_t> ranks;
};

bool is_same(const Fact* a, const Fact* b) {
  return a == nullptr || b == nullptr ? a == b : a->value == b->value;
}

std::vector<Party> parties_of(const std::vector<const Fact*>& ranks) {
  std::vector<Party> parties;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    auto party = std::find_if(parties.begin(), parties.end(),
                              [&](const Party& p) { return is_same(p.fact, ranks[r]); });
    if (party == parties.end()) party = parties.insert(parties.end(), {ranks[r], {}});
    party->ranks.push_back(static_cast<std::int64_t>(r));
  }
  return parties;
}

std::string describe(const std::string& name, const std::vector<Party>& parties) {
  std::vector<std::string> values;
  for (const Party& party : parties) {
    if (values.size() == kShownValues) {
      values.emplace_back("something else on the others");
      break;
    }
    values.push_back(fmt::format("{} on {}", shown(party.fact), list_ranks(party.ranks)));
  }
  const std::string last = values.back();
  values.pop_back();
  return fmt::format("{} is {} and {}", name, text::join(values, ", "), last);
}

/// The value of a key that another rank sets. Throws CommError as soon as one fails, or at the
/// deadline.
std::string wait(const World& world, const std::string& key, const std::string& what) {
  const auto deadline = Clock::now() + world.timeout();
  for (;;) {
    if (auto found = world.store().wait(key, kLookForFailures)) return *found;
    if (const auto failure = world.failure_of_another()) {
      // Rank 0 fails over what it has just said.
      if (auto found = world.store().find(key)) return *found;
      throw_error<CommError>("{}", *failure);
    }
    if (Clock::now() < deadline) continue;
    std::vector<std::int64_t> all(static_cast<std::size_t>(world.size()));
    std::iota(all.begin(), all.end(), 0);
    throw_error<CommError>("rank {} waited {:.3g} s (parallel.timeout_s) for {}: {}", world.rank(),
                           world.timeout().count(), what, world.diagnose(all));
  }
}

/// Rank 0's finding when it has read what all say under `key`.
std::string verdict_on(const World& world, const std::string& key, const std::string& subject) {
  std::vector<std::vector<Fact>> all;
  for (std::int64_t r = 0; r < world.size(); ++r) {
    all.push_back(decode(wait(world, key + std::to_string(r),
                              fmt::format("rank {} to say what its {} is", r, subject))));
  }
  return disagreement(all);
}

}  // namespace

Fact content_fact(std::string name, std::string hash, const std::string& where) {
  constexpr std::size_t kShownDigits = 8;  // of 32: enough to see that two differ
  std::string shown = fmt::format("{} (content {})", where, hash.substr(0, kShownDigits));
  return {std::move(name), std::move(hash), std::move(shown)};
}

std::string disagreement(const std::vector<std::vector<Fact>>& ranks) {
  // In the order in which the ranks name them, those of rank 0 first.
  std::vector<std::string> names;
  std::map<std::string, std::vector<const Fact*>> facts;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    for (const Fact& fact : ranks[r]) {
      const auto [place, is_new] = facts.try_emplace(fact.name, ranks.size(), nullptr);
      if (is_new) names.push_back(fact.name);
      place->second[r] = &fact;
    }
  }
  std::vector<std::string> differences;
  for (const std::string& name : names) {
    const std::vector<Party> parties = parties_of(facts.at(name));
    if (parties.size() > 1) differences.push_back(describe(name, parties));
  }
  const std::size_t more = differences.size() - std::min(differences.size(), kShownFacts);
  differences.resize(differences.size() - more);
  std::string text = text::join(differences, "; ");
  if (more > 0) text += fmt::format("; and {} more", more);
  return text;
}

void require_agreement(World& world, const std::string& subject, const std::vector<Fact>& facts) {
  const std::string about = "agreement/" + subject;
  const std::string key = fmt::format("{}/{}/", about, world.count_group(about));
  world.store().set(key + std::to_string(world.rank()), encode(facts));
  std::string verdict;
  if (world.rank() == 0) {
    const std::string found = verdict_on(world, key, subject);
    verdict = (found.empty() ? kSame : kDifferent) + found;
    world.store().set(key + "verdict", verdict);
  } else {
    verdict =
        wait(world, key + "verdict", fmt::format("all ranks to say what their {} is", subject));
  }
  if (verdict.front() == kSame) return;
  throw_error<ConfigError>("the {} is not the same on all ranks: {}", subject, verdict.substr(1));
}

}  // namespace heddle::comm
