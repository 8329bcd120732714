#include "serve/tinker/old_results.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <protozero/pbf_reader.hpp>
#include <vector>

#include "serve/tinker/fields.h"

namespace heddle::serve::tinker {
namespace {

using nlohmann::json;
using protozero::pbf_reader;

template <class Number>
std::vector<Number> numbers_of(std::string_view bytes) {
  std::vector<Number> numbers(bytes.size() / sizeof(Number));
  if (!numbers.empty()) std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(Number));
  return numbers;
}

std::string_view view_of(pbf_reader& reader) {
  const auto view = reader.get_view();
  return {view.data(), view.size()};
}

/// Log-probabilities; NaN is null.
json list_of(const std::vector<float>& numbers) {
  json list = json::array();
  for (const float number : numbers)
    list.push_back(std::isnan(number) ? json() : json(static_cast<double>(number)));
  return list;
}

/// One field of a record's datums, of which `first` is the first: appends to each datum's object
/// its own part.
void add_field(pbf_reader reader, const std::string& name, std::size_t first, json& datums) {
  std::string_view data;
  std::vector<std::int64_t> offsets, trailing_shape;
  while (reader.next()) {
    if (reader.tag() == 1) {
      data = view_of(reader);
    } else if (reader.tag() == 2) {
      offsets = numbers_of<std::int64_t>(view_of(reader));
    } else if (reader.tag() == 4) {
      for (const std::int64_t size : reader.get_packed_int64()) trailing_shape.push_back(size);
    } else {
      reader.skip();
    }
  }
  for (std::size_t i = 0; i + 1 < offsets.size(); ++i) {
    if (datums.size() <= first + i) datums.push_back(json::object());
    const auto own =
        numbers_of<float>(data.substr(static_cast<std::size_t>(offsets[i]),
                                      static_cast<std::size_t>(offsets[i + 1] - offsets[i])));
    std::vector<std::int64_t> shape = trailing_shape;
    const auto row = std::accumulate(shape.begin(), shape.end(), std::int64_t{1},
                                     std::multiplies<std::int64_t>());
    shape.insert(shape.begin(), std::ssize(own) / std::max<std::int64_t>(1, row));
    datums[first + i][name] = {{"data", list_of(own)}, {"dtype", "float32"}, {"shape", shape}};
  }
}

void add_record(pbf_reader record, json& datums) {
  const std::size_t first = datums.size();
  while (record.next()) {
    if (record.tag() != 2) {
      record.skip();
      continue;
    }
    pbf_reader entry = record.get_message();
    std::string name;
    while (entry.next()) {
      if (entry.tag() == 1) {
        name = entry.get_string();
      } else {
        add_field(entry.get_message(), name, first, datums);
      }
    }
  }
}

json sequence_of(pbf_reader reader) {
  json sequence{{"stop_reason", "stop"}, {"tokens", json::array()}};
  while (reader.next()) {
    if (reader.tag() == 1) {
      sequence["stop_reason"] = reader.get_enum() == 1 ? "length" : "stop";
    } else if (reader.tag() == 2) {
      sequence["tokens"] = numbers_of<std::int32_t>(view_of(reader));
    } else if (reader.tag() == 3) {
      sequence["logprobs"] = list_of(numbers_of<float>(view_of(reader)));
    } else {
      reader.skip();
    }
  }
  return sequence;
}

/// For each token a list of [id, log-probability]; null where there is none.
json topk_of(pbf_reader reader) {
  std::vector<std::int32_t> ids;
  std::vector<float> logprobs;
  std::size_t k = 0, length = 0;
  while (reader.next()) {
    if (reader.tag() == 1) {
      ids = numbers_of<std::int32_t>(view_of(reader));
    } else if (reader.tag() == 2) {
      logprobs = numbers_of<float>(view_of(reader));
    } else if (reader.tag() == 3) {
      k = reader.get_uint32();
    } else if (reader.tag() == 4) {
      length = reader.get_uint32();
    } else {
      reader.skip();
    }
  }
  constexpr float kEmptyCell = -99999.0F;
  json rows = json::array();
  for (std::size_t t = 0; t < length; ++t) {
    json row = json::array();
    for (std::size_t i = t * k; i < (t + 1) * k; ++i)
      if (logprobs[i] != kEmptyCell) row.push_back({ids[i], static_cast<double>(logprobs[i])});
    rows.push_back(row.empty() ? json() : row);
  }
  return rows;
}

}  // namespace

std::string forward_backward_as_json(std::string_view bytes) {
  pbf_reader reader(bytes.data(), bytes.size());
  json metrics = json::object(), datums = json::array();
  std::string type;
  while (reader.next()) {
    if (reader.tag() == 1) {
      type = reader.get_string();
    } else if (reader.tag() == 2) {
      add_record(reader.get_message(), datums);
    } else {
      pbf_reader entry = reader.get_message();
      std::string name;
      while (entry.next()) {
        if (entry.tag() == 1) {
          name = entry.get_string();
        } else {
          metrics[name] = entry.get_double();
        }
      }
    }
  }
  return dump({{"loss_fn_output_type", type}, {"loss_fn_outputs", datums}, {"metrics", metrics}});
}

std::string sample_as_json(std::string_view bytes) {
  pbf_reader reader(bytes.data(), bytes.size());
  json answer{{"type", "sample"}, {"sequences", json::array()}};
  while (reader.next()) {
    if (reader.tag() == 1) {
      answer["sequences"].push_back(sequence_of(reader.get_message()));
    } else if (reader.tag() == 2) {
      answer["prompt_logprobs"] = list_of(numbers_of<float>(view_of(reader)));
    } else if (reader.tag() == 3) {
      answer["topk_prompt_logprobs"] = topk_of(reader.get_message());
    } else {
      reader.skip();
    }
  }
  return dump(answer);
}

}  // namespace heddle::serve::tinker
