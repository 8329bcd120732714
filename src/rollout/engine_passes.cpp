// The passes of an engine: from planned tokens to drawn ones.
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "base/errors.h"
#include "rollout/engine.h"
#include "rollout/experts.h"

namespace heddle::rollout {
namespace {

/// Rows of logits at a time: 256 of 248,320 fp32 are a quarter of a gigabyte.
constexpr std::int64_t kLogitRows = 256;

Draw draw_of(const Sequence& sequence) {
  Draw draw{sequence.request->sampling, static_cast<std::uint64_t>(sequence.output_size()),
            sequence.changes.now(), sequence.request->top_logprobs,
            sequence.request->return_support};
  draw.options.seed = sequence.seed;
  return draw;
}

/// Draw number `number` in the place of the token after position `t` of the prompt; its stream is
/// none of those that answers are drawn from.
Draw prompt_draw_of(const Sequence& sequence, std::int64_t t, std::int64_t number) {
  constexpr std::uint64_t kFirstStream = std::uint64_t{1} << 32;
  Draw draw;
  draw.options.temperature = sequence.request->sampling.temperature;
  draw.options.seed = seed_of_sample(sequence.request->sampling.seed,
                                     kFirstStream + static_cast<std::uint64_t>(number));
  draw.position = static_cast<std::uint64_t>(t);
  return draw;
}

void add_rows(std::vector<nn::AdaptedRows>& adapters, const nn::AdapterSet* set,
              std::int64_t rows) {
  if (adapters.empty() || adapters.back().set != set) adapters.push_back({set, 0, {}});
  adapters.back().rows += rows;
}

bool tells_experts(const Part& part) { return part.sequence->request->return_experts; }

}  // namespace

at::Tensor Engine::run(const std::vector<Part>& parts) {
  models::Model& model = *placed_.model;
  std::vector<std::int64_t> tokens;
  std::vector<std::int32_t> boundaries = {0};
  std::vector<std::int64_t> slots, lengths;
  std::vector<std::vector<std::int32_t>> pages;
  std::vector<nn::AdaptedRows> adapters;
  for (const Part& part : parts) {
    const Sequence& sequence = *part.sequence;
    if (sequence.held.rank != placed_.context.mesh.data_rank()) continue;
    const auto first = sequence.tokens.begin() + sequence.held.tokens;
    tokens.insert(tokens.end(), first, first + part.count);
    boundaries.push_back(static_cast<std::int32_t>(tokens.size()));
    slots.push_back(sequence.held.slot);
    lengths.push_back(sequence.held.tokens);
    pages.push_back(sequence.held.pages);
    add_rows(adapters, sequence.adapter->set.get(), part.count);
  }
  // The ranks along tp divide the rows, and one without a sequence takes part all the same.
  const std::int64_t tp = model.tensor_group().size(),
                     shares = (static_cast<std::int64_t>(tokens.size()) + tp - 1) / tp,
                     rows = std::max<std::int64_t>(1, shares) * tp;
  // Experts of this rank may be other ranks' experts too: a rank without a sequence has their set.
  if (adapters.empty()) adapters.push_back({parts[0].sequence->adapter->set.get(), 0, {}});
  for (std::int64_t slot = pool_.dummy_slot(); static_cast<std::int64_t>(tokens.size()) < rows;
       ++slot) {
    tokens.push_back(0);
    boundaries.push_back(static_cast<std::int32_t>(tokens.size()));
    slots.push_back(slot);
    lengths.push_back(0);
    pages.push_back({pool_.dummy_page()});
    ++adapters.back().rows;
  }
  const c10::Device device = placed_.context.device;
  nn::CachedSequences cached;
  cached.cache = &pool_.cache();
  cached.rows =
      ops::CacheRows::from_host(std::move(slots), std::move(lengths), std::move(pages), device);
  nn::Pass pass =
      model.cached_pass(ops::Sequences::from_host(boundaries, device), std::move(cached));
  if (adapters.size() > 1 || adapters[0].set != nullptr) pass.adapters = std::move(adapters);
  const bool wants_experts = std::ranges::any_of(parts, &tells_experts);
  std::vector<at::Tensor> experts;
  const at::Tensor hidden = placed_.pipeline->evaluate(
      model, at::tensor(tokens, at::kLong).to(device), pass, wants_experts ? &experts : nullptr);
  if (wants_experts)
    keep_experts(parts, OwnExperts::of(model.config(), experts), rows_of_ranks(parts));
  return hidden;
}

std::vector<std::int64_t> Engine::rows_of_ranks(const std::vector<Part>& parts) const {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(pool_.size().ranks));
  for (const Part& part : parts)
    rows[static_cast<std::size_t>(part.sequence->held.rank)] += part.count;
  return rows;
}

