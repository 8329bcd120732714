#include "data/readers/token_row.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "data/json/json_text.h"
#include "data/readers/row_fields.h"

namespace heddle::data {
namespace {

using namespace row_fields;

/// Masks of TRL and other trainers: 1 where a token carries loss.
constexpr const char* kLossMasks[] = {"completion_mask", "assistant_masks", "assistant_mask",
                                      "loss_mask"};

void check_length(const ordered_json& list, const std::string& field, std::size_t length,
                  const FieldNames& fields) {
  if (!list.is_array()) fail(field, "is a JSON {}, expected a list", json_text::type_name(list));
  if (list.size() != length) {
    fail(field, "has {} entries but '{}' has {}", list.size(), fields.input_ids, length);
  }
}

/// A list of 0 and 1, or of false and true, as long as the ids; empty if the field is absent.
std::vector<bool> parse_mask(const ordered_json& value, const std::string& field,
                             std::size_t length, const FieldNames& fields) {
  std::vector<bool> mask;
  const ordered_json* list = find(value, field);
  if (list == nullptr) return mask;
  check_length(*list, field, length, fields);
  mask.reserve(length);
  for (std::size_t i = 0; i < length; ++i) {
    const ordered_json& entry = (*list)[i];
    const bool is_one = entry == 1 || entry == true;
    if (!is_one && !(entry == 0 || entry == false)) {
      fail(fmt::format("{}[{}]", field, i), "is {}, expected 0 or 1{}", json_text::dump(entry),
           field == "attention_mask"
               ? "; lengths of sequences that were packed together go into 'seq_lengths'"
               : "");
    }
    mask.push_back(is_one);
  }
  return mask;
}

std::vector<std::int64_t> parse_lengths(const ordered_json& list, std::size_t tokens,
                                        const FieldNames& fields) {
  const std::string field = "seq_lengths";
  if (!list.is_array()) fail(field, "is a JSON {}, expected a list", json_text::type_name(list));
  std::vector<std::int64_t> lengths;
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const bool fits = list[i].is_number_integer() && list[i] > 0 && list[i] <= tokens;
    if (!fits) {
      fail(fmt::format("{}[{}]", field, i), "is {}, expected the tokens of a sequence",
           json_text::dump(list[i]));
    }
    lengths.push_back(list[i].get<std::int64_t>());
    sum += lengths.back();
  }
  if (sum != static_cast<std::int64_t>(tokens)) {
    fail(field, "adds up to {} tokens but '{}' has {}", sum, fields.input_ids, tokens);
  }
  return lengths;
}

/// Sequences by positions that begin anew at 0, as padding-free batches have them.
std::vector<std::int64_t> lengths_of_positions(const ordered_json& list, std::size_t tokens,
                                               const FieldNames& fields) {
  const std::string field = "position_ids";
  check_length(list, field, tokens, fields);
  std::vector<std::int64_t> lengths;
  for (std::size_t i = 0; i < tokens; ++i) {
    if (list[i] == 0) {
      lengths.push_back(1);
    } else if (!lengths.empty() && list[i] == lengths.back()) {
      ++lengths.back();
    } else {
      fail(fmt::format("{}[{}]", field, i),
           "is {}, expected {}: positions count from 0 in each sequence", json_text::dump(list[i]),
           lengths.empty() ? "0" : fmt::format("0 or {}", lengths.back()));
    }
  }
  return lengths;
}

/// Cuts padding off the ends of what each token has.
void leave_out_padding(const std::vector<bool>& attended, Row& row) {
  const auto first = std::find(attended.begin(), attended.end(), true);
  const auto last = std::find(attended.rbegin(), attended.rend(), true).base();
  if (first == attended.end()) fail("attention_mask", "is 0 for every token");
  if (const auto hole = std::find(first, last, false); hole != last) {
    fail(fmt::format("attention_mask[{}]", hole - attended.begin()),
         "is 0 between tokens that are not padding; only padding at the ends can be left out");
  }
  const auto keep = [&](auto& list) {
    if (list.empty()) return;
    list.erase(list.begin() + (last - attended.begin()), list.end());
    list.erase(list.begin(), list.begin() + (first - attended.begin()));
  };
  keep(row.input_ids);
  keep(row.labels);
  keep(row.loss_mask);
}

}  // namespace

