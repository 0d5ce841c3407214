// The causal form: ``out_i = scale_i sum_{j <= i} w_ij v_j``, in one walk of each head.
// With decays also the sum over all j: first a walk for the keys of later chunks, which
// writes its part, and then one for the other keys, which adds it.

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
    const int64_t needed = std::max<int64_t>(1, (threads + shared - 1) / shared);
    const int64_t most = std::max<int64_t>(1, length_ / (8 * kChunk));
    segments = std::min(needed, most);
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

// The keys that a query meets in a walk: kUpTo, those up to itself; kUpToChunk, those up
// to the end of its chunk; kAfter, those of later chunks.
// With kAfter, features as they enter sums are never the plain ones.
enum class Keys { kUpTo, kUpToChunk, kAfter };

// Calls `work` with the keys of each walk, and with whether it adds to results of another.
template <class Work>
void in_walks(const Call& call, const Work& work) {
  if (call.both_sides) work(Keys::kAfter, false);
  work(call.both_sides ? Keys::kUpToChunk : Keys::kUpTo, call.both_sides);
}

// A walk through the chunks of all heads, from the first position, or from the last if
// `backward`. `add` adds a chunk of a head to sums: what a segment starts with.
class Walk {
 public:
  template <class Add>
  Walk(const Call& call, xla::ffi::ThreadPool& pool, Keys keys, bool backward,
       const Add& add)
      : call_(call),
        plan_(call, threads_of(pool)),
        after_(keys == Keys::kAfter),
        backward_(backward) {
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
      chunk.fades.after = after_;
      in_turn(chunk, segment, [&] {
        for (int head = heads.first; head < heads.last; head++)
          add(chunk, head, sums(heads.sample, head, next));
      });
    });
    const int64_t size = Sums::size(call);
    in_parallel(pool, heads, [&](int64_t head) {
      for (int64_t step = 1; step < plan.segments; step++) {
        const int64_t to = backward ? plan.segments - 1 - step : step;
        const float left = over_segment(head, backward ? to + 1 : to - 1);
        float* here = memory_ + (head * plan.segments + to) * size;
        const float* from = backward ? here + size : here - size;
        for (int64_t i = 0; i < size; i++) here[i] += left * from[i];
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
      Chunk chunk(call_, heads.sample);
      chunk.fades.after = after_;
      float* states = of(chunk, heads, segment);
      in_turn(chunk, segment, [&] {
        for (int head = heads.first; head < heads.last; head++)
          visit(chunk, head, Sums::at(call_, states, head - heads.first));
      });
    });
  }

 private:
  // The factor of sums that pass over a segment.
  float over_segment(int64_t head, int64_t segment) const {
    const int64_t first = plan_.first(segment), last = plan_.last(segment);
    if (!goes_on(call_, head / call_.heads, first, last, after_)) return 0.0f;
    const float rate = call_.rates ? call_.rates[head] : 0.0f;
    return std::exp(-rate * static_cast<float>(last - first));
  }

  // Moves to each chunk of a segment, in the order of the walk.
  template <class Visit>
  void in_turn(Chunk& chunk, int64_t segment, const Visit& visit) const {
    const int64_t first = plan_.first(segment);
    const int64_t chunks = (plan_.last(segment) - first + kChunk - 1) / kChunk;
    for (int64_t step = 0; step < chunks; step++) {
      const int64_t at = backward_ ? chunks - 1 - step : step;
      chunk.move_to(first + at * kChunk, call_.queries);
      visit();
    }
  }

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
  const bool after_, backward_;
  Room room_;
  float* memory_ = nullptr;
};

// Clears the pairs of a chunk that are on the wrong side of the diagonal, as far as
// products read them.
inline void clear(float* pairs, Part part) {
  for (int i = 0; part != Part::kWhole && i < kChunk; i++) {
    if (part == Part::kLower) {
      const int end = std::min(kChunk, padded(i / kTall * kTall + kTall));
      std::fill(pairs + i * kChunk + i + 1, pairs + i * kChunk + end, 0.0f);
    } else {
      std::fill(pairs + i * kChunk + i / kTall * kTall, pairs + i * kChunk + i, 0.0f);
    }
  }
}

