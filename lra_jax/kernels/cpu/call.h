// The arrays of a call, and how its heads are shared out.

#pragma once

#include <cstdint>

#include "tasks.h"
#include "vectors.h"

namespace lra {

// The most heads of one task: neighbouring heads are neighbours in memory.
constexpr int kTogether = 4;

enum class Denominator { kAdd, kClamp, kNone, kGiven, kAbsolute };

// The sizes, options and arrays of a call: B samples of T queries and S keys, N heads, H
// and Hv columns.
struct Call {
  int64_t batch, queries, keys;
  int heads, width, columns;
  int64_t map;  // the feature map's number
  bool turned;  // weights are multiplied by the cosine of the distance
  Denominator denominator;
  float eps;
  const float* query;       // [B, T, N, H]
  const float* key;         // [B, S, N, H]
  const float* value;       // [B, S, N, Hv]
  const float* mask;        // [B, S], 0 = hidden; or null
  const float* query_mask;  // [B, T], 0 = hidden; or null. For the flows only.
  const float* turn;        // the angle between neighbouring positions, [B]
  const float* unit;        // features are divided by it, [B]
  const float* rates;       // factor exp(-rate distance) of the weights, [B, N]; or null
  const float* documents;   // weights between different ones are zero, [B, T]; or null
  bool both_sides;          // also of later keys; only with rates
  const float* weights;     // of the values, [B, S, N]; or null
  // Whether weights and scales have their heads first, [B, N, T], as neighbours in memory.
  bool heads_first;

  int M() const { return padded(width); }
  int W() const { return padded(columns); }
  // Columns of the features between chunks: with angles, cosines next to sines.
  int F() const { return turned ? 2 * M() : M(); }
  // Where a position's weight or scale is.
  int64_t place(int64_t sample, int64_t position, int64_t length, int head) const {
    return heads_first ? (sample * heads + head) * length + position
                       : (sample * length + position) * heads + head;
  }
};

// The heads first..last of one sample.
struct Heads {
  int64_t sample;
  int first, last;
  int count() const { return last - first; }
};

// The groups of heads of all samples.
class Groups {
 public:
  // At most kTogether heads each, and fewer if some threads would have none.
  Groups(const Call& call, int64_t threads) : heads_(call.heads) {
    const int64_t each = call.batch * call.heads / std::max<int64_t>(1, threads);
    const int64_t most = std::max<int64_t>(1, each);
    together_ = static_cast<int>(std::min<int64_t>(most, kTogether));
    in_sample_ = (call.heads + together_ - 1) / together_;
    count_ = call.batch * in_sample_;
  }
  int64_t count() const { return count_; }
  Heads operator[](int64_t index) const {
    const int first = static_cast<int>(index % in_sample_) * together_;
    return {index / in_sample_, first, std::min(first + together_, heads_)};
  }

 private:
  int heads_, together_, in_sample_;
  int64_t count_;
};

}  // namespace lra
