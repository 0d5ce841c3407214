// A recurrence of single numbers: ``h_t = f_t h_(t-1) + x_t`` for each column.
//
// Bound by memory: a task walks through all positions with some columns of a sample, so
// that each array passes once, row by row.

#pragma once

#include "tasks.h"

namespace lra {

struct Scan {
  int64_t batch, length, columns;
  int64_t forth;  // columns from here on run from the last position to the first
  const float* factors;  // [B, T, C]
};

// Columns first..last of a sample, in one direction.
struct Strip {
  int64_t first, size;
  int64_t begin, step;  // where the first row is, and from there to the next

  int64_t row(int64_t t) const { return begin + t * step; }
};

// Calls `work(strip, room)` on all threads; `room` has a zero for each column.
template <class Work>
void in_strips(const Scan& call, xla::ffi::ThreadPool& pool, const Work& work) {
  // Neither so narrow that rows are short, nor so wide that threads have none.
  constexpr int64_t kNarrow = 64;
  const int64_t threads = threads_of(pool), batch = std::max<int64_t>(1, call.batch);
  const int64_t needed = (threads + batch - 1) / batch;
  const int64_t even = (call.columns + needed - 1) / needed;
  const int64_t size = std::max(kNarrow, (even + kNarrow - 1) / kNarrow * kNarrow);
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const auto& [from, to] : {std::pair{int64_t{0}, call.forth},
                                 std::pair{call.forth, call.columns}})
    for (int64_t first = from; first < to; first += size)
      ranges.emplace_back(first, std::min(to, first + size));
  const int64_t parts = static_cast<int64_t>(ranges.size());
  in_parallel(pool, call.batch * parts, [&](int64_t task) {
    const auto [first, last] = ranges[task % parts];
    const bool backward = first >= call.forth;
    const int64_t start = backward ? call.length - 1 : 0;
    const int64_t row = (task / parts) * call.length + start;
    Room room;
    work(Strip{first, last - first, row * call.columns + first,
               backward ? -call.columns : call.columns},
         room.take(last - first));
  });
}

inline void scan_forward(const Scan& call, xla::ffi::ThreadPool& pool, const float* values,
                         float* states) {
  in_strips(call, pool, [&](const Strip& strip, float* __restrict state) {
    for (int64_t t = 0; t < call.length; t++) {
      const float* __restrict factor = call.factors + strip.row(t);
      const float* __restrict value = values + strip.row(t);
      float* __restrict out = states + strip.row(t);
      for (int64_t c = 0; c < strip.size; c++)
        out[c] = state[c] = factor[c] * state[c] + value[c];
    }
  });
}

// Backward in time: ``l_t = dh_t + f_(t+1) l_(t+1)``, ``dx_t = l_t``, ``df_t = l_t h_(t-1)``.
inline void scan_backward(const Scan& call, xla::ffi::ThreadPool& pool,
                          const float* states, const float* of_states, float* of_factors,
                          float* of_values) {
  in_strips(call, pool, [&](const Strip& strip, float* __restrict later) {
    for (int64_t t = call.length - 1; t >= 0; t--) {
      const float* __restrict factor = call.factors + strip.row(t);
      const float* __restrict slope = of_states + strip.row(t);
      const float* __restrict before = states + strip.row(t > 0 ? t - 1 : 0);
      float* __restrict of_factor = of_factors + strip.row(t);
      float* __restrict of_value = of_values + strip.row(t);
      const float starts = t > 0 ? 1.0f : 0.0f;
      for (int64_t c = 0; c < strip.size; c++) {
        const float total = slope[c] + later[c];
        of_value[c] = total;
        of_factor[c] = total * before[c] * starts;
        later[c] = factor[c] * total;
      }
    }
  });
}

}  // namespace lra