// Writes out [B, T, N, Hv], and unless the scale is an argument, the scale [B, T, N];
// for the keys after a query the numerators and denominators.
inline void walk_forward(const Call& call, xla::ffi::ThreadPool& pool, Keys keys,
                         bool add, const float* row_scales, float* out, float* scale) {
  const bool near = keys != Keys::kAfter;
  const Part part = keys == Keys::kUpTo ? Part::kLower : Part::kWhole;
  const Walk walk(call, pool, keys, !near, [&](Chunk& chunk, int head, Sums to) {
    add_keys(call, chunk, head, to);
  });
  const int M = call.M(), W = call.W(), F = call.F();
  walk(pool, [&](Chunk& chunk, int head, Sums state) {
    chunk.read_query(head);
    chunk.read_key(head);
    chunk.read_value(head);
    float* pairs = chunk.pairs;
    if (near) {
      transpose(kChunk, M, chunk.key.plain, chunk.transposed);
      product(kChunk, M, kChunk, chunk.query.plain, chunk.transposed, pairs, false,
              Part::kWhole, part);
      chunk.weigh(pairs, part);
      clear(pairs, part);
      product(kChunk, kChunk, W, pairs, chunk.value, chunk.rows, false, part);
    }
    product(kChunk, F, W, chunk.query.turned, state.outer, chunk.rows, near);
    for (int i = 0; i < chunk.count; i++) {
      const int64_t place = chunk.place(i, call.queries, head);
      if (call.denominator == Denominator::kGiven) {
        chunk.through[i] = row_scales[place];
        continue;
      }
      const int end = part == Part::kLower ? i + 1 : kChunk;
      Vec sums{};
      for (int j = 0; near && j < end; j += kLanes) sums += load(pairs + i * kChunk + j);
      float total = sum(sums) + dot(F, chunk.query.turned + i * F, state.total);
      if (add) total += scale[place];
      scale[place] = near ? inverse_of(call, total) : total;
      chunk.through[i] = near ? scale_of(call, scale[place]) : 1.0f;
    }
    if (add) chunk.add_written(out, call.queries, head, chunk.rows);
    write_rows(call, chunk.rows, chunk.through, out, call.queries, chunk.sample(), head,
               chunk.first(), chunk.count);
    if (chunk.key.turned != chunk.key.plain)
      transpose(kChunk, F, chunk.key.turned, chunk.transposed);
    chunk.fade(state);
    add_chunk(call, chunk.key.turned, chunk.transposed, chunk.value, nullptr,
              chunk.count, state);
  });
}

inline void causal_forward(const Call& call, xla::ffi::ThreadPool& pool,
                           const float* row_scales, float* out, float* scale) {
  in_walks(call, [&](Keys keys, bool add) {
    walk_forward(call, pool, keys, add, row_scales, out, scale);
  });
}

// Writes the gradient of the query, in the order of `walk_forward`. With `of_scale`,
// those of the logarithms of scales, and of the query's features only, to which
// Flow-Attention adds.
inline void walk_to_query(const Call& call, xla::ffi::ThreadPool& pool, Keys keys,
                          bool add, const Slopes& slopes, float* of_query,
                          float* of_scale) {
  const bool near = keys != Keys::kAfter;
  const Part part = keys == Keys::kUpTo ? Part::kLower : Part::kWhole;
  // The products here read the outer sums transposed, [W, F], so they are added up so.
  const Walk walk(call, pool, keys, !near, [&](Chunk& chunk, int head, Sums to) {
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
    if (near) {
      product(kChunk, W, kChunk, chunk.slope, chunk.transposed, pairs, false,
              Part::kWhole, part);
      for (int i = 0; i < chunk.count; i++) {
        const int end = part == Part::kLower ? i + 1 : kChunk;
        for (int j = 0; j < end; j += kLanes)
          store(pairs + i * kChunk + j,
                load(pairs + i * kChunk + j) + chunk.through[i]);
      }
      chunk.weigh(pairs, part);
      clear(pairs, part);
      product(kChunk, kChunk, M, pairs, chunk.key.plain, chunk.near, false, part);
    }
    product(kChunk, W, F, chunk.slope, state.outer, chunk.far, false);
    for (int i = 0; i < chunk.count; i++)
      add_scaled(F, chunk.through[i], state.total, chunk.far + i * F);
    chunk.write_query(head, near ? chunk.near : nullptr, of_query, near && !of_scale,
                      add);
    for (int i = 0; of_scale && i < chunk.count; i++)
      of_scale[chunk.place(i, call.queries, head)] = chunk.along[i];
    add_turned(call, chunk, state);
  });
}