void Engine::keep_experts(const std::vector<Part>& parts, const OwnExperts& own,
                          const std::vector<std::int64_t>& rows) {
  const at::Tensor table = expert_table(placed_, own, rows);
  const std::int64_t width = table.size(1);
  const auto* const numbers = table.const_data_ptr<float>();
  for (const Part& part : parts) {
    Sequence& sequence = *part.sequence;
    if (!tells_experts(part)) continue;
    const auto known = static_cast<std::int64_t>(sequence.experts.size()) / width,
               before = sequence.held.tokens;
    if (known < before) {
      throw InternalError(fmt::format("request {}: experts of {} tokens are known, of {} expected",
                                      sequence.id, known, before));
    }
    const auto rank = rows.begin() + sequence.held.rank;
    const std::int64_t first =
        std::accumulate(rows.begin(), rank, std::int64_t{0}) + part.first_row - before;
    for (std::int64_t t = known; t < before + part.count; ++t) {
      const float* const chosen = numbers + (first + t) * width;
      sequence.experts.insert(sequence.experts.end(), chosen, chosen + width);
    }
  }
}

at::Tensor Engine::table_of(const TokenTable& shape, const at::Tensor& hidden,
                            const std::vector<Wanted>& wanted) const {
  models::Model& model = *placed_.model;
  const auto count = static_cast<std::int64_t>(wanted.size());
  at::Tensor table = at::zeros({count, shape.width()}, at::kDouble);
  std::vector<std::int64_t> rows, places;
  if (hidden.defined()) {
    const std::int64_t first = hidden.size(0) * model.tensor_group().rank();
    for (std::int64_t i = 0; i < count; ++i) {
      const Wanted& one = wanted[static_cast<std::size_t>(i)];
      const std::int64_t row = one.row - first;
      if (one.part->sequence->held.rank != placed_.context.mesh.data_rank()) continue;
      if (row < 0 || row >= hidden.size(0)) continue;
      rows.push_back(row);
      places.push_back(i);
    }
  }
  const auto own = static_cast<std::int64_t>(rows.size());
  for (std::int64_t begin = 0; begin < own; begin += kLogitRows) {
    const std::int64_t n = std::min(kLogitRows, own - begin);
    const std::vector<std::int64_t> block(rows.begin() + begin, rows.begin() + begin + n),
        block_places(places.begin() + begin, places.begin() + begin + n);
    const at::Tensor index = at::tensor(block, at::kLong).to(hidden.device());
    std::vector<nn::AdaptedRows> adapters;
    for (const std::int64_t place : block_places) {
      add_rows(adapters, wanted[static_cast<std::size_t>(place)].part->sequence->adapter->set.get(),
               1);
    }
    at::Tensor logits = model.logits(model.final_norm(hidden.index_select(0, index)), adapters);
    // NPUs have no float64, which numbers of tokens are told in: there the host draws.
    if (!logits.is_cpu() && !logits.is_cuda()) logits = logits.cpu();
    std::vector<Draw> draws;
    std::vector<std::int64_t> given;
    for (const std::int64_t place : block_places) {
      const Wanted& one = wanted[static_cast<std::size_t>(place)];
      if (one.given >= 0) {
        given.push_back(one.given);
      } else {
        draws.push_back(one.draw);
      }
    }
    const at::Tensor found =
        draws.empty() ? shape.judge(logits, at::tensor(given, at::kLong).to(logits.device()))
                      : shape.draw(model.kernels(), logits, draws);
    table.index_copy_(0, at::tensor(block_places, at::kLong), found.cpu());
  }
  placed_.context.mesh.world_group().all_reduce_sum(table);
  return table;
}

std::vector<SampledToken> Engine::draw(const at::Tensor& hidden,
                                       const std::vector<Part>& parts) const {
  TokenTable shape;
  std::vector<Wanted> wanted;
  for (const Part& part : parts) {
    const Request& request = *part.sequence->request;
    shape.top = std::max(shape.top, request.top_logprobs);
    if (request.return_support) shape.support = std::max(shape.support, request.sampling.top_k);
    wanted.push_back({&part, part.last_row(), -1, draw_of(*part.sequence)});
  }
  if (wanted.empty()) return {};
  const at::Tensor table = table_of(shape, hidden, wanted);
  std::vector<SampledToken> tokens;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Request& request = *parts[i].sequence->request;
    tokens.push_back(shape.read(table, static_cast<std::int64_t>(i), request.top_logprobs,
                                request.return_support));
  }
  return tokens;
}

