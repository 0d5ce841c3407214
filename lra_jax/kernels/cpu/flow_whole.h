// Non-causal Flow-Attention: its flows, and the product of the two factors that they give.
//
// A flow is an inner product with a sum over all positions, so each sum is a pass. For
// the equations see lra_jax/attention/flow/whole.py; the gradient is the chain rule.

#pragma once

#include "flow.h"
#include "whole.h"

namespace lra {

enum class Side { kQueries, kKeys };

// One vector of each head, with room for one more register.
struct Vectors {
  float* first;
  int64_t step;

  float* of(int64_t row) const { return first + row * step; }
};

// Sums over the positions of each head, [M], each with the eps of its inner product.
struct FlowSums {
  Vectors keys, queries, key_flow, query_flow;

  // Of memory [B, N, 4, M + kLanes].
  FlowSums(const Call& call, float* memory) {
    const int64_t size = call.M() + kLanes;
    Vectors* all[] = {&keys, &queries, &key_flow, &query_flow};
    for (int i = 0; i < 4; i++) *all[i] = {memory + i * size, 4 * size};
  }
};

// What the forward pass keeps.
struct WholeTerms {
  float* incoming;     // I, in the square of the features' unit, [B, N, T]
  float* allocation;   // a, [B, N, T]
  float* outgoing;     // O, in the square of the features' unit, [B, N, S]
  float* logit;        // O', [B, N, S]
  float* sums;         // `FlowSums`
  float* competition;  // c, [B, N, S]
  float* factor;       // a / I, [B, N, T]
};

// Real queries and keys of a sample, at least 1.
struct Totals {
  float sinks, sources;

  Totals(const Call& call, int64_t sample)
      : sinks(real(call.query_mask, sample, call.queries)),
        sources(real(call.mask, sample, call.keys)) {}

