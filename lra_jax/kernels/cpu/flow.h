// The flows of causal Flow-Attention, and what its two factors need of them.
//
// With running sums as vectors of H numbers, a position costs a few vectors' work, beside
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

// n / I or n / O. A flow can be zero although the features are not: as in the XLA form,
// the divisor is 1 then.
inline float count_over(float count, float flow) {
  return flow == 0 ? count : count / flow;
}

// A running sum of vectors of M numbers, with what its last addition rounded off: over
// many positions that would add up.
class Running {
 public:
  Running(int M, Room& room) : M_(M), sum(room.take(M)), lost_(room.take(M)) {}

  // ``sum += scale (x + extra)``; null = 0.
  void add(float scale, const float* x, const float* extra = nullptr) {
    for (int j = 0; j < M_; j += kLanes) {
      const Vec term = extra ? load(x + j) + load(extra + j) : load(x + j);
      const Vec more = scale * term - load(lost_ + j), before = load(sum + j);
      const Vec after = before + more;
      store(lost_ + j, (after - before) - more);
      store(sum + j, after);
    }
  }

  // Begins anew, with a number in each of the first `width` columns.
  void restart(int width = 0, float number = 0) {
    std::fill(sum, sum + M_, 0.0f);
    std::fill(sum, sum + width, number);
    std::fill(lost_, lost_ + M_, 0.0f);
  }

 private:
  int M_;

 public:
  float* sum;

 private:
  float* lost_;
};

// Running sums over the positions of one head's document, each with the eps of its inner
// product.
class Flows {
 public:
  Flows(const Call& call, const FlowOptions& options, int64_t sample, Room& room)
      : M_(call.M()),
        eps(room.take(M_)),
        keys(M_, room),
        queries(M_, room),
        key_flow(M_, room),
        query_flow(M_, room),
        width_(call.width),
        eps_(options.eps),
        unit_(call.unit[sample]) {
    extra_ = options.extra_eps;
    extra_squared_ = options.extra_eps / (unit_ * unit_);
    std::fill(eps, eps + width_, eps_ / unit_);
    restart();
  }
  void restart() {
    for (Running* each : {&keys, &queries}) each->restart(width_, eps_ / unit_);
    for (Running* each : {&key_flow, &query_flow}) each->restart(width_, eps_ * unit_);
  }
  float incoming(const float* query) const { return inner(query, keys) + extra_squared_; }
  float outgoing(const float* key) const { return inner(key, queries) + extra_squared_; }
  float sink(const float* query) const { return inner(query, key_flow) + extra_; }
  float source(const float* key) const { return inner(key, query_flow) + extra_; }

 private:
  // ``(x + eps) . sum``
  float inner(const float* x, const Running& running) const {
    Vec total{};
    for (int j = 0; j < M_; j += kLanes)
      total += (load(x + j) + load(eps + j)) * load(running.sum + j);
    return sum(total);
  }

  int M_;
  float extra_, extra_squared_;

 public:
  float* eps;  // of features, [M]
  Running keys, queries, key_flow, query_flow;

 private:
  int width_;
  float eps_, unit_;
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

 private:
  const float* documents_;
  int64_t last_;
};

inline float exponential(float x) { return exponential(all(x))[0]; }

// A number within [-clip, clip]. In this order NaN stays.
inline float within(float x, float clip) { return std::min(std::max(x, -clip), clip); }

// exp of O' within the clip; 0 if the source is hidden.
inline float share_of(float logit, float clip, bool hidden) {
  return hidden ? 0.0f : exponential(within(logit, clip));
}