void Engine::tell_draws(const at::Tensor& hidden, const std::vector<Wanted>& drawn) const {
  if (drawn.empty()) return;
  const TokenTable shape;
  const at::Tensor table = table_of(shape, hidden, drawn);
  for (std::size_t i = 0; i < drawn.size();) {
    const Sequence& sequence = *drawn[i].part->sequence;
    auto& told = drawn[i].part->sequence->completion.prompt_draws.emplace_back();
    for (std::int64_t n = 0; n < sequence.request->prompt_draws; ++n) {
      const SampledToken token = shape.read(table, static_cast<std::int64_t>(i++), 0, false);
      told.push_back({token.id, token.logprob});
    }
  }
}

/// Each row of a prompt says what the model makes of the token after it.
void Engine::judge_prompts(const at::Tensor& hidden, const std::vector<Part>& parts) {
  TokenTable shape;
  std::vector<Wanted> wanted, drawn;
  for (const Part& part : parts) {
    Sequence& sequence = *part.sequence;
    if (!sequence.wants_prompt_logprobs()) continue;
    Completion& completion = sequence.completion;
    if (completion.prompt_logprobs.empty()) {
      completion.prompt_logprobs.push_back(std::numeric_limits<double>::quiet_NaN());
      completion.prompt_top_logprobs.emplace_back();
    }
    shape.top = std::max(shape.top, *sequence.request->prompt_logprobs);
    const std::int64_t before = sequence.held.tokens,
                       end = std::min(before + part.count, sequence.prompt_size() - 1);
    const auto known = static_cast<std::int64_t>(completion.prompt_logprobs.size());
    for (std::int64_t t = std::max(before, known - 1); t < end; ++t) {
      const std::int64_t row = part.first_row + t - before;
      wanted.push_back({&part, row, sequence.tokens[static_cast<std::size_t>(t) + 1]});
      for (const std::int32_t target : sequence.request->targets_after(t))
        wanted.push_back({&part, row, target});
      for (std::int64_t n = 0; n < sequence.request->prompt_draws; ++n)
        drawn.push_back({&part, row, -1, prompt_draw_of(sequence, t, n)});
    }
  }
  if (wanted.empty()) return;
  tell_draws(hidden, drawn);
  const at::Tensor table = table_of(shape, hidden, wanted);
  for (std::size_t i = 0; i < wanted.size();) {
    const Request& request = *wanted[i].part->sequence->request;
    Completion& completion = wanted[i].part->sequence->completion;
    const auto read = [&](std::int64_t top) {
      return shape.read(table, static_cast<std::int64_t>(i++), top, false);
    };
    const std::int64_t position = std::ssize(completion.prompt_logprobs) - 1;
    SampledToken token = read(*request.prompt_logprobs);
    completion.prompt_logprobs.push_back(token.logprob);
    completion.prompt_top_logprobs.push_back(std::move(token.top));
    if (request.prompt_targets.empty()) continue;
    auto& told = completion.prompt_target_logprobs.emplace_back();
    for (std::size_t n = request.targets_after(position).size(); n > 0; --n)
      told.push_back(read(0).logprob);
  }
}

bool Engine::can_replay(const std::vector<Part>& parts) const {
  if (!recorded_ || parts[0].sequence->is_prompt()) return false;
  // All ranks see the sequences of all, and choose alike.
  if (!recorded_->takes(std::ranges::max(rows_of_ranks(parts)))) return false;
  const bool is_alone = placed_.context.mesh.world_size() == 1;
  AdapterTables::Sets sets;
  for (const Part& part : parts) sets.push_back(part.sequence->adapter->set);
  if (std::any_of(sets.begin(), sets.end(), [&](const auto& set) { return set != sets[0]; }) &&
      !recorded_->can_mix(sets))
    return false;
  // Ranks exchange the three numbers that a plain draw has.
  return is_alone || std::all_of(parts.begin(), parts.end(), [](const Part& part) {
           return draw_of(*part.sequence).is_plain();
         });
}

