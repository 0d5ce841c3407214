// One chunk of a call's arrays as the products need it.

#pragma once

#include <cmath>

#include "distances.h"

namespace lra {

// The next row of a head is not its neighbour in memory, so it is prefetched this many
// rows ahead.
constexpr int kAhead = 8;
inline void prefetch(const float* row, int width) {
  constexpr int kLine = 64 / sizeof(float);
  for (int j = 0; j < width; j += kLine) __builtin_prefetch(row + j);
}

// phi of a chunk of queries or keys: zero where hidden, beyond the end, and beyond H.
class Features {
 public:
  Features(const Call& call, Room& room)
      : call_(call),
        plain(room.take(kChunk * call.M())),
        turned(call.turned || call.rates || call.documents
                   ? room.take(kChunk * call.F())
                   : plain) {}

  // From now on the features read of one head, from its first chunk to its last, are kept
  // in `memory`, [chunks C, M], and not computed again. Not for turned features.
  void keep(float* memory) {
    kept_ = memory;
    read_ = 0;
  }

  // Reads `count` rows from `first` on of the query or key. `fades` are the rows' decays
  // up to the border of the chunk, or null.
  void read(const float* from, int64_t length, const float* mask, int64_t sample,
            int head, int64_t first, int count, const Angles& angles,
            const float* fades) {
    const int width = call_.width, M = call_.M();
    if (kept_) {
      plain = turned = kept_ + first * M;
      if (first < read_) return;
      read_ = first + kChunk;
    }
    const int64_t step = static_cast<int64_t>(call_.heads) * width;
    const float inverse = 1.0f / call_.unit[sample];
    const float* rows = from + (sample * length + first) * step + head * width;
    const float* shown = mask ? mask + sample * length + first : nullptr;
    with_map(call_.map, [&](auto map) {
      for (int i = 0; i < kChunk; i++) {
        float* to = plain + i * M;
        if (i >= count || (shown && shown[i] == 0)) {
          std::memset(to, 0, M * sizeof(float));
          continue;
        }
        const float* row = rows + i * step;
        if (i + kAhead < count) prefetch(row + kAhead * step, width);
        if (width < M) {
          std::memcpy(to, row, width * sizeof(float));
          row = to;
        }
        for (int j = 0; j < M; j += kLanes)
          store(to + j, map.phi(load(row + j)) * inverse);
        std::fill(to + width, to + M, 0.0f);
      }
    });
    if (call_.turned)
      turn(angles, fades);
    else if (fades)
      for (int i = 0; i < kChunk; i++)
        for (int j = 0; j < M; j += kLanes)
          store(turned + i * M + j, fades[i] * load(plain + i * M + j));
  }

 private:
  void turn(const Angles& angles, const float* fades) {
    const int M = call_.M();
    for (int i = 0; i < kChunk; i++) {
      const float fade = fades ? fades[i] : 1.0f;
      const float c = fade * angles.cosines[i], s = fade * angles.sines[i];
      for (int j = 0; j < M; j += kLanes) {
        const Vec x = load(plain + i * M + j);
        store(turned + i * 2 * M + j, c * x);
        store(turned + (i * 2 + 1) * M + j, s * x);
      }
    }
  }

  const Call& call_;
  float* kept_ = nullptr;
  int64_t read_ = 0;

