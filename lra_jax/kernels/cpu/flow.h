// The flows of causal Flow-Attention, and what its two factors need of them.
//
// With running sums as vectors of H numbers, a position costs a few vectors' work, besides
// the products of the output. For the equations see lra_jax/attention/flow/causal.py; the
// gradient is the chain rule, with sums that run backward.

#pragma once

#include <memory>
#include <vector>

#include "chunk.h"

namespace lra {

struct FlowOptions {
  float clip, eps, extra_eps;
};

// One number for each position and head, [B, T, N].
struct Terms {
  float* incoming;     // I, in the square of the features' unit
  float* outgoing;     // O, likewise
  float* allocation;   // a
  float* logit;        // O'
  float* total;        // sum of exp(clipped O') so far
  float* competition;  // c
  float* factor;       // a / I
};

// 0 where no features flow.
inline float over(float x, float y) { return y == 0 ? 0.0f : x / y; }
inline Vec over(Vec x, Vec y) { return y == 0.0f ? Vec{} : x / y; }

// n / I or n / O. A flow can be zero although the features are not: as in the XLA form,
// the divisor is 1 then.
inline float count_over(float count, float flow) {
  return flow == 0 ? count : count / flow;
}
inline Vec count_over(Vec count, Vec flow) { return flow == 0.0f ? count : count / flow; }

// A number for each position of a chunk, 0 beyond its end.
struct ChunkRow {
  alignas(64) float at[kChunk] = {};

  float& operator[](int i) { return at[i]; }
  float operator[](int i) const { return at[i]; }
  // Writes what a function gives for each register, by its first position.
  template <class Function>
  void set(const Function& function) {
    for (int i = 0; i < kChunk; i += kLanes) store(at + i, function(i));
  }
};

inline Vec load(const ChunkRow& from, int i) { return load(from.at + i); }

// A running sum of vectors of M numbers, with what the last addition of a chunk rounded
// off: over many chunks that would add up. It begins with a number in each of H columns.
class Running {
 public:
  Running(int M, Room& room)
      : sum(room.take(M)), first(room.take(M)), lost(room.take(M)) {}

  void begin_with(int width, float number) {
    std::fill(first, first + width, number);
    std::fill(sum, sum + width, number);
  }

  float *sum, *first, *lost;
};

// One of two sums over a chunk: of ``scales_i (rows_i + extra)``; null = 0.
struct Summed {
  Running& running;
  const float* rows;  // [C, M]
  const ChunkRow& scales;
  const float* extra = nullptr;  // [M]
};

// A register of a sum that passes through the positions of a chunk.
class Passing {
 public:
  Passing(const Summed& of, int M, int column)
      : running_(of.running),
        rows_(of.rows + column),
        scales_(of.scales),
        M_(M),
        column_(column),
        extra_(of.extra ? load(of.extra + column) : Vec{}),
        before_(load(of.running.sum + column)),
        lost_(load(of.running.lost + column)) {}
  void restart() {
    before_ = load(running_.first + column_);
    lost_ = own_ = Vec{};
  }
  void add(int i) { own_ += scales_[i] * (load(rows_ + i * M_) + extra_); }
  Vec sum() const { return before_ + own_; }
  // Leaves the sum for the next chunk.
  void keep() const {
    const Vec more = own_ - lost_, after = before_ + more;
    store(running_.sum + column_, after);
    store(running_.lost + column_, (after - before_) - more);
  }

 private:
  const Running& running_;
  const float* rows_;
  const ChunkRow& scales_;
  int M_, column_;
  // The sum before the chunk, and that of the chunk's own rows.
  Vec extra_, before_, lost_, own_{};
};

// Adds a chunk to two sums, in the order of its positions or, if `backward`, from the
// last. `restarts` says before which positions the sums start afresh; `use` gets a
// position, the first column of a register, and the sums there.
template <class Restarts, class Use>
void pass(int M, int count, bool backward, const Summed& one, const Summed& two,
          const Restarts& restarts, const Use& use) {
  for (int column = 0; column < M; column += kLanes) {
    Passing a(one, M, column), b(two, M, column);
    for (int step = 0; step < count; step++) {
      const int i = backward ? count - 1 - step : step;
      if (restarts(i)) {
        a.restart();
        b.restart();
      }
      a.add(i);
      b.add(i);
      use(i, column, a.sum(), b.sum());
    }
    a.keep();
    b.keep();
  }
}

// Running sums over the positions of one head's document, each with the eps of its inner
// product.
struct Flows {
  float* eps;  // of features, [M]
  Running keys, queries, key_flow, query_flow;

