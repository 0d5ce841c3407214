// Walks along the positions of a head whose state is a matrix, with a decay for each
// position: ``s_t = a_t s_(t-1) + x_t y_t^T``, read as ``s_t^T z_t``.
//
// Columns of the state, those of y, do not meet: a task has a range of them. They are
// the lanes of registers, in which a tile of the state passes through all positions of a
// block. The gradients of x, y and z are walks as well, in which the arrays change places.

#pragma once

#include <cmath>

#include "tasks.h"
#include "vectors.h"

namespace lra {

// Positions of a block.
constexpr int kSteps = 16;
// Rows of a tile, which divide every padded width, and registers of a row.
constexpr int kRows = kLanes < 8 ? kLanes : 8;
constexpr int kHeld = kLanes < 16 ? 1 : 2;

// The sizes, options and arrays of a call: B samples of T positions, N heads, H and Hv
// columns.
struct Recurrence {
  int64_t batch, length;
  int heads, width, columns;
  bool from_end;           // from the last position to the first
  const float* query;      // [B, T, N, H]
  const float* key;        // [B, T, N, H]
  const float* value;      // [B, T, N, Hv]
  const float* log_decay;  // [B, T, N, H], of the delta rule [B, T, N]; null = none
  const float* share;      // of the delta rule, beta, [B, T, N]
  const float* documents;  // a state starts afresh at each, [B, T]; or null
};

// Whether a query reads the state after or before its own position is added.
enum class Read { kAfter, kBefore };

// Some columns of one head, from [B, T, N, columns].
template <class Float>
struct Columns {
  Float* first;    // of the sample's first position
  int64_t stride;  // from position to position
  int count;

  int size() const { return padded(count); }
};

template <class Float>
Columns<Float> columns_of(const Recurrence& call, Float* array, int columns,
                          int64_t sample, int head, int from, int count) {
  const int64_t stride = static_cast<int64_t>(call.heads) * columns;
  Float* first = array + sample * call.length * stride + head * columns + from;
  return {first, stride, std::min(count, columns - from)};
}

// Neighbouring positions of one document, in the order of a walk.
struct Block {
  int64_t first;
  int step;  // 1 or -1
  int count;
  bool starts;  // a document, or the walk