 private:
  static float real(const float* mask, int64_t sample, int64_t length) {
    int64_t count = mask ? 0 : length;
    for (int64_t i = 0; mask && i < length; i++) count += mask[sample * length + i] != 0;
    return static_cast<float>(std::max<int64_t>(1, count));
  }
};

inline std::vector<Totals> totals_of(const Call& call) {
  std::vector<Totals> totals;
  for (int64_t sample = 0; sample < call.batch; sample++)
    totals.emplace_back(call, sample);
  return totals;
}

// The features of a chunk of queries or keys, [C, M].
inline const float* read(Chunk& chunk, int head, Side side) {
  if (side == Side::kQueries) {
    chunk.read_query(head);
    return chunk.query.plain;
  }
  chunk.read_key(head);
  return chunk.key.plain;
}

// ``sum_i weight_i x_i`` over the features of each head, and in the register after them
// ``sum_i weight_i``. `weigh` gives a position's weight, from its place in [B, N, T].
template <class Passes, class Weigh>
void sum_features(const Passes& passes, const Call& call, Side side, Vectors to,
                  const Weigh& weigh) {
  const int M = call.M();
  const int64_t length = side == Side::kQueries ? call.queries : call.keys;
  const auto add = [&](Chunk& chunk, int head, float* part) {
    const float* features = read(chunk, head, side);
    float weights[kChunk];
    for (int i = 0; i < chunk.count; i++) {
      weights[i] = weigh(chunk.row(head), chunk.place(i, length, head), features + i * M);
      part[M] += weights[i];
    }
    add_rows(chunk.count, M, features, weights, part);
  };
  add_up(passes, length, M + kLanes, add, [&](int64_t row, const float* sum) {
    std::copy(sum, sum + M + kLanes, to.of(row));
  });
}

// Adds a number to each of the H columns; beyond them sums stay zero.
inline void add_eps(const Call& call, float eps, float* sum) {
  for (int j = 0; j < call.width; j++) sum[j] += eps;
}

// ``(x + eps) . sum``
inline float inner(int M, const float* x, float eps, const float* sum_of) {
  Vec total{};
  for (int j = 0; j < M; j += kLanes) total += (load(x + j) + eps) * load(sum_of + j);
  return sum(total);
}

// Writes c of one head from O': the softmax over its visible sources, times their number.
inline void compete(const Call& call, const FlowOptions& options, int64_t row,
                    float sources, const WholeTerms& to) {
  const int64_t sample = row / call.heads, first = row * call.keys;
  const auto hidden = [&](int64_t s) {
    return call.mask && call.mask[sample * call.keys + s] == 0;
  };
  float largest = -options.clip;
  bool any = false;
  for (int64_t s = 0; s < call.keys; s++) {
    if (hidden(s)) continue;
    const float logit = to.logit[first + s];
    largest = any ? std::max(largest, logit) : logit;
    any = true;
  }
  largest = within(largest, options.clip);
  double total = 0;
  for (int64_t s = 0; s < call.keys; s++) {
    const float logit = within(to.logit[first + s], options.clip);
    const float share = hidden(s) ? 0.0f : exponential(logit - largest);
    to.competition[first + s] = share;
    total += share;
  }
  for (int64_t s = 0; s < call.keys; s++) {
    float& share = to.competition[first + s];
    share = sources * over(share, static_cast<float>(total));
  }
}

// Writes the output [B, T, N, Hv], the terms of all positions, and the sums of the
// output's product [B, N, size].
template <class Passes>
void whole_flow_forward(const Passes& passes, const Call& call,
                        const FlowOptions& options, const std::vector<Totals>& totals,
                        const WholeTerms& to, float* out, float* product_sums) {
  const int M = call.M(), heads = call.heads;
  const FlowSums sums(call, to.sums);
  const auto unit_of = [&](int64_t row) { return call.unit[row / heads]; };
  const auto plain = [](int64_t, int64_t, const float*) { return 1.0f; };
  sum_features(passes, call, Side::kKeys, sums.keys, plain);
  sum_features(passes, call, Side::kQueries, sums.queries, plain);
  passes.heads([&](int64_t row) {
    for (const Vectors& each : {sums.keys, sums.queries})
      add_eps(call, options.eps / unit_of(row), each.of(row));
  });
  // (x + eps) . total, with totals of features.
  const auto flow = [&](int64_t row, const float* x, const Vectors& total) {
    const float unit = unit_of(row);
    return inner(M, x, options.eps / unit, total.of(row)) +
           options.extra_eps / (unit * unit);
  };
  sum_features(passes, call, Side::kQueries, sums.query_flow,
               [&](int64_t row, int64_t at, const float* query) {
                 to.incoming[at] = flow(row, query, sums.keys);
                 return count_over(1.0f, to.incoming[at]);
               });
  sum_features(passes, call, Side::kKeys, sums.key_flow,
               [&](int64_t row, int64_t at, const float* key) {
                 to.outgoing[at] = flow(row, key, sums.queries);
                 return count_over(1.0f, to.outgoing[at]);
               });
  passes.heads([&](int64_t row) {
    for (const Vectors& each : {sums.key_flow, sums.query_flow})
      add_eps(call, options.eps * unit_of(row), each.of(row));
  });
  const auto conserved = [&](int64_t row, const float* x, const Vectors& total) {
    return inner(M, x, options.eps / unit_of(row), total.of(row)) + options.extra_eps;
  };
  passes.chunks(call.keys, [&](Chunk& chunk, int head) {
    const float* features = read(chunk, head, Side::kKeys);
    for (int j = 0; j < chunk.count; j++)
      to.logit[chunk.place(j, call.keys, head)] =
          conserved(chunk.row(head), features + j * M, sums.query_flow);
  });
  passes.heads([&](int64_t row) {
    compete(call, options, row, totals[row / heads].sources, to);
  });
  const auto allocate = [&](Chunk& chunk, int head, const Sums&) {
    const Totals& real = totals[chunk.sample()];
    for (int i = 0; i < chunk.count; i++) {
      const int64_t at = chunk.place(i, call.queries, head);
      const float* query = chunk.query.plain + i * M;
      const float sink = conserved(chunk.row(head), query, sums.key_flow);
      to.allocation[at] =
          1.0f / (1.0f + exponential(-sink * (real.sinks / real.sources)));
      to.factor[at] =
          chunk.hides_query(i) ? 0.0f : over(to.allocation[at], to.incoming[at]);
      chunk.through[i] = to.factor[at];
    }
  };
  whole_forward(passes, call, out, product_sums, allocate);
}

// Gradients of the sums and of the terms.
struct WholeSlopes {
  FlowSums sums;
  float* factor;       // of the logarithm of a / I, [B, N, T]
  float* incoming;     // of I, [B, N, T]
  float* sink;         // of the sum in I', [B, N, T]
  float* competition;  // of c, [B, N, S]
  float* outgoing;     // of O, [B, N, S]
  float* source;       // of O', [B, N, S]

