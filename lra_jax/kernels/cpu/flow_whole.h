// Non-causal Flow-Attention: its flows, and the product of the two factors that they give.
//
// A flow is an inner product with a sum over all positions, so four sweeps are needed
// forward (keys, queries, keys, queries) and four backward (queries, keys, queries, keys).
// For the equations see lra_jax/attention/flow/whole.py; the gradient is the chain rule.

#pragma once

#include "flow.h"
#include "whole.h"

namespace lra {

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

// Adds ``sum_i weight_i x_i`` over features [C, M], and in the register after it
// ``sum_i weight_i``.
inline void add_weighted(int count, int M, const float* features, const float* weights,
                         float* to) {
  add_rows(count, M, features, weights, to);
  for (int i = 0; i < count; i++) to[M] += weights[i];
}

// Whether the gradient passes an O': also at the bounds.
inline bool passes_clip(const FlowOptions& options, float logit) {
  return !(std::abs(logit) > options.clip);
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

// A block of keys with their shares exp(O' - largest) in the competition.
struct Competing {
  Sums product;     // of keys and values, with the shares
  float* key_flow;  // sum of keys with their weights 1 / O, [M + kLanes]
  float* largest;   // O' so far, within the clip
  float* any;       // not 0 if any key was visible

  static int64_t size(const Call& call) {
    return Sums::size(call) + call.M() + 2 * kLanes;
  }
  Competing(const Call& call, float* memory)
      : product(Sums::at(call, memory, 0)),
        key_flow(memory + Sums::size(call)),
        largest(key_flow + call.M() + kLanes),
        any(largest + 1) {}

  // Makes the shares those of another largest O'.
  void relate(const Call& call, float to) {
    if (*any != 0 && *largest != to) {
      const float factor = exponential(*largest - to);
      for (int64_t i = 0; i < Sums::size(call); i++) product.outer[i] *= factor;
    }
    *any = 1;
    *largest = to;
  }
};

// Writes c of one head from O': the softmax over its visible sources, times their number.
// Returns the factor that makes shares exp(O' - largest) of them.
inline float compete(const Call& call, const FlowOptions& options, int64_t row,
                     float sources, float largest, const WholeTerms& to) {
  const float* shown = call.mask ? call.mask + row / call.heads * call.keys : nullptr;
  const float* logits = to.logit + row * call.keys;
  float* competition = to.competition + row * call.keys;
  double total = 0;
  for (int64_t at = 0; at < call.keys; at += kLanes) {
    const int count = static_cast<int>(std::min<int64_t>(kLanes, call.keys - at));
    float shares[kLanes] = {};
    for (int j = 0; j < count; j++)
      shares[j] = within(logits[at + j], options.clip) - largest;
    store(shares, exponential(load(shares)));
    for (int j = 0; j < count; j++) {
      competition[at + j] = shown && shown[at + j] == 0 ? 0.0f : shares[j];
      total += competition[at + j];
    }
  }
  const float factor = over(sources, static_cast<float>(total));
  for (int64_t s = 0; s < call.keys; s++) competition[s] *= factor;
  return factor;
}

// Writes the output [B, T, N, Hv], the terms of all positions, and the sums of the
// output's product [B, N, size].
template <class Passes>
void whole_flow_forward(const Passes& passes, const Call& call,
                        const FlowOptions& options, const std::vector<Totals>& totals,
                        const WholeTerms& to, float* out, float* product_sums) {
  const int M = call.M(), heads = call.heads;
  const int64_t size = M + kLanes;
  const FlowSums sums(call, to.sums);
  const auto unit_of = [&](int64_t row) { return call.unit[row / heads]; };
  const auto keep = [&](int64_t row, const float* sum, float eps, const Vectors& in) {
    std::copy(sum, sum + size, in.of(row));
    add_eps(call, eps, in.of(row));
  };
  // (x + eps) . total, with totals of features.
  const auto flow = [&](int64_t row, const float* x, const Vectors& total) {
    const float unit = unit_of(row);
    return inner(M, x, options.eps / unit, total.of(row)) +
           options.extra_eps / (unit * unit);
  };
  const auto conserved = [&](int64_t row, const float* x, const Vectors& total) {
    return inner(M, x, options.eps / unit_of(row), total.of(row)) + options.extra_eps;
  };
  const auto add_key = [&](Chunk& chunk, int head, float* part) {
    chunk.read_key(head);
    add_rows(chunk.count, M, chunk.key.plain, nullptr, part);
  };
  add_up(passes, call.keys, size, add_key, [&](int64_t row, const float* sum) {
    keep(row, sum, options.eps / unit_of(row), sums.keys);
  });
  const auto add_sink = [&](Chunk& chunk, int head, float* part) {
    chunk.read_query(head);
    float shares[kChunk];
    for (int i = 0; i < chunk.count; i++) {
      const int64_t at = chunk.place(i, call.queries, head);
      to.incoming[at] = flow(chunk.row(head), chunk.query.plain + i * M, sums.keys);
      shares[i] = count_over(1.0f, to.incoming[at]);
    }
    add_rows(chunk.count, M, chunk.query.plain, nullptr, part);
    add_rows(chunk.count, M, chunk.query.plain, shares, part + size);
  };
  add_up(passes, call.queries, 2 * size, add_sink, [&](int64_t row, const float* sum) {
    keep(row, sum, options.eps / unit_of(row), sums.queries);
    keep(row, sum + size, options.eps * unit_of(row), sums.query_flow);
  });
  const auto add_source = [&](Chunk& chunk, int head, float* memory) {
    Competing part(call, memory);
    chunk.read_key(head);
    float shares[kChunk], logits[kChunk] = {}, largest = *part.largest;
    bool any = *part.any != 0;
    for (int j = 0; j < chunk.count; j++) {
      const int64_t at = chunk.place(j, call.keys, head), row = chunk.row(head);
      const float* key = chunk.key.plain + j * M;
      to.outgoing[at] = flow(row, key, sums.queries);
      shares[j] = count_over(1.0f, to.outgoing[at]);
      to.logit[at] = conserved(row, key, sums.query_flow);
      logits[j] = within(to.logit[at], options.clip);
      if (chunk.hides(j)) continue;
      largest = any ? std::max(largest, logits[j]) : logits[j];
      any = true;
    }
    add_rows(chunk.count, M, chunk.key.plain, shares, part.key_flow);
    if (!any) return;
    part.relate(call, largest);
    for (int j = 0; j < kChunk; j += kLanes)
      store(logits + j, exponential(load(logits + j) - largest));
    for (int j = 0; j < chunk.count; j++)
      to.competition[chunk.place(j, call.keys, head)] = logits[j];
    chunk.read_value(head);
    add_read_keys(call, chunk, part.product);
  };
  const auto join = [&](float* parts, int64_t blocks) {
    Competing sum(call, parts);
    for (int64_t block = 1; block < blocks; block++) {
      Competing part(call, parts + block * Competing::size(call));
      if (*part.any != 0) {
        const float largest = std::max(*part.largest, *sum.largest);
        part.relate(call, *sum.any != 0 ? largest : *part.largest);
        sum.relate(call, *part.largest);
      }
      for (int64_t i = 0; i < Sums::size(call) + size; i++) parts[i] += part.product.outer[i];
    }
  };
  const auto take = [&](int64_t row, float* memory) {
    const Competing sum(call, memory);
    keep(row, sum.key_flow, options.eps * unit_of(row), sums.key_flow);
    const float factor =
        compete(call, options, row, totals[row / heads].sources, *sum.largest, to);
    float* product = product_sums + row * Sums::size(call);
    for (int64_t i = 0; i < Sums::size(call); i++) product[i] = factor * memory[i];
  };
  add_up(passes, call.keys, Competing::size(call), add_source, take, join);
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
  write_products(passes, call, out, product_sums, allocate);
}

// Gradients of the sums and of the terms.
struct WholeSlopes {
  FlowSums sums;
  float* factor;       // of the logarithm of a / I, [B, N, T]
  float* sink;         // of the sum in I', [B, N, T]
  float* competition;  // of c, less `mean`, [B, N, S]
  float* outgoing;     // of O, [B, N, S]
  float* mean;         // of c, weighted by c, up to rounding, [B, N]
  float* rest;         // what it lacks, [B, N]

  WholeSlopes(const Call& call, Room& room)
      : sums(call, room.take(call.batch * call.heads * 4 * (call.M() + kLanes))),
        mean(room.take(call.batch * call.heads)),
        rest(room.take(call.batch * call.heads)) {
    const int64_t each = call.batch * call.heads;
    for (float** x : {&factor, &sink}) *x = room.take(each * call.queries);
    for (float** x : {&competition, &outgoing}) *x = room.take(each * call.keys);
  }
};

// Writes the gradients of query, key and value, from the sums of the output's product.
inline void whole_flow_backward(const AllHeads& passes, const Call& call,
                                const FlowOptions& options,
                                const std::vector<Totals>& totals,
                                const WholeTerms& terms, const Slopes& of_product,
                                float* product_sums, const WholeSlopes& of,
                                float* of_query, float* of_key, float* of_value) {
  const int M = call.M(), W = call.W(), heads = call.heads;
  const int64_t size = M + kLanes, outer = static_cast<int64_t>(M) * W;
  const FlowSums sums(call, terms.sums);
  const FlowSums& slopes = of.sums;
  Room room;
  float* mirrored = room.take(passes.count() * Sums::size(call));
  // The gradient of a sum of (x + eps) times weights: so much for each x.
  const auto keep = [&](int64_t row, const float* sum, const Vectors& in) {
    std::copy(sum, sum + size, in.of(row));
    add_eps(call, sum[M] * options.eps / call.unit[row / heads], in.of(row));
  };
  const auto add_query = [&](Chunk& chunk, int head, float* part) {
    const Totals& real = totals[chunk.sample()];
    add_queries(call, chunk, head, of_product, Sums::at(call, part, 0));
    float of_sink[kChunk];
    for (int i = 0; i < chunk.count; i++) {
      const int64_t at = chunk.place(i, call.queries, head);
      of.factor[at] = chunk.along[i];
      of_sink[i] = of.sink[at] =
          chunk.along[i] * (1.0f - terms.allocation[at]) * (real.sinks / real.sources);
    }
    add_weighted(chunk.count, M, chunk.query.plain, of_sink, part + Sums::size(call));
  };
  add_up(passes, call.queries, Sums::size(call) + size, add_query,
         [&](int64_t row, const float* sum) {
           std::copy(sum, sum + Sums::size(call), Sums::at(call, mirrored, row).outer);
           keep(row, sum + Sums::size(call), slopes.key_flow);
           // sum_j c_j dc_j, which is also what the factors of all outputs have.
           double total = 0;
           for (int64_t t = 0; t < call.queries; t++)
             total += of.factor[row * call.queries + t];
           of.mean[row] = static_cast<float>(total / totals[row / heads].sources);
         });
  // With all of the competition in one place, its gradient is the difference of equal
  // numbers. It is exact, because the mean is known up to rounding before, and the rest
  // of it is added up with the gradients.
  const auto add_key = [&](Chunk& chunk, int head, float* part) {
    const int64_t row = chunk.row(head);
    chunk.read_key(head);
    product(kChunk, M, W, chunk.key.plain, Sums::at(call, mirrored, row).outer, chunk.rows,
            false);
    write_rows_of_values(call, chunk, head, of_value, of.competition);
    float shares[kChunk], sources[kChunk], of_outgoing[kChunk], rest = 0;
    for (int j = 0; j < chunk.count; j++) {
      const int64_t at = chunk.place(j, call.keys, head);
      const float competition = terms.competition[at];
      of.competition[at] -= of.mean[row];
      rest += competition * of.competition[at];
      shares[j] = passes_clip(options, terms.logit[at]) ? competition : 0.0f;
      sources[j] = shares[j] * of.competition[at];
      const float passed = dot(M, chunk.key.plain + j * M, slopes.key_flow.of(row)) *
                           count_over(1.0f, terms.outgoing[at]);
      of_outgoing[j] = of.outgoing[at] = -over(passed, terms.outgoing[at]);
    }
    for (const float* weights : {sources, shares, of_outgoing}) {
      add_weighted(chunk.count, M, chunk.key.plain, weights, part);
      part += size;
    }
    *part += rest;
  };
  add_up(passes, call.keys, 3 * size + kLanes, add_key, [&](int64_t row, float* sum) {
    of.rest[row] = sum[3 * size] / totals[row / heads].sources;
    for (int64_t i = 0; i < size; i++) sum[i] -= of.rest[row] * sum[size + i];
    keep(row, sum, slopes.query_flow);
    keep(row, sum + 2 * size, slopes.queries);
  });
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
  const float* turned = transposed_sums(passes, call, product_sums, room);
  const auto write_query = [&](Chunk& chunk, int head, float* part) {
    const int64_t row = chunk.row(head);
    chunk.read_query(head);
    read_rows(call, of_product.of_out, call.queries, nullptr, of_product.scale,
              chunk.sample(), head, chunk.first(), chunk.count, chunk.slope);
    product(kChunk, W, M, chunk.slope, turned + row * outer, chunk.far, false);
    float of_incoming[kChunk];
    for (int i = 0; i < chunk.count; i++) {
      const int64_t at = chunk.place(i, call.queries, head);
      const float flow = terms.incoming[at];
      const float passed = dot(M, chunk.query.plain + i * M, slopes.query_flow.of(row)) *
                           count_over(1.0f, flow);
      of_incoming[i] = -over(of.factor[at] + passed, flow);
      add(row, of_incoming[i], sums.keys, flow, slopes.query_flow, of.sink[at],
          sums.key_flow, slopes.queries, chunk.far + i * M);
    }
    add_weighted(chunk.count, M, chunk.query.plain, of_incoming, part);
    chunk.write_query(head, nullptr, of_query);
  };
  add_up(passes, call.queries, size, write_query,
         [&](int64_t row, const float* sum) { keep(row, sum, slopes.keys); });
  turned = transposed_sums(passes, call, mirrored, room);
  passes.chunks(call.keys, [&](Chunk& chunk, int head) {
    const int64_t row = chunk.row(head);
    chunk.read_value(head);
    product(kChunk, W, M, chunk.value, turned + row * outer, chunk.far, false);
    for (int j = 0; j < chunk.count; j++) {
      const int64_t at = chunk.place(j, call.keys, head);
      const float of_logit = terms.competition[at] * (of.competition[at] - of.rest[row]);
      add(row, of.outgoing[at], sums.queries, terms.outgoing[at], slopes.key_flow,
          passes_clip(options, terms.logit[at]) ? of_logit : 0.0f, sums.query_flow,
          slopes.keys, chunk.far + j * M);
    }
    chunk.write_key(head, nullptr, of_key);
  });
}

}  // namespace lra