inline void causal_of_query(const Call& call, xla::ffi::ThreadPool& pool,
                            const Slopes& slopes, float* of_query, float* of_scale) {
  in_walks(call, [&](Keys keys, bool add) {
    walk_to_query(call, pool, keys, add, slopes, of_query, of_scale);
  });
}

// Writes the gradients of key and value, in the opposite order. With `of_weights`, those
// of the weights, and of the key's features only.
inline void walk_to_key(const Call& call, xla::ffi::ThreadPool& pool, Keys keys, bool add,
                        const Slopes& slopes, float* of_key, float* of_value,
                        float* of_weights) {
  const bool near = keys != Keys::kAfter;
  const Part part = keys == Keys::kUpTo ? Part::kUpper : Part::kWhole;
  const Walk walk(call, pool, keys, near, [&](Chunk& chunk, int head, Sums to) {
    add_queries(call, chunk, head, slopes, to);
  });
  const int M = call.M(), W = call.W(), F = call.F();
  walk(pool, [&](Chunk& chunk, int head, Sums state) {
    chunk.read_query(head);
    chunk.read_key(head);
    chunk.read_value(head);
    chunk.read_slope(head, slopes);
    if (near) {
      // Rows are keys here, and columns are queries.
      float* pairs = chunk.pairs;
      transpose(kChunk, W, chunk.slope, chunk.transposed);
      product(kChunk, W, kChunk, chunk.value, chunk.transposed, pairs, false,
              Part::kWhole, part);
      transpose(kChunk, M, chunk.query.plain, chunk.transposed);
      product(kChunk, M, kChunk, chunk.key.plain, chunk.transposed, chunk.scores, false,
              Part::kWhole, part);
      for (int j = 0; j < kChunk; j++) {
        const int from = part == Part::kUpper ? j / kLanes * kLanes : 0;
        add_scaled(kChunk - from, 1.0f, chunk.through + from, pairs + j * kChunk + from);
      }
      for (float* both : {pairs, chunk.scores}) {
        chunk.weigh(both, part);
        clear(both, part);
      }
      product(kChunk, kChunk, W, chunk.scores, chunk.slope, chunk.rows, false, part);
      product(kChunk, kChunk, M, pairs, chunk.query.plain, chunk.near, false, part);
    }
    product(kChunk, F, W, chunk.key.turned, state.outer, chunk.rows, near);
    if (add) chunk.add_written(of_value, call.keys, head, chunk.rows);
    write_rows_of_values(call, chunk, head, of_value, of_weights);
    transpose(F, W, state.outer, chunk.sums);
    product(kChunk, W, F, chunk.value, chunk.sums, chunk.far, false);
    for (int j = 0; j < chunk.count; j++)
      add_scaled(F, 1.0f, state.total, chunk.far + j * F);
    chunk.write_key(head, near ? chunk.near : nullptr, of_key, near && !of_weights, add);
    if (chunk.query.turned != chunk.query.plain)
      transpose(kChunk, F, chunk.query.turned, chunk.transposed);
    chunk.fade(state);
    add_chunk(call, chunk.query.turned, chunk.transposed, chunk.slope, chunk.through,
              chunk.count, state);
  });
}

inline void causal_of_key(const Call& call, xla::ffi::ThreadPool& pool,
                          const Slopes& slopes, float* of_key, float* of_value,
                          float* of_weights) {
  in_walks(call, [&](Keys keys, bool add) {
    walk_to_key(call, pool, keys, add, slopes, of_key, of_value, of_weights);
  });
}

}  // namespace lra