  Flows(const Call& call, const FlowOptions& options, int64_t sample, Room& room)
      : eps(room.take(call.M())),
        keys(call.M(), room),
        queries(call.M(), room),
        key_flow(call.M(), room),
        query_flow(call.M(), room) {
    const float unit = call.unit[sample];
    std::fill(eps, eps + call.width, options.eps / unit);
    for (Running* each : {&keys, &queries})
      each->begin_with(call.width, options.eps / unit);
    for (Running* each : {&key_flow, &query_flow})
      each->begin_with(call.width, options.eps * unit);
  }
};

// Where the documents of a sample are, and how many real queries and keys of its own
// document there are up to each position, at least 1.
struct Counts {
  std::vector<float> sinks, sources;

  // `documents` are the numbers of the positions' documents, [B, T]; null = one per row.
  Counts(const Call& call, int64_t sample, const float* documents)
      : sinks(call.queries),
        sources(call.queries),
        documents_(documents ? documents + sample * call.queries : nullptr),
        last_(call.queries - 1) {
    int64_t sink = 0, source = 0;
    for (int64_t t = 0; t < call.queries; t++) {
      const int64_t at = sample * call.queries + t;
      if (starts(t)) sink = source = 0;
      sink += !call.query_mask || call.query_mask[at] != 0;
      source += !call.mask || call.mask[at] != 0;
      sinks[t] = static_cast<float>(std::max<int64_t>(1, sink));
      sources[t] = static_cast<float>(std::max<int64_t>(1, source));
    }
  }
  // Whether a position is the first of another document than the row's first, or the last
  // of another than the row's last.
  bool starts(int64_t t) const {
    return documents_ && t > 0 && documents_[t] != documents_[t - 1];
  }
  bool ends(int64_t t) const { return t < last_ && starts(t + 1); }
  // Of the positions of a chunk, 1 beyond its end.
  ChunkRow sinks_of(const Chunk& chunk) const { return of(chunk, sinks); }
  ChunkRow sources_of(const Chunk& chunk) const { return of(chunk, sources); }

 private:
  static ChunkRow of(const Chunk& chunk, const std::vector<float>& counts) {
    ChunkRow to;
    to.set([](int) { return all(1.0f); });
    std::copy_n(counts.begin() + chunk.first(), chunk.count, to.at);
    return to;
  }

  const float* documents_;
  int64_t last_;
};

inline float exponential(float x) { return exponential(all(x))[0]; }

// A number within [-clip, clip]. In this order NaN stays.
inline float within(float x, float clip) { return std::min(std::max(x, -clip), clip); }
inline Vec within(Vec x, float clip) {
  x = x < -clip ? all(-clip) : x;
  return x > clip ? all(clip) : x;
}

// Calls a function with the chunk and the state of each head, for all heads, in parallel;
// the chunks of a sequence one after another, or from the last if `backward`.
template <class State, class Visit>
void walk(const Call& call, xla::ffi::ThreadPool& pool, bool backward,
          std::vector<std::unique_ptr<State>>& states, const Visit& visit) {
  const Groups groups(call, threads_of(pool));
  const int64_t chunks = (call.queries + kChunk - 1) / kChunk;
  in_parallel(pool, groups.count(), [&](int64_t task) {
    const Heads mine = groups[task];
    Chunk chunk(call, mine.sample);
    for (int64_t step = 0; step < chunks; step++) {
      chunk.move_to((backward ? chunks - 1 - step : step) * kChunk, call.queries);
      for (int head = mine.first; head < mine.last; head++) {
        chunk.read_query(head);
        chunk.read_key(head);
        visit(chunk, head, *states[mine.sample * call.heads + head]);
      }
    }
  });
}

// The running sums of one head.
struct FlowState {
  Room room;
  Flows flows;
  double total = 0;  // of the competition