 public:
  float* plain;   // [C, M]
  float* turned;  // as they enter sums over chunks, [C, F]
};

// The gradient of query or key from those of its features: of `near` [C, M], if it is
// not null, and of the turned ones, `far` [C, F], times `fades` [C], if they are not
// null. Adds to what is there if `add`; leaves out the feature map's derivative unless
// `finish`.
inline void write_slopes(const Call& call, const float* from, float* to, int64_t length,
                         const float* mask, int64_t sample, int head, int64_t first,
                         int count, const float* near, const float* far,
                         const Angles& angles, const float* fades, bool add,
                         bool finish) {
  const int width = call.width, M = call.M(), F = call.F();
  const float inverse = 1.0f / call.unit[sample];
  const int64_t begin = ((sample * length + first) * call.heads + head) * width;
  const int64_t step = static_cast<int64_t>(call.heads) * width;
  const float* shown = mask ? mask + sample * length + first : nullptr;
  with_map(call.map, [&](auto map) {
    float row[kLanes] = {};
    for (int i = 0; i < count; i++) {
      const float* x = from + begin + i * step;
      float* y = to + begin + i * step;
      if (shown && shown[i] == 0) {
        if (!add) std::memset(y, 0, width * sizeof(float));
        continue;
      }
      for (int j = 0; j < width; j += kLanes) {
        Vec slope = load(far + i * F + j);
        if (call.turned)
          slope = angles.cosines[i] * slope + angles.sines[i] * load(far + i * F + M + j);
        if (fades) slope *= fades[i];
        if (near) slope += load(near + i * M + j);
        const int size = std::min(kLanes, width - j);
        if (size == kLanes) {
          if (add) slope += load(y + j);
          if (finish) slope *= map.slope(load(x + j)) * inverse;
          store(y + j, slope);
          continue;
        }
        std::memcpy(row, y + j, size * sizeof(float));
        if (add) slope += load(row);
        std::memcpy(row, x + j, size * sizeof(float));
        if (finish) slope *= map.slope(load(row)) * inverse;
        store(row, slope);
        std::memcpy(y + j, row, size * sizeof(float));
      }
    }
  });
}

// A chunk of values, or of the output's gradients: zero beyond the end and beyond Hv.
// `scales` multiplies the rows, if it is not null; hidden rows are zero.
inline void read_rows(const Call& call, const float* from, int64_t length,
                      const float* mask, const float* scales, int64_t sample, int head,
                      int64_t first, int count, float* to) {
  const int W = call.W(), columns = call.columns, heads = call.heads;
  const int64_t position = sample * length + first;
  for (int i = 0; i < kChunk; i++) {
    float* row = to + i * W;
    if (i >= count || (mask && mask[position + i] == 0)) {
      std::memset(row, 0, W * sizeof(float));
      continue;
    }
    const int64_t at = (position + i) * heads + head;
    if (i + kAhead < count) prefetch(from + (at + kAhead * heads) * columns, columns);
    std::memcpy(row, from + at * columns, columns * sizeof(float));
    if (!scales) continue;
    const float scale = scales[call.place(sample, first + i, length, head)];
    for (int j = 0; j < W; j += kLanes) store(row + j, load(row + j) * scale);
  }
}

// Writes rows [C, W] to [B, T, N, Hv], each times its scale [C].
inline void write_rows(const Call& call, const float* rows, const float* scales,
                       float* to, int64_t length, int64_t sample, int head,
                       int64_t first, int count) {
  const int W = call.W(), columns = call.columns;
  float row[kLanes];
  for (int i = 0; i < count; i++) {
    const int64_t at = (sample * length + first + i) * call.heads + head;
    for (int j = 0; j < columns; j += kLanes) {
      const int size = std::min(kLanes, columns - j);
      const Vec x = load(rows + i * W + j) * scales[i];
      if (size == kLanes) {
        store(to + at * columns + j, x);
      } else {
        store(row, x);
        std::memcpy(to + at * columns + j, row, size * sizeof(float));
      }
    }
  }
}

// 1 / the bounded denominator, with a sign. Where "clamp" decides, it is negative: then
// the denominator has no gradient. With "absolute", the sign is that of the sum.
inline float inverse_of(const Call& call, float sum) {
  if (call.denominator == Denominator::kNone) return 1.0f;
  if (call.denominator == Denominator::kAbsolute) {
    const bool clamped = !(std::abs(sum) >= call.eps);
    return 1.0f / (clamped ? call.eps : sum);
  }
  const bool clamped =
      call.denominator == Denominator::kClamp && !(sum >= call.eps);
  float bounded = call.denominator == Denominator::kAdd ? sum + call.eps : sum;
  if (clamped) bounded = call.eps;
  // Of a row without visible keys the numerator is zero as well.
  if (bounded == 0) bounded = 1.0f;
  return clamped ? -1.0f / bounded : 1.0f / bounded;
}

// The factor of the numerators, from `inverse_of`.
inline float scale_of(const Call& call, float inverse) {
  const bool has_sign = call.denominator == Denominator::kClamp ||
                        call.denominator == Denominator::kAbsolute;
  return has_sign ? std::abs(inverse) : inverse;
}

// The derivative of the bounded denominator by the sum.
inline float passes(const Call& call, float inverse) {
  switch (call.denominator) {
    case Denominator::kAdd: return 1.0f;
    case Denominator::kClamp: return inverse > 0 ? 1.0f : 0.0f;
    case Denominator::kAbsolute:
      return std::abs(inverse) * call.eps < 1 ? std::copysign(1.0f, inverse) : 0.0f;
    default: return 0.0f;
  }
}

// The sums that pass from chunk to chunk: ``sum_j phi(k_j) v_j^T`` [F, W] and
// ``sum_j phi(k_j)`` [F]; or the same of queries and gradients.
struct Sums {
  float* outer;
  float* total;

