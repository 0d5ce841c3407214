// Non-causal Flow-Attention: its flows, and the product of the factors that they give.
//
// A flow is an inner product with a sum over all positions. So there are sweeps forward
// over keys, queries, keys, queries, and backward over queries, keys, queries, keys.
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

  static int64_t size(const Call& call) {
    return call.batch * call.heads * 4 * (call.M() + kLanes);
  }
  // Of memory [B, N, 4, M + kLanes].
  FlowSums(const Call& call, float* memory) {
    const int64_t size = call.M() + kLanes;
    Vectors* all[] = {&keys, &queries, &key_flow, &query_flow};
    for (int i = 0; i < 4; i++) *all[i] = {memory + i * size, 4 * size};
  }
};

// Kept by the forward pass for the gradient.
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
  void add(const Call& call, Competing other) {
    if (*other.any != 0) {
      const float either = std::max(*other.largest, *largest);
      other.relate(call, *any != 0 ? either : *other.largest);
      relate(call, *other.largest);
    }
    const int64_t sums = largest - product.outer;
    for (int64_t i = 0; i < sums; i++) product.outer[i] += other.product.outer[i];
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

// The sweeps of the forward pass, in their order.
template <class Passes>
class WholeForward {
 public:
  WholeForward(const Passes& passes, const Call& call, const FlowOptions& options,
               const std::vector<Totals>& totals, const WholeTerms& to)
      : passes_(passes),
        call_(call),
        options_(options),
        totals_(totals),
        to_(to),
        sums_(call, to.sums),
        M_(call.M()),
        size_(M_ + kLanes) {}

  void sweep_keys() const {
    const auto add = [&](Chunk& chunk, int head, float* part) {
      chunk.read_key(head);
      add_rows(chunk.count, M_, chunk.key.plain, nullptr, part);
    };
    add_up(passes_, call_.keys, size_, add, [&](int64_t row, const float* sum) {
      keep(row, sum, options_.eps / unit(row), sums_.keys);
    });
  }

  // Writes I.
  void sweep_queries() const {
    const auto add = [&](Chunk& chunk, int head, float* part) {
      chunk.read_query(head);
      float shares[kChunk];
      for (int i = 0; i < chunk.count; i++) {
        const int64_t at = chunk.place(i, call_.queries, head);
        to_.incoming[at] = flow(chunk.row(head), chunk.query.plain + i * M_, sums_.keys);
        shares[i] = count_over(1.0f, to_.incoming[at]);
      }
      add_rows(chunk.count, M_, chunk.query.plain, nullptr, part);
      add_rows(chunk.count, M_, chunk.query.plain, shares, part + size_);
    };
    add_up(passes_, call_.queries, 2 * size_, add, [&](int64_t row, const float* sum) {
      keep(row, sum, options_.eps / unit(row), sums_.queries);
      keep(row, sum + size_, options_.eps * unit(row), sums_.query_flow);
    });
  }

  // Writes O, O' and c, and the sums of the output's product [B, N, size].
  void sweep_sources(float* product_sums) const {
    const auto add = [&](Chunk& chunk, int head, float* memory) {
      add_sources(chunk, head, Competing(call_, memory));
    };
    const auto join = [&](float* parts, int64_t blocks) {
      for (int64_t block = 1; block < blocks; block++)
        Competing(call_, parts).add(
            call_, Competing(call_, parts + block * Competing::size(call_)));
    };
    const auto take = [&](int64_t row, float* memory) {
      const Competing sum(call_, memory);
      keep(row, sum.key_flow, options_.eps * unit(row), sums_.key_flow);
      const float sources = totals_[row / call_.heads].sources;
      const float factor = compete(call_, options_, row, sources, *sum.largest, to_);
      float* product = product_sums + row * Sums::size(call_);
      for (int64_t i = 0; i < Sums::size(call_); i++)
        product[i] = factor * sum.product.outer[i];
    };
    add_up(passes_, call_.keys, Competing::size(call_), add, take, join);
  }

  // Writes a, a / I and the output [B, T, N, Hv].
  void sweep_outputs(float* out, float* product_sums) const {
    const auto allocate = [&](Chunk& chunk, int head, const Sums&) {
      const Totals& real = totals_[chunk.sample()];
      ChunkRow sinks;
      for (int i = 0; i < chunk.count; i++)
        sinks[i] = conserved(chunk.row(head), chunk.query.plain + i * M_, sums_.key_flow);
      sinks.set([&](int i) {
        return Sigmoid::phi(load(sinks, i) * (real.sinks / real.sources));
      });
      for (int i = 0; i < chunk.count; i++) {
        const int64_t at = chunk.place(i, call_.queries, head);
        to_.allocation[at] = sinks[i];
        to_.factor[at] = chunk.hides_query(i) ? 0.0f : over(sinks[i], to_.incoming[at]);
        chunk.through[i] = to_.factor[at];
      }
    };
    write_products(passes_, call_, out, product_sums, allocate);
  }

 private:
  float unit(int64_t row) const { return call_.unit[row / call_.heads]; }
  // (x + eps) . total, with totals of features.
  float flow(int64_t row, const float* x, const Vectors& total) const {
    return inner(M_, x, options_.eps / unit(row), total.of(row)) +
           options_.extra_eps / (unit(row) * unit(row));
  }
  float conserved(int64_t row, const float* x, const Vectors& total) const {
    return inner(M_, x, options_.eps / unit(row), total.of(row)) + options_.extra_eps;
  }
  void keep(int64_t row, const float* sum, float eps, const Vectors& in) const {
    std::copy(sum, sum + size_, in.of(row));
    add_eps(call_, eps, in.of(row));
  }
  void add_sources(Chunk& chunk, int head, Competing part) const {
    const int64_t row = chunk.row(head);
    float shares[kChunk], logits[kChunk] = {}, largest = *part.largest;
    bool any = *part.any != 0;
    chunk.read_key(head);
    for (int j = 0; j < chunk.count; j++) {
      const int64_t at = chunk.place(j, call_.keys, head);
      const float* key = chunk.key.plain + j * M_;
      to_.outgoing[at] = flow(row, key, sums_.queries);
      shares[j] = count_over(1.0f, to_.outgoing[at]);
      to_.logit[at] = conserved(row, key, sums_.query_flow);
      logits[j] = within(to_.logit[at], options_.clip);
      if (chunk.hides(j)) continue;
      largest = any ? std::max(largest, logits[j]) : logits[j];
      any = true;
    }
    add_rows(chunk.count, M_, chunk.key.plain, shares, part.key_flow);
    if (!any) return;
    part.relate(call_, largest);
    for (int j = 0; j < kChunk; j += kLanes)
      store(logits + j, exponential(load(logits + j) - largest));
    // From there they are read as the weights of the values.
    for (int j = 0; j < chunk.count; j++)
      to_.competition[chunk.place(j, call_.keys, head)] = logits[j];
    chunk.read_value(head);
    add_read_keys(call_, chunk, part.product);
  }

  const Passes& passes_;
  const Call& call_;
  const FlowOptions& options_;
  const std::vector<Totals>& totals_;
  const WholeTerms& to_;
  const FlowSums sums_;
  const int M_;
  const int64_t size_;
};

// Writes the output [B, T, N, Hv], the terms of all positions, and the sums of the
// output's product [B, N, size].
template <class Passes>
void whole_flow_forward(const Passes& passes, const Call& call,
                        const FlowOptions& options, const std::vector<Totals>& totals,
                        const WholeTerms& to, float* out, float* product_sums) {
  const WholeForward<Passes> pass(passes, call, options, totals, to);
  pass.sweep_keys();
  pass.sweep_queries();
  pass.sweep_sources(product_sums);
  pass.sweep_outputs(out, product_sums);
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
      : sums(call, room.take_unset(FlowSums::size(call))),
        mean(room.take_unset(call.batch * call.heads)),
        rest(room.take_unset(call.batch * call.heads)) {
    const int64_t each = call.batch * call.heads;
    for (float** x : {&factor, &sink}) *x = room.take_unset(each * call.queries);
    for (float** x : {&competition, &outgoing}) *x = room.take_unset(each * call.keys);
  }
};

// The sweeps of the backward pass, in their order.
template <class Passes>
class WholeBackward {
 public:
  WholeBackward(const Passes& passes, const Call& call, const FlowOptions& options,
                const std::vector<Totals>& totals, const WholeTerms& terms,
                const Slopes& of_product)
      : passes_(passes),
        call_(call),
        options_(options),
        totals_(totals),
        terms_(terms),
        of_product_(of_product),
        sums_(call, terms.sums),
        M_(call.M()),
        W_(call.W()),
        size_(M_ + kLanes),
        of_(call, room_),
        mirrored_(room_.take_unset(call.batch * call.heads * Sums::size(call))) {}

  // Sums queries with the gradients of the output and of the sinks.
  void sweep_outputs() {
    const int64_t product_size = Sums::size(call_);
    const auto add = [&](Chunk& chunk, int head, float* part) {
      const Totals& real = totals_[chunk.sample()];
      add_queries(call_, chunk, head, of_product_, Sums::at(call_, part, 0));
      float of_sink[kChunk];
      for (int i = 0; i < chunk.count; i++) {
        const int64_t at = chunk.place(i, call_.queries, head);
        of_.factor[at] = chunk.along[i];
        of_sink[i] = of_.sink[at] = chunk.along[i] * (1.0f - terms_.allocation[at]) *
                                    (real.sinks / real.sources);
      }
      add_weighted(chunk.count, M_, chunk.query.plain, of_sink, part + product_size);
    };
    add_up(passes_, call_.queries, product_size + size_, add,
           [&](int64_t row, const float* sum) {
             std::copy(sum, sum + product_size, mirrored(row).outer);
             keep(row, sum + product_size, of_.sums.key_flow);
             // sum_j c_j dc_j, which is also what the factors of all outputs have.
             double total = 0;
             for (int64_t t = 0; t < call_.queries; t++)
               total += of_.factor[row * call_.queries + t];
             of_.mean[row] = static_cast<float>(total / sources(row));
           });
  }

  // Writes the gradient of the value, and sums keys with those of c, O and O'.
  //
  // With all of the competition in one place, its gradient is the difference of equal
  // numbers. It is exact, because the mean is known up to rounding before, and the rest
  // of it is added up with the gradients.
  void sweep_sources(float* of_value) {
    const auto add = [&](Chunk& chunk, int head, float* part) {
      const int64_t row = chunk.row(head);
      chunk.read_key(head);
      product(kChunk, M_, W_, chunk.key.plain, mirrored(row).outer, chunk.rows, false);
      write_rows_of_values(call_, chunk, head, of_value, of_.competition);
      float shares[kChunk], of_logit[kChunk], of_outgoing[kChunk], rest = 0;
      for (int j = 0; j < chunk.count; j++) {
        const int64_t at = chunk.place(j, call_.keys, head);
        const float competition = terms_.competition[at];
        of_.competition[at] -= of_.mean[row];
        rest += competition * of_.competition[at];
        shares[j] = passes_clip(options_, terms_.logit[at]) ? competition : 0.0f;
        of_logit[j] = shares[j] * of_.competition[at];
        const float* key = chunk.key.plain + j * M_;
        of_outgoing[j] = of_.outgoing[at] = through_share(
            0.0f, key, of_.sums.key_flow.of(row), terms_.outgoing[at]);
      }
      for (const float* weights : {of_logit, shares, of_outgoing}) {
        add_weighted(chunk.count, M_, chunk.key.plain, weights, part);
        part += size_;
      }
      *part += rest;
    };
    add_up(passes_, call_.keys, 3 * size_ + kLanes, add, [&](int64_t row, float* sum) {
      of_.rest[row] = sum[3 * size_] / sources(row);
      for (int64_t i = 0; i < size_; i++) sum[i] -= of_.rest[row] * sum[size_ + i];
      keep(row, sum, of_.sums.query_flow);
      keep(row, sum + 2 * size_, of_.sums.queries);
    });
  }

  // Writes the gradient of the query, and sums queries with that of I.
  void sweep_queries(float* product_sums, float* of_query) {
    const float* turned = transposed_sums(passes_, call_, product_sums, room_);
    const auto add = [&](Chunk& chunk, int head, float* part) {
      const int64_t row = chunk.row(head);
      chunk.read_query(head);
      read_rows(call_, of_product_.of_out, call_.queries, nullptr, of_product_.scale,
                chunk.sample(), head, chunk.first(), chunk.count, chunk.slope);
      product(kChunk, W_, M_, chunk.slope, turned + row * M_ * W_, chunk.far, false);
      float of_incoming[kChunk];
      for (int i = 0; i < chunk.count; i++) {
        const int64_t at = chunk.place(i, call_.queries, head);
        const float flow = terms_.incoming[at];
        of_incoming[i] = through_share(of_.factor[at], chunk.query.plain + i * M_,
                                       of_.sums.query_flow.of(row), flow);
        add_flows(row, of_incoming[i], sums_.keys, flow, of_.sums.query_flow,
                  of_.sink[at], sums_.key_flow, of_.sums.queries, chunk.far + i * M_);
      }
      add_weighted(chunk.count, M_, chunk.query.plain, of_incoming, part);
      chunk.write_query(head, nullptr, of_query);
    };
    add_up(passes_, call_.queries, size_, add,
           [&](int64_t row, const float* sum) { keep(row, sum, of_.sums.keys); });
  }

  // Writes the gradient of the key.
  void sweep_keys(float* of_key) {
    const float* turned = transposed_sums(passes_, call_, mirrored_, room_);
    passes_.chunks(call_.keys, [&](Chunk& chunk, int head) {
      const int64_t row = chunk.row(head);
      chunk.read_value(head);
      product(kChunk, W_, M_, chunk.value, turned + row * M_ * W_, chunk.far, false);
      for (int j = 0; j < chunk.count; j++) {
        const int64_t at = chunk.place(j, call_.keys, head);
        const float of_logit =
            terms_.competition[at] * (of_.competition[at] - of_.rest[row]);
        add_flows(row, of_.outgoing[at], sums_.queries, terms_.outgoing[at],
                  of_.sums.key_flow,
                  passes_clip(options_, terms_.logit[at]) ? of_logit : 0.0f,
                  sums_.query_flow, of_.sums.keys, chunk.far + j * M_);
      }
      chunk.write_key(head, nullptr, of_key);
    });
  }

 private:
  float sources(int64_t row) const { return totals_[row / call_.heads].sources; }
  Sums mirrored(int64_t row) const { return Sums::at(call_, mirrored_, row); }
  // The gradient of a sum of (x + eps) times weights, for each x.
  void keep(int64_t row, const float* sum, const Vectors& in) const {
    std::copy(sum, sum + size_, in.of(row));
    add_eps(call_, sum[M_] * options_.eps / call_.unit[row / call_.heads], in.of(row));
  }
  // The gradient of a flow: through its logarithm, and through the share 1 / flow of a
  // position's features x in a sum.
  float through_share(float of_logarithm, const float* x, const float* of_sum,
                      float flow) const {
    const float passed = dot(M_, x, of_sum) * count_over(1.0f, flow);
    return -over(of_logarithm + passed, flow);
  }
  // Adds to the gradient of a position's features, besides the product: through its
  // flow, its share of a sum, and its conserved flow.
  void add_flows(int64_t row, float of_flow, const Vectors& total, float flow,
                 const Vectors& of_shares, float of_conserved, const Vectors& shares,
                 const Vectors& of_total, float* to) const {
    const float share = count_over(1.0f, flow);
    for (int j = 0; j < M_; j += kLanes)
      store(to + j,
            load(to + j) + of_flow * load(total.of(row) + j) +
                share * load(of_shares.of(row) + j) +
                of_conserved * load(shares.of(row) + j) + load(of_total.of(row) + j));
  }

  const Passes& passes_;
  const Call& call_;
  const FlowOptions& options_;
  const std::vector<Totals>& totals_;
  const WholeTerms& terms_;
  const Slopes& of_product_;
  const FlowSums sums_;
  const int M_, W_;
  const int64_t size_;
  Room room_;
  const WholeSlopes of_;
  // sums of queries and gradients, as `Sums`, [B, N, size]
  float* const mirrored_;
};

// Writes the gradients of query, key and value, from the sums of the output's product.
template <class Passes>
void whole_flow_backward(const Passes& passes, const Call& call,
                         const FlowOptions& options, const std::vector<Totals>& totals,
                         const WholeTerms& terms, const Slopes& of_product,
                         float* product_sums, float* of_query, float* of_key,
                         float* of_value) {
  WholeBackward<Passes> pass(passes, call, options, totals, terms, of_product);
  pass.sweep_outputs();
  pass.sweep_sources(of_value);
  pass.sweep_queries(product_sums, of_query);
  pass.sweep_keys(of_key);
}

}  // namespace lra