std::vector<std::int32_t> parse_ids(const ordered_json& list, const std::string& field,
                                    bool allow_ignored) {
  if (!list.is_array()) {
    fail(field, "is a JSON {}, expected a list of token ids", json_text::type_name(list));
  }
  std::vector<std::int32_t> ids;
  ids.reserve(list.size());
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string expected = allow_ignored ? "a token id or -100" : "a token id";
    if (!list[i].is_number_integer()) {
      fail(fmt::format("{}[{}]", field, i), "is {}, expected {}",
           list[i].is_structured() || list[i].is_string()
               ? fmt::format("a JSON {}", json_text::type_name(list[i]))
               : json_text::dump(list[i]),
           expected);
    }
    // An unsigned number beyond int64 would turn negative in get<int64>.
    const bool is_huge = list[i].is_number_unsigned() &&
                         list[i].get<std::uint64_t>() > std::numeric_limits<std::int32_t>::max();
    const std::int64_t id = is_huge ? -1 : list[i].get<std::int64_t>();
    const bool is_ignored = allow_ignored && id == -100 && !is_huge;
    if (!is_ignored && (id < 0 || id > std::numeric_limits<std::int32_t>::max())) {
      fail(fmt::format("{}[{}]", field, i), "is {}, expected {}", list[i].dump(), expected);
    }
    ids.push_back(static_cast<std::int32_t>(id));
  }
  return ids;
}

void parse_tokens(const ordered_json& value, const FieldNames& fields, Row& row) {
  row.form = Row::Form::kTokens;
  row.input_ids = parse_ids(require(value, fields.input_ids), fields.input_ids, false);
  if (row.input_ids.empty()) fail(fields.input_ids, "is an empty list");
  const std::size_t length = row.input_ids.size();
  if (const ordered_json* labels = find(value, fields.labels)) {
    row.labels = parse_ids(*labels, fields.labels, true);
    check_length(*labels, fields.labels, length, fields);
  }
  // A token carries loss where every mask that is given says so.
  for (const char* name : kLossMasks) {
    const std::vector<bool> mask = parse_mask(value, name, length, fields);
    if (row.loss_mask.empty()) {
      row.loss_mask = mask;
    } else if (!mask.empty()) {
      for (std::size_t i = 0; i < length; ++i) row.loss_mask[i] = row.loss_mask[i] && mask[i];
    }
  }
  const std::vector<bool> attended = parse_mask(value, "attention_mask", length, fields);
  const bool is_padded = std::find(attended.begin(), attended.end(), false) != attended.end();
  if (is_padded) leave_out_padding(attended, row);
  if (const ordered_json* lengths = find(value, "seq_lengths")) {
    row.sequence_lengths = parse_lengths(*lengths, row.input_ids.size(), fields);
  } else if (const ordered_json* positions = find(value, "position_ids");
             positions != nullptr && !is_padded) {
    // Positions of padded rows depend on who padded them, and say nothing else.
    row.sequence_lengths = lengths_of_positions(*positions, length, fields);
  }
  if (row.sequence_lengths.size() == 1) row.sequence_lengths.clear();
}

std::vector<Row> sequences(Row row) {
  std::vector<Row> parts;
  if (row.sequence_lengths.empty()) {
    parts.push_back(std::move(row));
    return parts;
  }
  std::ptrdiff_t begin = 0;
  for (const std::int64_t length : row.sequence_lengths) {
    const auto cut = [&](const auto& list) {
      using List = std::decay_t<decltype(list)>;
      return list.empty() ? List() : List(list.begin() + begin, list.begin() + begin + length);
    };
    Row part;
    part.form = row.form;
    part.format = row.format;
    part.task = row.task;
    part.target = row.target;
    part.input_ids = cut(row.input_ids);
    part.labels = cut(row.labels);
    part.loss_mask = cut(row.loss_mask);
    parts.push_back(std::move(part));
    begin += length;
  }
  return parts;
}

}  // namespace heddle::data