  WholeSlopes(const Call& call, Room& room)
      : sums(call, room.take(call.batch * call.heads * 4 * (call.M() + kLanes))) {
    const int64_t each = call.batch * call.heads;
    for (float** x : {&factor, &incoming, &sink}) *x = room.take(each * call.queries);
    for (float** x : {&competition, &outgoing, &source}) *x = room.take(each * call.keys);
  }
};

// Writes the gradient of the value, and those of factor and competition. Leaves the sums
// of queries and gradients in `mirrored`, of each head of the passes.
template <class Passes>
void whole_flow_of_factors(const Passes& passes, const Call& call, const Slopes& slopes,
                           float* mirrored, const WholeSlopes& of, float* of_value) {
  add_products(passes, call, call.queries, mirrored, [&](Chunk& chunk, int head, Sums to) {
    add_queries(call, chunk, head, slopes, to);
    for (int i = 0; i < chunk.count; i++)
      of.factor[chunk.place(i, call.queries, head)] = chunk.along[i];
  });
  passes.chunks(call.keys, [&](Chunk& chunk, int head) {
    const int64_t row = chunk.row(head) - passes.first();
    chunk.read_key(head);
    product(kChunk, call.M(), call.W(), chunk.key.plain,
            Sums::at(call, mirrored, row).outer, chunk.rows, false);
    write_rows_of_values(call, chunk, head, of_value, of.competition);
  });
}

// Writes the gradients of query, key and value, from the sums of the output's product.
template <class Passes>
void whole_flow_backward(const Passes& passes, const Call& call,
                         const FlowOptions& options, const std::vector<Totals>& totals,
                         const WholeTerms& terms, const Slopes& of_product,
                         float* product_sums, const WholeSlopes& of, float* of_query,
                         float* of_key, float* of_value) {
  const int M = call.M(), W = call.W(), heads = call.heads;
  Room room;
  float* mirrored = room.take(passes.count() * Sums::size(call));
  whole_flow_of_factors(passes, call, of_product, mirrored, of, of_value);
  const FlowSums sums(call, terms.sums);
  const FlowSums& slopes = of.sums;
  passes.heads([&](int64_t row) {
    const Totals& real = totals[row / heads];
    for (int64_t t = 0; t < call.queries; t++) {
      const int64_t at = row * call.queries + t;
      of.sink[at] =
          of.factor[at] * (1.0f - terms.allocation[at]) * (real.sinks / real.sources);
    }
    double competed = 0;
    for (int64_t s = 0; s < call.keys; s++) {
      const int64_t at = row * call.keys + s;
      // As exact as the sum: with all of the competition in one place, its gradient is
      // the difference of equal numbers.
      competed += static_cast<double>(of.competition[at]) * terms.competition[at];
    }
    const float mean = static_cast<float>(competed / real.sources);
    for (int64_t s = 0; s < call.keys; s++) {
      const int64_t at = row * call.keys + s;
      // The gradient passes at the bounds, too.
      const bool clipped = std::abs(terms.logit[at]) > options.clip;
      of.source[at] =
          clipped ? 0.0f : terms.competition[at] * (of.competition[at] - mean);
    }
  });
  // The gradient of a sum of (x + eps) times weights: so much for each x.
  const auto with_eps = [&](const Vectors& each) {
    passes.heads([&](int64_t row) {
      add_eps(call, each.of(row)[M] * options.eps / call.unit[row / heads], each.of(row));
    });
  };
  sum_features(passes, call, Side::kQueries, slopes.key_flow,
               [&](int64_t, int64_t at, const float*) { return of.sink[at]; });
  sum_features(passes, call, Side::kKeys, slopes.query_flow,
               [&](int64_t, int64_t at, const float*) { return of.source[at]; });
  with_eps(slopes.key_flow);
  with_eps(slopes.query_flow);
  sum_features(passes, call, Side::kQueries, slopes.keys,
               [&](int64_t row, int64_t at, const float* query) {
                 const float share = count_over(1.0f, terms.incoming[at]);
                 const float passed = dot(M, query, slopes.query_flow.of(row)) * share;
                 of.incoming[at] = -over(of.factor[at] + passed, terms.incoming[at]);
                 return of.incoming[at];
               });
  sum_features(passes, call, Side::kKeys, slopes.queries,
               [&](int64_t row, int64_t at, const float* key) {
                 const float share = count_over(1.0f, terms.outgoing[at]);
                 const float passed = dot(M, key, slopes.key_flow.of(row)) * share;
                 of.outgoing[at] = -over(passed, terms.outgoing[at]);
                 return of.outgoing[at];
               });
  with_eps(slopes.keys);
  with_eps(slopes.queries);
  // Of a position's features, besides the product: through its flow, its share of a sum,
  // and its conserved flow.
  const auto add = [&](int64_t row, float of_flow, const Vectors& total, float flow,
                       const Vectors& of_shares, float of_conserved,
                       const Vectors& shares, const Vectors& of_total, float* to) {
    const float share = count_over(1.0f, flow);
    for (int j = 0; j < M; j += kLanes)
      store(to + j,
            load(to + j) + of_flow * load(total.of(row) + j) +
                share * load(of_shares.of(row) + j) +
                of_conserved * load(shares.of(row) + j) + load(of_total.of(row) + j));
  };
  const int64_t size = static_cast<int64_t>(M) * W;
  float* mine = product_sums + passes.first() * Sums::size(call);
  const float* turned = transposed_sums(passes, call, mine, room);
  passes.chunks(call.queries, [&](Chunk& chunk, int head) {
    const int64_t row = chunk.row(head);
    read_rows(call, of_product.of_out, call.queries, nullptr, of_product.scale,
              chunk.sample(), head, chunk.first(), chunk.count, chunk.slope);
    product(kChunk, W, M, chunk.slope, turned + (row - passes.first()) * size, chunk.far,
            false);
    for (int i = 0; i < chunk.count; i++) {
      const int64_t at = chunk.place(i, call.queries, head);
      add(row, of.incoming[at], sums.keys, terms.incoming[at], slopes.query_flow,
          of.sink[at], sums.key_flow, slopes.queries, chunk.far + i * M);
    }
    chunk.write_query(head, nullptr, of_query);
  });
  turned = transposed_sums(passes, call, mirrored, room);
  passes.chunks(call.keys, [&](Chunk& chunk, int head) {
    const int64_t row = chunk.row(head);
    chunk.read_value(head);
    product(kChunk, W, M, chunk.value, turned + (row - passes.first()) * size, chunk.far,
            false);
    for (int j = 0; j < chunk.count; j++) {
      const int64_t at = chunk.place(j, call.keys, head);
      add(row, of.outgoing[at], sums.queries, terms.outgoing[at], slopes.key_flow,
          of.source[at], sums.query_flow, slopes.keys, chunk.far + j * M);
    }
    chunk.write_key(head, nullptr, of_key);
  });
}

}  // namespace lra
