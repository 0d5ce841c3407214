// The causal form: ``out_i = scale_i sum_{j <= i} w_ij v_j``, in one walk of each head.

#pragma once

#include "chunk.h"

namespace lra {

// How heads and sequences are shared between threads.
class Plan {
 public:
  // A sequence is cut into segments only if there are fewer heads than threads.
  Plan(const Call& call, int64_t threads)
      : groups(call, threads), length_(call.queries) {
    const int64_t shared = std::max<int64_t>(1, groups.count());
    const int64_t wanted = std::max<int64_t>(1, (threads + shared - 1) / shared);
    const int64_t most = std::max<int64_t>(1, length_ / (8 * kChunk));
    segments = std::min(wanted, most);
    const int64_t chunks = (length_ + kChunk - 1) / kChunk;
    segment_ = (chunks + segments - 1) / segments * kChunk;
    segments = std::max<int64_t>(1, (length_ + segment_ - 1) / segment_);
  }
  int64_t first(int64_t segment) const { return segment * segment_; }
  int64_t last(int64_t segment) const {
    return std::min(length_, (segment + 1) * segment_);
  }
  int64_t tasks() const { return groups.count() * segments; }

  Groups groups;
  int64_t segments;

 private:
  int64_t length_, segment_;
};

// A walk through the chunks of all heads, from the first position, or from the last if
// `backward`. `add` adds a chunk of a head to sums: what a segment starts with.
class Walk {
 public:
  template <class Add>
  Walk(const Call& call, xla::ffi::ThreadPool& pool, bool backward, const Add& add)
      : call_(call), plan_(call, pool.num_threads()), backward_(backward) {
    const Plan& plan = plan_;
    if (plan.segments == 1) return;
    const int64_t heads = call.batch * call.heads;
    memory_ = room_.take(heads * plan.segments * Sums::size(call));
    in_parallel(pool, plan.tasks(), [&](int64_t task) {
      const int64_t segment = task % plan.segments;
      const int64_t next = backward ? segment - 1 : segment + 1;
      if (next < 0 || next == plan.segments) return;
      const Heads heads = plan.groups[task / plan.segments];
      Chunk chunk(call, heads.sample);
      for (int64_t at = plan.first(segment); at < plan.last(segment); at += kChunk) {
        chunk.move_to(at, call.queries);
        for (int head = heads.first; head < heads.last; head++)
          add(chunk, head, sums(heads.sample, head, next));
      }
    });
    const int64_t size = Sums::size(call);
    in_parallel(pool, heads, [&](int64_t head) {
      for (int64_t step = 1; step < plan.segments; step++) {
        const int64_t to = backward ? plan.segments - 1 - step : step;
        float* here = memory_ + (head * plan.segments + to) * size;
        const float* from = backward ? here + size : here - size;
        for (int64_t i = 0; i < size; i++) here[i] += from[i];
      }
    });
  }

  // Calls `visit` with each chunk and head, and with the head's sums of all earlier
  // chunks, or later ones if `backward`, to which it adds the chunk.
  template <class Visit>
  void operator()(xla::ffi::ThreadPool& pool, const Visit& visit) const {
    in_parallel(pool, plan_.tasks(), [&](int64_t task) {
      const Heads heads = plan_.groups[task / plan_.segments];
      const int64_t segment = task % plan_.segments;
      const int64_t first = plan_.first(segment);
      const int64_t chunks = (plan_.last(segment) - first + kChunk - 1) / kChunk;
      Chunk chunk(call_, heads.sample);
      float* states = of(chunk, heads, segment);
      for (int64_t step = 0; step < chunks; step++) {
        const int64_t at = backward_ ? chunks - 1 - step : step;
        chunk.move_to(first + at * kChunk, call_.queries);
        for (int head = heads.first; head < heads.last; head++)
          visit(chunk, head, Sums::at(call_, states, head - heads.first));
      }
    });
  }