// Calls a function with the chunk and the state of each head, for all heads, in parallel;
// the chunks of a sequence one after another, or from the last if `backward`.
template <class State, class Visit>
void walk(const Call& call, xla::ffi::ThreadPool& pool, bool backward,
          std::vector<std::unique_ptr<State>>& states, const Visit& visit) {
  const Groups groups(call, pool.num_threads());
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
    for (int i = 0; i < chunk.count; i++) {
      const float *query = chunk.query.plain + i * M, *key = chunk.key.plain + i * M;
      const int64_t t = chunk.first() + i, at = chunk.place(i, call.queries, head);
      const float sinks = counts.sinks[t], sources = counts.sources[t];
      if (counts.starts(t)) {
        flows.restart();
        state.total = 0;
      }
      flows.keys.add(1.0f, key);
      flows.queries.add(1.0f, query);
      const float incoming = to.incoming[at] = flows.incoming(query);
      const float outgoing = to.outgoing[at] = flows.outgoing(key);
      flows.key_flow.add(count_over(sinks, outgoing), key);
      flows.query_flow.add(count_over(sources, incoming), query);
      const float conserved = flows.sink(query) / sources;
      const float allocation = 1.0f / (1.0f + exponential(-conserved));
      const float logit = to.logit[at] = flows.source(key) / sinks;
      const float share = share_of(logit, options.clip, chunk.hides(i));
      state.total += share;
      to.total[at] = static_cast<float>(state.total);
      to.allocation[at] = allocation;
      to.competition[at] = sources * over(share, to.total[at]);
      to.factor[at] = chunk.hides_query(i) ? 0.0f : over(allocation, incoming);
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

  // Before the positions of an earlier document.
  void restart_slopes() {
    for (Running* each : {&of_keys, &of_queries, &of_key_flow, &of_query_flow})
      each->restart();
    competed = 0;
  }
};

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
  // What sums over later positions pass on.
  walk(call, pool, true, states, [&](Chunk& chunk, int head, FlowSlopes& state) {
    Flows& flows = state.flows;
    const Counts& counts = all_counts[chunk.sample()];
    for (int i = chunk.count - 1; i >= 0; i--) {
      const int64_t t = chunk.first() + i, at = chunk.place(i, call.queries, head);
      const float *query = chunk.query.plain + i * M, *key = chunk.key.plain + i * M;
      if (counts.ends(t)) state.restart_slopes();
      const float by_outgoing = count_over(counts.sinks[t], terms.outgoing[at]);
      const float by_incoming = count_over(counts.sources[t], terms.incoming[at]);
      state.sink[t] = through[at] * (1.0f - terms.allocation[at]) / counts.sources[t];
      const float passed = of_competition[at] * terms.competition[at];
      state.competed += over(passed, terms.total[at]);
      const float share = share_of(terms.logit[at], options.clip, chunk.hides(i));
      // The gradient passes at the bounds, too.
      const bool clipped = std::abs(terms.logit[at]) > options.clip;
      const float of_logit = passed - share * static_cast<float>(state.competed);
      state.source[t] = clipped || chunk.hides(i) ? 0.0f : of_logit / counts.sinks[t];
      state.of_key_flow.add(state.sink[t], query, flows.eps);
      state.of_query_flow.add(state.source[t], key, flows.eps);
      const float of_by_outgoing = dot(M, key, state.of_key_flow.sum);
      const float of_by_incoming = dot(M, query, state.of_query_flow.sum);
      state.outgoing[t] = -over(of_by_outgoing * by_outgoing, terms.outgoing[at]);
      state.incoming[t] =
          -over(through[at] + of_by_incoming * by_incoming, terms.incoming[at]);
      state.of_keys.add(state.incoming[t], query, flows.eps);
      state.of_queries.add(state.outgoing[t], key, flows.eps);
      float *q = chunk.far + i * M, *k = chunk.near + i * M;
      for (int j = 0; j < M; j += kLanes) {
        store(q + j, by_incoming * load(state.of_query_flow.sum + j) +
                         load(state.of_queries.sum + j));
        store(k + j, by_outgoing * load(state.of_key_flow.sum + j) +
                         load(state.of_keys.sum + j));
      }
    }
    chunk.add_to_query(head, chunk.far, of_query, false);
    chunk.add_to_key(head, chunk.near, of_key, false);
  });
  // What sums over earlier positions pass on.
  walk(call, pool, false, states, [&](Chunk& chunk, int head, FlowSlopes& state) {
    Flows& flows = state.flows;
    const Counts& counts = all_counts[chunk.sample()];
    for (int i = 0; i < chunk.count; i++) {
      const int64_t t = chunk.first() + i, at = chunk.place(i, call.queries, head);
      const float *query = chunk.query.plain + i * M, *key = chunk.key.plain + i * M;
      if (counts.starts(t)) flows.restart();
      flows.keys.add(1.0f, key);
      flows.queries.add(1.0f, query);
      flows.key_flow.add(count_over(counts.sinks[t], terms.outgoing[at]), key);
      flows.query_flow.add(count_over(counts.sources[t], terms.incoming[at]), query);
      float *q = chunk.far + i * M, *k = chunk.near + i * M;
      for (int j = 0; j < M; j += kLanes) {
        store(q + j, state.sink[t] * load(flows.key_flow.sum + j) +
                         state.incoming[t] * load(flows.keys.sum + j));
        store(k + j, state.source[t] * load(flows.query_flow.sum + j) +
                         state.outgoing[t] * load(flows.queries.sum + j));
      }
    }
    chunk.add_to_query(head, chunk.far, of_query, true);
    chunk.add_to_key(head, chunk.near, of_key, true);
  });
}

}  // namespace lra
