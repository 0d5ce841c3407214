// Factors of the weights that depend on the distance between a query and a key.

#pragma once

#include <cmath>

#include "call.h"
#include "products.h"

namespace lra {

// Multiplies products of the pairs of a chunk [C, C] by a factor for each distance, from
// -C to C - 1.
inline void by_distance(float* pairs, const float* factors, Part part) {
  for (int i = 0; i < kChunk; i++) {
    const int from = part == Part::kUpper ? i / kLanes * kLanes : 0;
    const int to = part == Part::kLower ? padded(i + 1) : kChunk;
    for (int j = from; j < to; j += kLanes) {
      float* at = pairs + i * kChunk + j;
      store(at, load(at) * load(factors + kChunk + j - i));
    }
  }
}

// Cosines and sines of a chunk's positions, and the cosines of their distances.
class Angles {
 public:
  Angles(const Call& call, int64_t sample, Room& room)
      : turn_(call.turned ? call.turn[sample] : 0),
        cosines(room.take(kChunk)),
        sines(room.take(kChunk)),
        distances_(room.take(2 * kChunk)) {
    for (int d = -kChunk; call.turned && d < kChunk; d++)
      distances_[kChunk + d] = static_cast<float>(std::cos(turn_ * d));
  }
  void move_to(int64_t first) {
    for (int i = 0; i < kChunk; i++) {
      const double angle = turn_ * static_cast<double>(first + i);
      cosines[i] = static_cast<float>(std::cos(angle));
      sines[i] = static_cast<float>(std::sin(angle));
    }
  }
  void apply(float* pairs, Part part) const { by_distance(pairs, distances_, part); }

 private:
  double turn_;

 public:
  float *cosines, *sines;

 private:
  float* distances_;
};

// The decays of a head, exp(-rate distance). Between chunks a decay is a product: from
// the query to the border of its chunk, over whole chunks, and from there to the key.
class Fades {
 public:
  Fades(const Call& call, int64_t sample, Room& room)
      : rates_(call.rates ? call.rates + sample * call.heads : nullptr),
        factors_(room.take(2 * kChunk)),
        queries_(room.take(kChunk)),
        keys_(room.take(kChunk)) {}

  // Whether keys are after the queries whose sums they are in.
  bool after = false;

  void move_to(int head) {
    if (!rates_ || (head == head_ && after == after_)) return;
    head_ = head, after_ = after;
    Vec lanes;
    for (int lane = 0; lane < kLanes; lane++) lanes[lane] = static_cast<float>(lane);
    const float rate = rates_[head];
    for (int d = 0; d < 2 * kChunk; d += kLanes) {
      const Vec distance = lanes + static_cast<float>(d - kChunk);
      store(factors_ + d, exponential((distance < 0.0f ? distance : -distance) * rate));
    }
    // The borders are before a query and after a key, or the other way round.
    for (int i = 0; i < kChunk; i++) {
      const int place = after ? kChunk - 1 - i : i;
      queries_[place] = factors_[kChunk - 1 - i];
      keys_[place] = factors_[i + 1];
    }
  }
  void apply(float* pairs, Part part) const { by_distance(pairs, factors_, part); }
  // Of the rows of a chunk up to its border, [C]; or null.
  const float* of_queries() const { return rates_ ? queries_ : nullptr; }
  const float* of_keys() const { return rates_ ? keys_ : nullptr; }
  // Of a whole chunk.
  float of_chunk() const { return rates_ ? factors_[0] : 1.0f; }

 private:
  const float* rates_;
  float *factors_, *queries_, *keys_;
  int head_ = -1;
  bool after_ = false;
};

}  // namespace lra