  FlowState(const Call& call, const FlowOptions& options, int64_t row)
      : flows(call, options, row / call.heads, room) {}
};

template <class State>
std::vector<std::unique_ptr<State>> states_of(const Call& call,
                                              const FlowOptions& options) {
  std::vector<std::unique_ptr<State>> states;
  for (int64_t row = 0; row < call.batch * call.heads; row++)
    states.push_back(std::make_unique<State>(call, options, row));
  return states;
}

inline std::vector<Counts> counts_of(const Call& call, const float* documents) {
  std::vector<Counts> counts;
  for (int64_t sample = 0; sample < call.batch; sample++)
    counts.emplace_back(call, sample, documents);
  return counts;
}

// exp of O' within the clip; 0 if the source is hidden.
inline ChunkRow shares_of(const Chunk& chunk, const ChunkRow& logits, float clip) {
  ChunkRow shares;
  shares.set([&](int i) { return exponential(within(load(logits, i), clip)); });
  for (int i = 0; i < chunk.count; i++)
    if (chunk.hides(i)) shares[i] = 0;
  return shares;
}

// Writes the terms of all positions.
inline void causal_flow_terms(const Call& call, xla::ffi::ThreadPool& pool,
                              const FlowOptions& options, const float* documents,
                              const Terms& to) {
  const int M = call.M();
  auto states = states_of<FlowState>(call, options);
  const auto all_counts = counts_of(call, documents);
  walk(call, pool, false, states, [&](Chunk& chunk, int head, FlowState& state) {
    Flows& flows = state.flows;
    const Counts& counts = all_counts[chunk.sample()];
    const float *query = chunk.query.plain, *key = chunk.key.plain;
    const auto starts = [&](int i) { return counts.starts(chunk.first() + i); };
    // (query + eps) . sum of keys, and (key + eps) . sum of queries, plus a number.
    const auto inner = [&](const Summed& keys, const Summed& queries, float extra,
                           ChunkRow& of_queries, ChunkRow& of_keys) {
      Vec by_query[kChunk] = {}, by_key[kChunk] = {};
      pass(M, chunk.count, false, keys, queries, starts,
           [&](int i, int j, Vec key_sum, Vec query_sum) {
             const Vec eps = load(flows.eps + j);
             by_query[i] += (load(query + i * M + j) + eps) * key_sum;
             by_key[i] += (load(key + i * M + j) + eps) * query_sum;
           });
      for (int i = 0; i < chunk.count; i++) {
        of_queries[i] = sum(by_query[i]) + extra;
        of_keys[i] = sum(by_key[i]) + extra;
      }
    };
    const float unit = call.unit[chunk.sample()];
    ChunkRow ones, incoming, outgoing, sink, source;
    ones.set([](int) { return all(1.0f); });
    inner({flows.keys, key, ones}, {flows.queries, query, ones},
          options.extra_eps / (unit * unit), incoming, outgoing);
    const ChunkRow sinks = counts.sinks_of(chunk), sources = counts.sources_of(chunk);
    ChunkRow by_incoming, by_outgoing;
    by_incoming.set(
        [&](int i) { return count_over(load(sources, i), load(incoming, i)); });
    by_outgoing.set(
        [&](int i) { return count_over(load(sinks, i), load(outgoing, i)); });
    inner({flows.key_flow, key, by_outgoing}, {flows.query_flow, query, by_incoming},
          options.extra_eps, sink, source);
    ChunkRow allocation, logit, factor, total, competition;
    allocation.set([&](int i) { return Sigmoid::phi(load(sink, i) / load(sources, i)); });
    logit.set([&](int i) { return load(source, i) / load(sinks, i); });
    factor.set([&](int i) { return over(load(allocation, i), load(incoming, i)); });
    const ChunkRow shares = shares_of(chunk, logit, options.clip);
    for (int i = 0; i < chunk.count; i++) {
      if (starts(i)) state.total = 0;
      state.total += shares[i];
      total[i] = static_cast<float>(state.total);
    }
    competition.set(
        [&](int i) { return load(sources, i) * over(load(shares, i), load(total, i)); });
    for (int i = 0; i < chunk.count; i++) {
      const int64_t at = chunk.place(i, call.queries, head);
      to.incoming[at] = incoming[i];
      to.outgoing[at] = outgoing[i];
      to.allocation[at] = allocation[i];
      to.logit[at] = logit[i];
      to.total[at] = total[i];
      to.competition[at] = competition[i];
      to.factor[at] = chunk.hides_query(i) ? 0.0f : factor[i];
    }
  });
}

// The gradients of one head's flows, and of their running sums.
struct FlowSlopes : FlowState {
  float *incoming, *outgoing, *sink, *source;  // of I, O and the sums in I', O', [T]
  Running of_keys, of_queries, of_key_flow, of_query_flow;
  double competed = 0;