  static int64_t size(const Call& call) {
    return static_cast<int64_t>(call.F()) * (call.W() + 1);
  }
  static Sums at(const Call& call, float* memory, int64_t index) {
    float* begin = memory + index * size(call);
    return {begin, begin + static_cast<int64_t>(call.F()) * call.W()};
  }
};

// Adds a chunk: features [C, F] and [F, C], rows [C, W], and weights of the total, [C]
// (null = 1).
inline void add_chunk(const Call& call, const float* features, const float* transposed,
                      const float* rows, const float* weights, int count, Sums to) {
  product(call.F(), kChunk, call.W(), transposed, rows, to.outer, true);
  add_rows(count, call.F(), features, weights, to.total);
}

// The gradient of the output, and what the forward pass kept.
struct Slopes {
  const float* of_out;  // [B, T, N, Hv]
  const float* out;     // [B, T, N, Hv]
  const float* scale;   // of the numerators, [B, T, N], see `inverse_of`
};

// One chunk of one head, read part by part.
class Chunk {
 public:
  Chunk(const Call& call, int64_t sample)
      : call_(call),
        sample_(sample),
        angles(call, sample, room_),
        fades(call, sample, room_),
        query(call, room_),
        key(call, room_),
        value(room_.take(kChunk * call.W())),
        slope(room_.take(kChunk * call.W())),
        through(room_.take(kChunk)),
        along(room_.take(kChunk)),
        transposed(room_.take(kChunk * std::max(call.F(), call.W()))),
        pairs(room_.take(kChunk * kChunk)),
        scores(room_.take(kChunk * kChunk)),
        sums(room_.take(static_cast<int64_t>(call.F()) * call.W())),
        far(room_.take(kChunk * call.F())),
        near(room_.take(kChunk * call.M())),
        rows(room_.take(kChunk * call.W())) {}

  float* take(int64_t size) { return room_.take(size); }

  void move_to(int64_t first, int64_t length) {
    first_ = first;
    count = static_cast<int>(std::min<int64_t>(kChunk, length - first));
    if (call_.turned) angles.move_to(first);
  }
  void read_query(int head) {
    fades.move_to(head, first_, count);
    query.read(call_.query, call_.queries, call_.query_mask, sample_, head, first_, count,
               angles, fades.of_queries());
  }
  void read_key(int head) {
    fades.move_to(head, first_, count);
    key.read(call_.key, call_.keys, call_.mask, sample_, head, first_, count, angles,
             fades.of_keys());
  }
  void read_value(int head) {
    read_rows(call_, call_.value, call_.keys, call_.mask, call_.weights, sample_, head,
              first_, count, value);
  }
  // The gradients of the numerators and of the denominators.
  void read_slope(int head, const Slopes& from) {
    const int W = call_.W();
    read_rows(call_, from.of_out, call_.queries, nullptr, nullptr, sample_, head, first_,
              count, slope);
    read_rows(call_, from.out, call_.queries, nullptr, nullptr, sample_, head, first_,
              count, rows);
    for (int i = 0; i < kChunk; i++) {
      const float row_scale = i < count ? from.scale[place(i, call_.queries, head)] : 0.0f;
      const float scale = scale_of(call_, row_scale), through_sum = passes(call_, row_scale);
      along[i] = dot(W, slope + i * W, rows + i * W);
      through[i] = through_sum == 0 ? 0.0f : -along[i] * scale * through_sum;
      for (int j = 0; j < W; j += kLanes)
        store(slope + i * W + j, load(slope + i * W + j) * scale);
    }
  }
  // Writes the gradient of the query from `near` [C, M], or null, and `far`; that of its
  // features, if there is more to add before one can `finish`. May `add` to another part.
  void write_query(int head, const float* near, float* to, bool finish = true,
                   bool add = false) {
    write_slopes(call_, call_.query, to, call_.queries, call_.query_mask, sample_, head,
                 first_, count, near, far, angles, fades.of_queries(), add, finish);
  }
  void write_key(int head, const float* near, float* to, bool finish = true,
                 bool add = false) {
    write_slopes(call_, call_.key, to, call_.keys, call_.mask, sample_, head, first_,
                 count, near, far, angles, fades.of_keys(), add, finish);
  }
  // Adds a gradient of the query's features [C, M]; the last turns the sum into that of
  // the query.
  void add_to_query(int head, const float* slopes, float* to, bool last) {
    write_slopes(call_, call_.query, to, call_.queries, call_.query_mask, sample_, head,
                 first_, count, nullptr, slopes, angles, nullptr, true, last);
  }
  void add_to_key(int head, const float* slopes, float* to, bool last) {
    write_slopes(call_, call_.key, to, call_.keys, call_.mask, sample_, head, first_,
                 count, nullptr, slopes, angles, nullptr, true, last);
  }
  // Adds what has been written of the chunk to [B, T, N, Hv] to rows [C, W].
  void add_written(const float* written, int64_t length, int head, float* to) const {
    for (int i = 0; i < count; i++) {
      const int64_t at = (sample_ * length + first_ + i) * call_.heads + head;
      for (int j = 0; j < call_.columns; j++)
        to[i * call_.W() + j] += written[at * call_.columns + j];
    }
  }
  // Multiplies pairs [C, C] of queries and keys, or the other way round, by the factors
  // of their distances.
  void weigh(float* both, Part part) const {
    if (call_.turned) angles.apply(both, part);
    if (fades.active) fades.apply(both, part);
  }
  // Sums [size] at the other end of the chunk, before it is added.
  void fade(Sums sums) const {
    const float left = fades.of_chunk();
    const int64_t size = Sums::size(call_);
    for (int64_t i = 0; left != 1.0f && i < size; i++) sums.outer[i] *= left;
  }
  // Where the weight or scale of position i of the chunk is.
  int64_t place(int i, int64_t length, int head) const {
    return call_.place(sample_, first_ + i, length, head);
  }
  int64_t first() const { return first_; }
  int64_t sample() const { return sample_; }
  // The head's number among those of all samples.
  int64_t row(int head) const { return sample_ * call_.heads + head; }
  // Whether a key is hidden.
  bool hides(int j) const {
    return call_.mask && call_.mask[sample_ * call_.keys + first_ + j] == 0;
  }
  bool hides_query(int i) const {
    return call_.query_mask &&
           call_.query_mask[sample_ * call_.queries + first_ + i] == 0;
  }