 private:
  // Copies of the sums before a segment, of neighbouring heads.
  float* of(Chunk& chunk, Heads heads, int64_t segment) const {
    const int64_t size = Sums::size(call_);
    float* copies = chunk.take(heads.count() * size);
    for (int head = heads.first; memory_ && head < heads.last; head++)
      std::memcpy(copies + (head - heads.first) * size,
                  sums(heads.sample, head, segment).outer, size * sizeof(float));
    return copies;
  }

  Sums sums(int64_t sample, int head, int64_t segment) const {
    const int64_t row = sample * call_.heads + head;
    return Sums::at(call_, memory_, row * plan_.segments + segment);
  }

  const Call& call_;
  const Plan plan_;
  const bool backward_;
  Room room_;
  float* memory_ = nullptr;
};

// Clears the pairs of a chunk that are on the wrong side of the diagonal, as far as
// products read them.
inline void clear(float* pairs, Part part) {
  for (int i = 0; i < kChunk; i++) {
    if (part == Part::kLower) {
      const int end = std::min(kChunk, padded(i / kTall * kTall + kTall));
      std::fill(pairs + i * kChunk + i + 1, pairs + i * kChunk + end, 0.0f);
    } else {
      std::fill(pairs + i * kChunk + i / kTall * kTall, pairs + i * kChunk + i, 0.0f);
    }
  }
}

// Writes out [B, T, N, Hv], and unless the scale is given, the scale [B, T, N].
inline void causal_forward(const Call& call, xla::ffi::ThreadPool& pool,
                           const float* given, float* out, float* scale) {
  const Walk walk(call, pool, false, [&](Chunk& chunk, int head, Sums to) {
    add_keys(call, chunk, head, to);
  });
  const int M = call.M(), W = call.W(), F = call.F();
  walk(pool, [&](Chunk& chunk, int head, Sums state) {
    chunk.read_query(head);
    chunk.read_key(head);
    chunk.read_value(head);
    float* pairs = chunk.pairs;
    transpose(kChunk, M, chunk.key.plain, chunk.transposed);
    product(kChunk, M, kChunk, chunk.query.plain, chunk.transposed, pairs, false,
            Part::kWhole, Part::kLower);
    if (call.turned) chunk.angles.apply(pairs, Part::kLower);
    clear(pairs, Part::kLower);
    product(kChunk, kChunk, W, pairs, chunk.value, chunk.rows, false, Part::kLower);
    product(kChunk, F, W, chunk.query.turned, state.outer, chunk.rows, true);
    for (int i = 0; i < chunk.count; i++) {
      const int64_t place = chunk.place(i, call.queries, head);
      if (call.denominator == Denominator::kGiven) {
        chunk.through[i] = given[place];
        continue;
      }
      Vec sums{};
      for (int j = 0; j <= i; j += kLanes) sums += load(pairs + i * kChunk + j);
      const float far = dot(F, chunk.query.turned + i * F, state.total);
      scale[place] = inverse_of(call, sum(sums) + far);
      const bool clamps = call.denominator == Denominator::kClamp;
      chunk.through[i] = clamps ? std::abs(scale[place]) : scale[place];
    }
    write_rows(call, chunk.rows, chunk.through, out, call.queries, chunk.sample(), head,
               chunk.first(), chunk.count);
    if (call.turned) transpose(kChunk, F, chunk.key.turned, chunk.transposed);
    add_chunk(call, chunk.key.turned, chunk.transposed, chunk.value, nullptr,
              chunk.count, state);
  });
}

// Writes the gradient of the query, from the first position to the last. With `of_scale`,
// those of the logarithms of given scales, and of the query's features only, to which
// Flow-Attention adds.
inline void causal_of_query(const Call& call, xla::ffi::ThreadPool& pool,
                            const Slopes& slopes, float* of_query, float* of_scale) {
  // The products here read the outer sums transposed, [W, F], so they are added up so.
  const Walk walk(call, pool, false, [&](Chunk& chunk, int head, Sums to) {
    chunk.read_key(head);
    chunk.read_value(head);
    transpose(kChunk, call.W(), chunk.value, chunk.transposed);
    add_turned(call, chunk, to);
  });
  const int M = call.M(), W = call.W(), F = call.F();
  walk(pool, [&](Chunk& chunk, int head, Sums state) {
    chunk.read_key(head);
    chunk.read_value(head);
    chunk.read_slope(head, slopes);
    float* pairs = chunk.pairs;
    transpose(kChunk, W, chunk.value, chunk.transposed);
    product(kChunk, W, kChunk, chunk.slope, chunk.transposed, pairs, false,
            Part::kWhole, Part::kLower);
    for (int i = 0; i < chunk.count; i++)
      for (int j = 0; j <= i; j += kLanes)
        store(pairs + i * kChunk + j,
              load(pairs + i * kChunk + j) + chunk.through[i]);
    if (call.turned) chunk.angles.apply(pairs, Part::kLower);
    clear(pairs, Part::kLower);
    product(kChunk, kChunk, M, pairs, chunk.key.plain, chunk.near, false,
            Part::kLower);
    product(kChunk, W, F, chunk.slope, state.outer, chunk.far, false);
    for (int i = 0; i < chunk.count; i++)
      add_scaled(F, chunk.through[i], state.total, chunk.far + i * F);
    chunk.write_query(head, chunk.near, of_query, !of_scale);
    for (int i = 0; of_scale && i < chunk.count; i++)
      of_scale[chunk.place(i, call.queries, head)] = chunk.along[i];
    add_turned(call, chunk, state);
  });
}

// Writes the gradients of key and value, from the last position to the first. With
// `of_weights`, those of the weights, and of the key's features only.
inline void causal_of_key(const Call& call, xla::ffi::ThreadPool& pool,
                          const Slopes& slopes, float* of_key, float* of_value,
                          float* of_weights) {
  const Walk walk(call, pool, true, [&](Chunk& chunk, int head, Sums to) {
    add_queries(call, chunk, head, slopes, to);
  });
  const int M = call.M(), W = call.W(), F = call.F();
  walk(pool, [&](Chunk& chunk, int head, Sums state) {
    chunk.read_query(head);
    chunk.read_key(head);
    chunk.read_value(head);
    chunk.read_slope(head, slopes);
    // Rows are keys here, and columns are queries.
    float* pairs = chunk.pairs;
    transpose(kChunk, W, chunk.slope, chunk.transposed);
    product(kChunk, W, kChunk, chunk.value, chunk.transposed, pairs, false,
            Part::kWhole, Part::kUpper);
    transpose(kChunk, M, chunk.query.plain, chunk.transposed);
    product(kChunk, M, kChunk, chunk.key.plain, chunk.transposed, chunk.scores, false,
            Part::kWhole, Part::kUpper);
    for (int j = 0; j < kChunk; j++)
      add_scaled(kChunk - j / kLanes * kLanes, 1.0f,
                 chunk.through + j / kLanes * kLanes,
                 pairs + j * kChunk + j / kLanes * kLanes);
    for (float* both : {pairs, chunk.scores}) {
      if (call.turned) chunk.angles.apply(both, Part::kUpper);
      clear(both, Part::kUpper);
    }
    product(kChunk, kChunk, W, chunk.scores, chunk.slope, chunk.rows, false,
            Part::kUpper);
    product(kChunk, F, W, chunk.key.turned, state.outer, chunk.rows, true);
    write_rows_of_values(call, chunk, head, of_value, of_weights);
    product(kChunk, kChunk, M, pairs, chunk.query.plain, chunk.near, false,
            Part::kUpper);
    transpose(F, W, state.outer, chunk.sums);
    product(kChunk, W, F, chunk.value, chunk.sums, chunk.far, false);
    for (int j = 0; j < chunk.count; j++)
      add_scaled(F, 1.0f, state.total, chunk.far + j * F);
    chunk.write_key(head, chunk.near, of_key, !of_weights);
    if (call.turned) transpose(kChunk, F, chunk.query.turned, chunk.transposed);
    add_chunk(call, chunk.query.turned, chunk.transposed, chunk.slope, chunk.through,
              chunk.count, state);
  });
}

}  // namespace lra