  FlowSlopes(const Call& call, const FlowOptions& options, int64_t row)
      : FlowState(call, options, row),
        incoming(room.take(call.queries)),
        outgoing(room.take(call.queries)),
        sink(room.take(call.queries)),
        source(room.take(call.queries)),
        of_keys(call.M(), room),
        of_queries(call.M(), room),
        of_key_flow(call.M(), room),
        of_query_flow(call.M(), room) {}
};

// The terms of a chunk of a head, and what follows from them.
struct ChunkTerms {
  ChunkRow sinks, sources, incoming, outgoing, by_incoming, by_outgoing;

  ChunkTerms(const Call& call, const Counts& counts, const Terms& terms,
             const Chunk& chunk, int head)
      : sinks(counts.sinks_of(chunk)), sources(counts.sources_of(chunk)) {
    for (int i = 0; i < chunk.count; i++) {
      const int64_t at = chunk.place(i, call.queries, head);
      incoming[i] = terms.incoming[at];
      outgoing[i] = terms.outgoing[at];
    }
    by_incoming.set(
        [&](int i) { return count_over(load(sources, i), load(incoming, i)); });
    by_outgoing.set(
        [&](int i) { return count_over(load(sinks, i), load(outgoing, i)); });
  }
};

// Writes the gradients of the sums in I' and O' of a chunk.
inline void of_conserved_flows(const Call& call, const FlowOptions& options,
                               const Counts& counts, const Terms& terms,
                               const float* through, const float* of_competition,
                               const Chunk& chunk, int head, FlowSlopes& state,
                               ChunkRow& sink, ChunkRow& source) {
  ChunkRow factor, allocation, logit, total, passed;
  for (int i = 0; i < chunk.count; i++) {
    const int64_t at = chunk.place(i, call.queries, head);
    factor[i] = through[at];
    allocation[i] = terms.allocation[at];
    logit[i] = terms.logit[at];
    total[i] = terms.total[at];
    passed[i] = of_competition[at] * terms.competition[at];
  }
  const ChunkRow sinks = counts.sinks_of(chunk), sources = counts.sources_of(chunk);
  const ChunkRow shares = shares_of(chunk, logit, options.clip);
  sink.set([&](int i) {
    return load(factor, i) * (1.0f - load(allocation, i)) / load(sources, i);
  });
  ChunkRow of_total;
  of_total.set([&](int i) { return over(load(passed, i), load(total, i)); });
  for (int i = chunk.count - 1; i >= 0; i--) {
    if (counts.ends(chunk.first() + i)) state.competed = 0;
    state.competed += of_total[i];
    // The gradient passes at the bounds, too.
    const bool stays = chunk.hides(i) || std::abs(logit[i]) > options.clip;
    const float of_logit = passed[i] - shares[i] * static_cast<float>(state.competed);
    source[i] = stays ? 0.0f : of_logit;
  }
  source.set([&](int i) { return load(source, i) / load(sinks, i); });
  std::copy_n(sink.at, chunk.count, state.sink + chunk.first());
  std::copy_n(source.at, chunk.count, state.source + chunk.first());
}

// Adds what passes through the terms to the gradients of the features, and makes them
// those of query and key.
//
// `through` is the gradient of the logarithm of a / I, and `of_competition` that of c.
inline void causal_flow_backward(const Call& call, xla::ffi::ThreadPool& pool,
                                 const FlowOptions& options, const float* documents,
                                 const Terms& terms, const float* through,
                                 const float* of_competition, float* of_query,
                                 float* of_key) {
  const int M = call.M();
  auto states = states_of<FlowSlopes>(call, options);
  const auto all_counts = counts_of(call, documents);
  // The gradients that come through sums over later positions.
  walk(call, pool, true, states, [&](Chunk& chunk, int head, FlowSlopes& state) {
    const Counts& counts = all_counts[chunk.sample()];
    const float *query = chunk.query.plain, *key = chunk.key.plain;
    const float* eps = state.flows.eps;
    const auto ends = [&](int i) { return counts.ends(chunk.first() + i); };
    const ChunkTerms of(call, counts, terms, chunk, head);
    ChunkRow sink, source, factor, of_by_incoming, of_by_outgoing, incoming, outgoing;
    of_conserved_flows(call, options, counts, terms, through, of_competition, chunk, head,
                       state, sink, source);
    Vec by_query[kChunk] = {}, by_key[kChunk] = {};
    pass(M, chunk.count, true, {state.of_key_flow, query, sink, eps},
         {state.of_query_flow, key, source, eps}, ends,
         [&](int i, int j, Vec of_key_flow, Vec of_query_flow) {
           by_query[i] += load(query + i * M + j) * of_query_flow;
           by_key[i] += load(key + i * M + j) * of_key_flow;
           store(chunk.far + i * M + j, of.by_incoming[i] * of_query_flow);
           store(chunk.near + i * M + j, of.by_outgoing[i] * of_key_flow);
         });
    for (int i = 0; i < chunk.count; i++) {
      factor[i] = through[chunk.place(i, call.queries, head)];
      of_by_incoming[i] = sum(by_query[i]);
      of_by_outgoing[i] = sum(by_key[i]);
    }
    incoming.set([&](int i) {
      const Vec passed = load(of_by_incoming, i) * load(of.by_incoming, i);
      return -over(load(factor, i) + passed, load(of.incoming, i));
    });
    outgoing.set([&](int i) {
      const Vec passed = load(of_by_outgoing, i) * load(of.by_outgoing, i);
      return -over(passed, load(of.outgoing, i));
    });
    std::copy_n(incoming.at, chunk.count, state.incoming + chunk.first());
    std::copy_n(outgoing.at, chunk.count, state.outgoing + chunk.first());
    pass(M, chunk.count, true, {state.of_keys, query, incoming, eps},
         {state.of_queries, key, outgoing, eps}, ends,
         [&](int i, int j, Vec of_keys, Vec of_queries) {
           float *q = chunk.far + i * M + j, *k = chunk.near + i * M + j;
           store(q, load(q) + of_queries);
           store(k, load(k) + of_keys);
         });
    chunk.add_to_query(head, chunk.far, of_query, false);
    chunk.add_to_key(head, chunk.near, of_key, false);
  });
  // The gradients that come through sums over earlier positions.
  walk(call, pool, false, states, [&](Chunk& chunk, int head, FlowSlopes& state) {
    Flows& flows = state.flows;
    const Counts& counts = all_counts[chunk.sample()];
    const float *query = chunk.query.plain, *key = chunk.key.plain;
    const auto starts = [&](int i) { return counts.starts(chunk.first() + i); };
    const ChunkTerms of(call, counts, terms, chunk, head);
    const int64_t first = chunk.first();
    ChunkRow ones;
    ones.set([](int) { return all(1.0f); });
    pass(M, chunk.count, false, {flows.keys, key, ones}, {flows.queries, query, ones},
         starts, [&](int i, int j, Vec keys, Vec queries) {
           store(chunk.far + i * M + j, state.incoming[first + i] * keys);
           store(chunk.near + i * M + j, state.outgoing[first + i] * queries);
         });
    pass(M, chunk.count, false, {flows.key_flow, key, of.by_outgoing},
         {flows.query_flow, query, of.by_incoming}, starts,
         [&](int i, int j, Vec key_flow, Vec query_flow) {
           float *q = chunk.far + i * M + j, *k = chunk.near + i * M + j;
           store(q, load(q) + state.sink[first + i] * key_flow);
           store(k, load(k) + state.source[first + i] * query_flow);
         });
    chunk.add_to_query(head, chunk.far, of_query, true);
    chunk.add_to_key(head, chunk.near, of_key, true);
  });
}

}  // namespace lra
