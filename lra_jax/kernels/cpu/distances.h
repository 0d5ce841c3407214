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

// Whether sums that pass over the positions first..last - 1 are of one document: from
// those before to the last, or if keys are `after` their queries, from those after to
// the first.
inline bool goes_on(const Call& call, int64_t sample, int64_t first, int64_t last,
                    bool after) {
  if (!call.documents) return true;
  const float* documents = call.documents + sample * call.queries;
  if (after) return last == call.queries || documents[first] == documents[last];
  return first == 0 || documents[first - 1] == documents[last - 1];
}

// Decays exp(-rate distance), and packed documents, which do not see each other. Between
// chunks a factor is a product: from the query to the border of its chunk, over whole
// chunks, and from there to the key.
class Fades {
 public:
  Fades(const Call& call, int64_t sample, Room& room)
      : active(call.rates || call.documents),
        call_(call),
        sample_(sample),
        factors_(room.take(2 * kChunk)),
        queries_(room.take(kChunk)),
        keys_(room.take(kChunk)),
        documents_(room.take(kChunk)) {}

  // Whether keys are after the queries whose sums they are in.
  bool after = false;

  void move_to(int head, int64_t first, int count) {
    const bool same = head == head_ && after == after_;
    if (!active || (same && (first == first_ || !call_.documents))) return;
    head_ = head, after_ = after, first_ = first;
    Vec lanes;
    for (int lane = 0; lane < kLanes; lane++) lanes[lane] = static_cast<float>(lane);
    const float rate = call_.rates ? call_.rates[sample_ * call_.heads + head] : 0.0f;
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
    of_chunk_ = factors_[0];
    if (call_.documents) tell_apart(first, count);
  }
  // Multiplies products of pairs [C, C] by their factors.
  void apply(float* pairs, Part part) const {
    if (call_.rates) by_distance(pairs, factors_, part);
    for (int i = 0; call_.documents && i < kChunk; i++) {
      for (int j = 0; j < kChunk; j += kLanes) {
        float* at = pairs + i * kChunk + j;
        store(at, load(documents_ + j) == documents_[i] ? load(at) : Vec{});
      }
    }
  }
  // Of the rows of a chunk up to its border, [C]; or null.
  const float* of_queries() const { return active ? queries_ : nullptr; }
  const float* of_keys() const { return active ? keys_ : nullptr; }
  // Of a whole chunk.
  float of_chunk() const { return active ? of_chunk_ : 1.0f; }

  const bool active;

 private:
  // Sums pass a border for the document that goes on there.
  void tell_apart(int64_t first, int count) {
    const float* own = call_.documents + sample_ * call_.queries + first;
    std::fill(documents_, documents_ + kChunk, -1.0f);
    std::copy(own, own + count, documents_);
    const bool begins = first == 0, ends = first + count == call_.queries;
    const float before = begins ? own[0] : own[-1];
    const float next = ends ? own[count - 1] : own[count];
    for (int i = 0; i < kChunk; i++) {
      if (documents_[i] != (after ? next : before)) queries_[i] = 0;
      if (documents_[i] != (after ? own[0] : own[count - 1])) keys_[i] = 0;
    }
    if (!goes_on(call_, sample_, first, first + count, after)) of_chunk_ = 0;
  }

  const Call& call_;
  const int64_t sample_;
  float *factors_, *queries_, *keys_, *documents_;
  float of_chunk_ = 1;
  int head_ = -1;
  int64_t first_ = -1;
  bool after_ = false;
};

}  // namespace lra