  int64_t position(int i) const { return first + i * step; }
  // The first position on the right of where the block starts, or ends.
  int64_t start() const { return step > 0 ? first : first + 1; }
  int64_t end() const { return start() + step * count; }
};

// Calls `visit` with the blocks of a sample, which are the same in both directions.
template <class Visit>
void in_blocks(const Recurrence& call, int64_t sample, bool backward,
               const Visit& visit) {
  const float* documents =
      call.documents ? call.documents + sample * call.length : nullptr;
  const int step = backward ? -1 : 1;
  const auto border = [&](int64_t position) {
    return documents && documents[position] != documents[position - step];
  };
  for (int64_t done = 0; done < call.length;) {
    Block block{backward ? call.length - 1 - done : done, step, 1, done == 0};
    block.starts = block.starts || border(block.first);
    const int64_t in_place = block.first % kSteps;
    const int64_t most = std::min<int64_t>(backward ? in_place + 1 : kSteps - in_place,
                                           call.length - done);
    while (block.count < most && !border(block.position(block.count))) block.count++;
    visit(block);
    done += block.count;
  }
}

// Reads rows of a block to [count, size]; with `shift`, those of the positions before,
// with zeros before the first of a document.
template <class Float>
void read(const Block& block, const Columns<Float>& from, float* to, bool shift = false) {
  const int size = from.size();
  for (int i = 0; i < block.count; i++) {
    float* row = to + i * size;
    std::fill(row + from.count / kLanes * kLanes, row + size, 0.0f);
    if (shift && i == 0 && block.starts)
      std::fill(row, row + size, 0.0f);
    else
      std::memcpy(row, from.first + block.position(i - shift) * from.stride,
                  from.count * sizeof(float));
  }
}

inline void write(const Block& block, const float* from, const Columns<float>& to) {
  for (int i = 0; i < block.count; i++)
    std::memcpy(to.first + block.position(i) * to.stride, from + i * to.size(),
                to.count * sizeof(float));
}

// Reads numbers [B, T, N] of a block, as `read`; null = zeros.
inline void read_numbers(const Recurrence& call, const Block& block, const float* from,
                         int64_t sample, int head, float* to, bool shift = false) {
  for (int i = 0; i < block.count; i++) {
    const int64_t at = sample * call.length + block.position(i - shift);
    const bool before = shift && i == 0 && block.starts;
    to[i] = from && !before ? from[at * call.heads + head] : 0.0f;
  }
}

// exp of n numbers, a multiple of kLanes.
inline void exponentials(int n, float* x) {
  for (int i = 0; i < n; i += kLanes) store(x + i, exponential(load(x + i)));
}

// Decays may differ by row or by column (lane), or be one for the whole state.
enum class Decays { kRows, kColumns, kOne };

// The arrays of a block: [count, M] with the state's rows, [count, W] with its columns.
// Before the decay a second product ``x2 y2^T`` may be added; after it, z2 may read.
struct Arrays {
  const float* decay;  // [count, M], [count, W] or [count]
  const float *x, *y, *z;
  float* out;  // [count, W]
  const float *x2 = nullptr, *y2 = nullptr, *z2 = nullptr;
  float* out2 = nullptr;
};

// Takes a tile of the state [M, W], from row `row` and column `column`, through a block.
template <Decays kDecays, Read kRead, bool kTwoAdded, bool kTwoRead, int kWide>
void tile(const Arrays& arrays, int count, int M, int W, int row, int column,
          float* state) {
  Vec s[kRows][kWide];
  for (int r = 0; r < kRows; r++)
    for (int j = 0; j < kWide; j++)
      s[r][j] = load(state + (row + r) * W + column + j * kLanes);
  for (int t = 0; t < count; t++) {
    const int lanes = t * W + column, rows = t * M + row;
    Vec y[kWide], y2[kWide], out[kWide], out2[kWide], decay[kWide];
    for (int j = 0; j < kWide; j++) {
      const int at = lanes + j * kLanes;
      y[j] = load(arrays.y + at);
      out[j] = load(arrays.out + at);
      if (kTwoAdded) y2[j] = load(arrays.y2 + at);
      if (kTwoRead) out2[j] = load(arrays.out2 + at);
      if (kDecays == Decays::kColumns) decay[j] = load(arrays.decay + at);
      if (kDecays == Decays::kOne) decay[j] = all(arrays.decay[t]);
    }
    for (int r = 0; r < kRows; r++) {
      for (int j = 0; j < kWide; j++) {
        if (kRead == Read::kBefore) out[j] += arrays.z[rows + r] * s[r][j];
        if (kTwoAdded) s[r][j] += arrays.x2[rows + r] * y2[j];
        if (kDecays == Decays::kRows)
          s[r][j] *= arrays.decay[rows + r];
        else
          s[r][j] *= decay[j];
        if (kTwoRead) out2[j] += arrays.z2[rows + r] * s[r][j];
        s[r][j] += arrays.x[rows + r] * y[j];
        if (kRead == Read::kAfter) out[j] += arrays.z[rows + r] * s[r][j];
      }
    }
    for (int j = 0; j < kWide; j++) {
      store(arrays.out + lanes + j * kLanes, out[j]);
      if (kTwoRead) store(arrays.out2 + lanes + j * kLanes, out2[j]);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int j = 0; j < kWide; j++)
      store(state + (row + r) * W + column + j * kLanes, s[r][j]);
}

// Takes the state [M, W] through a block, and writes what is read.
template <Decays kDecays, Read kRead, bool kTwoAdded = false, bool kTwoRead = false>
void pass(const Arrays& arrays, int count, int M, int W, float* state) {
  std::fill(arrays.out, arrays.out + count * W, 0.0f);
  if (kTwoRead) std::fill(arrays.out2, arrays.out2 + count * W, 0.0f);
  int column = 0;
  for (; column + kHeld * kLanes <= W; column += kHeld * kLanes)
    for (int row = 0; row < M; row += kRows)
      tile<kDecays, kRead, kTwoAdded, kTwoRead, kHeld>(arrays, count, M, W, row, column,
                                                       state);
  for (; column < W; column += kLanes)
    for (int row = 0; row < M; row += kRows)
      tile<kDecays, kRead, kTwoAdded, kTwoRead, 1>(arrays, count, M, W, row, column,
                                                   state);
}

// States [size] between some of a walk's blocks, for a walk in the other direction.
class Anchors {
 public:
  static int64_t count(const Recurrence& call) { return call.length / kApart + 1; }
  // The number of the anchor between two blocks; -1 = there is none.
  static int64_t number(int64_t border) {
    return border % kApart ? -1 : border / kApart;
  }

  Anchors(const Recurrence& call, int size, Room& room)
      : size_(size), memory_(room.take_unset(count(call) * size)) {}

  void keep(const Block& block, const float* state) {
    const int64_t at = number(block.end());
    if (at >= 0) std::memcpy(memory_ + at * size_, state, size_ * sizeof(float));
  }
  // The state that was kept where a block starts, or null.
  const float* before(const Block& block) const {
    const int64_t at = block.starts ? -1 : number(block.start());
    return at < 0 ? nullptr : memory_ + at * size_;
  }

 private:
  static constexpr int64_t kApart = 512;
  int size_;
  float* memory_;
};

// Calls `function` with the order of a call as a constant.
template <class Function>
void with_read(const Recurrence& call, Function function) {
  if (call.from_end)
    function(std::integral_constant<Read, Read::kBefore>());
  else
    function(std::integral_constant<Read, Read::kAfter>());
}

// Ranges of columns, enough for all threads.
class Ranges {
 public:
  Ranges(const Recurrence& call, int columns, int64_t threads)
      : heads_(call.heads), rows_(call.batch * call.heads) {
    const int64_t unit = kHeld * kLanes, units = (columns + unit - 1) / unit;
    const int64_t needed = (threads + rows_ - 1) / std::max<int64_t>(1, rows_);
    const int64_t each = std::max<int64_t>(1, units / std::max<int64_t>(1, needed));
    size_ = static_cast<int>(std::min(each, units) * unit);
    parts_ = (columns + size_ - 1) / size_;
  }
  int64_t count() const { return rows_ * parts_; }
  // Of each head; those of one head are neighbours.
  int64_t parts() const { return parts_; }
  int64_t sample(int64_t task) const { return task / parts_ / heads_; }
  int head(int64_t task) const { return static_cast<int>(task / parts_ % heads_); }
  int first(int64_t task) const { return static_cast<int>(task % parts_) * size_; }
  int size() const { return size_; }

 private:
  int64_t heads_, rows_, parts_;
  int size_;
};

}  // namespace lra