 private:
  const Call& call_;
  int64_t sample_;
  Room room_;
  int64_t first_ = 0;

 public:
  Angles angles;
  Fades fades;
  Features query, key;
  float* value;       // [C, W]
  float* slope;       // gradient of the numerators, [C, W]
  float* through;     // gradient of the denominators, [C]
  float* along;       // output times its gradient, [C]
  float* transposed;  // room for a transpose
  float* pairs;       // [C, C]
  float* scores;      // [C, C]
  float* sums;        // room for sums transposed, [W, F]
  float* far;         // gradient of turned features, [C, F]
  float* near;        // gradient of plain features, [C, M]
  float* rows;        // [C, W]
  int count = 0;
};

// Adds the chunk's keys and values, which have been read.
inline void add_read_keys(const Call& call, Chunk& chunk, Sums to) {
  transpose(kChunk, call.F(), chunk.key.turned, chunk.transposed);
  chunk.fade(to);
  add_chunk(call, chunk.key.turned, chunk.transposed, chunk.value, nullptr, chunk.count,
            to);
}

inline void add_keys(const Call& call, Chunk& chunk, int head, Sums to) {
  chunk.read_key(head);
  chunk.read_value(head);
  add_read_keys(call, chunk, to);
}

// Adds the chunk's keys and values to sums whose outer ones are transposed, [W, F]; the
// values have been transposed.
inline void add_turned(const Call& call, Chunk& chunk, Sums to) {
  chunk.fade(to);
  product(call.W(), kChunk, call.F(), chunk.transposed, chunk.key.turned, to.outer, true);
  add_rows(chunk.count, call.F(), chunk.key.turned, nullptr, to.total);
}

inline void add_queries(const Call& call, Chunk& chunk, int head, const Slopes& slopes,
                        Sums to) {
  chunk.read_query(head);
  chunk.read_slope(head, slopes);
  transpose(kChunk, call.F(), chunk.query.turned, chunk.transposed);
  chunk.fade(to);
  add_chunk(call, chunk.query.turned, chunk.transposed, chunk.slope, chunk.through,
            chunk.count, to);
}

// The values' gradient from that of the weighted values, `chunk.rows`, and the weights'
// gradient, if there are weights.
inline void write_rows_of_values(const Call& call, Chunk& chunk, int head, float* of_value,
                                 float* of_weights) {
  const int W = call.W();
  float scales[kChunk];
  for (int j = 0; j < chunk.count; j++) {
    float* row = chunk.rows + j * W;
    const int64_t place = chunk.place(j, call.keys, head);
    const int64_t position = chunk.sample() * call.keys + chunk.first() + j;
    const float* value = call.value + (position * call.heads + head) * call.columns;
    if (chunk.hides(j)) std::memset(row, 0, W * sizeof(float));
    scales[j] = call.weights ? call.weights[place] : 1.0f;
    if (!of_weights) continue;
    float total = 0;
    for (int column = 0; !chunk.hides(j) && column < call.columns; column++)
      total += row[column] * value[column];
    of_weights[place] = total;
  }
  write_rows(call, chunk.rows, scales, of_value, call.keys, chunk.sample(), head,
             chunk.first(), chunk.count);
}

}  // namespace lra