Engine::Flight Engine::flight_of(const std::vector<Part>& parts) const {
  Flight flight;
  flight.version = weights_version_;
  flight.tells_experts = std::ranges::any_of(parts, &tells_experts);
  flight.rows.resize(static_cast<std::size_t>(pool_.size().ranks));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::int64_t rank = parts[i].sequence->held.rank;
    flight.ids.push_back(parts[i].sequence->id);
    flight.places.push_back(flight.rows[static_cast<std::size_t>(rank)]++);
    if (rank == placed_.context.mesh.data_rank()) flight.own.push_back(i);
  }
  return flight;
}

std::vector<RecordedDecoding::Row> Engine::rows_of(const Flight& flight,
                                                   const std::vector<Part>& parts) {
  std::vector<RecordedDecoding::Row> rows;
  for (const std::size_t i : flight.own) {
    const Sequence& sequence = *parts[i].sequence;
    rows.push_back({sequence.tokens.back(), &sequence.held, sequence.adapter->set});
  }
  return rows;
}

Engine::Flight Engine::start(const std::vector<Part>& parts) {
  Flight flight = flight_of(parts);
  std::vector<Draw> draws;
  for (const std::size_t i : flight.own) draws.push_back(draw_of(*parts[i].sequence));
  if (!draws.empty()) recorded_->start(rows_of(flight, parts), draws, flight.tells_experts);
  return flight;
}

std::optional<Engine::Flight> Engine::start_ahead(const std::vector<Part>& parts) {
  // The caches of a sequence that ends with the token before are a token further than it is.
  const auto is_plain = [&](const Part& part) {
    const Sequence& sequence = *part.sequence;
    const Request& request = *sequence.request;
    return sequence.output_size() + 2 <= request.max_new_tokens && !request.keep_state &&
           sequence.conversation() < 0 && request.top_logprobs == 0 && !request.return_support &&
           sequence.changes.are_none() && recorded_->can_go_on(sequence.held.tokens);
  };
  if (!scheduler_.goes_on_with(parts) || !std::all_of(parts.begin(), parts.end(), is_plain) ||
      !scheduler_.reserve_next(parts))
    return std::nullopt;
  pool_.settle();
  Flight flight = flight_of(parts);
  if (!flight.own.empty()) recorded_->start_next(rows_of(flight, parts));
  return flight;
}

void Engine::read(Flight& flight) {
  if (flight.told) return;
  flight.told.emplace();
  if (!flight.own.empty()) *flight.told = recorded_->read();
}

void Engine::settle() {
  if (ahead_) read(*ahead_);
}

std::vector<Part> Engine::parts_ahead() {
  std::vector<Part> parts;
  if (!ahead_) return parts;
  for (const RequestId id : ahead_->ids) {
    if (Sequence* const sequence = scheduler_.running(id)) parts.push_back({sequence, 1});
  }
  if (parts.empty()) settle();
  return parts;
}

std::vector<SampledToken> Engine::replay(std::vector<Part>& parts, std::int64_t& version) {
  Flight flight = ahead_ ? *std::exchange(ahead_, std::nullopt) : start(parts);
  version = flight.version;
  if (parts.size() == flight.ids.size() && !flight.told) ahead_ = start_ahead(parts);
  read(flight);
  const comm::Mesh& mesh = placed_.context.mesh;
  std::vector<SampledToken> all(flight.ids.size());
  if (mesh.world_size() == 1) {
    all = std::move(flight.told->tokens);
  } else {
    const TokenTable shape;
    at::Tensor table = at::zeros({std::ssize(flight.ids), shape.width()}, at::kDouble);
    for (std::size_t i = 0; i < flight.own.size(); ++i) {
      double* const row = table.mutable_data_ptr<double>() +
                          static_cast<std::int64_t>(flight.own[i]) * shape.width();
      const SampledToken& token = flight.told->tokens.at(i);
      row[0] = token.id;
      row[1] = token.logprob;
      row[2] = token.sampled_logprob;
    }
    mesh.world_group().all_reduce_sum(table);
    for (std::size_t i = 0; i < all.size(); ++i)
      all[i] = shape.read(table, static_cast<std::int64_t>(i), 0, false);
  }
  std::vector<SampledToken> tokens;
  std::size_t place = 0;
  for (Part& part : parts) {
    while (flight.ids[place] != part.sequence->id) ++place;
    part.first_row = flight.places[place];
    tokens.push_back(std::move(all[place]));
  }
  if (flight.tells_experts) keep_experts(parts, flight.told->experts, flight.rows);
  return tokens;
}

}  // namespace heddle::rollout
