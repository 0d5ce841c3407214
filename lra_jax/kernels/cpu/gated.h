// Gated linear attention: ``S_t = diag(a_t) S_(t-1) + k_t v_t^T``, ``o_t = S_t^T q_t``.
//
// With D_t as the gradient of S_t, ``D_(t-1) = diag(a_t) D_t + q_(t-1) do_(t-1)^T``, the
// gradients are reads as well: ``dq_t = S_t do_t``, ``dk_t = D_t v_t`` and ``dv_t = D_t^T
// k_t``. That of log(a_t) is the row sums of ``D_(t-1) S_(t-1)``. They grow by ``q_t dq_t -
// k_t dk_t`` with every position back, and are computed afresh now and then, because
// rounding errors would not decay as states do.

#pragma once

#include "walks.h"

namespace lra {

// The decays of a block, [count, size]; 1 without decays.
inline void read_decays(const Recurrence& call, const Block& block, int64_t sample,
                        int head, int from, int count, float* to, bool shift) {
  const int size = padded(std::min(count, call.width - from));
  if (!call.log_decay) return std::fill(to, to + block.count * size, 1.0f);
  read(block, columns_of(call, call.log_decay, call.width, sample, head, from, count), to,
       shift);
  exponentials(block.count * size, to);
}

// Writes ``sum of decayed x_t y_t^T``, read by z: the output, or the values' gradient in
// a walk in the other direction. Rows are columns of queries and keys.
inline void gated_walk(const Recurrence& call, int64_t sample, int head, int from,
                       int count, bool backward, const float* x, const float* y,
                       const float* z, float* out) {
  const auto rows = [&](const float* array) {
    return columns_of(call, array, call.width, sample, head, 0, call.width);
  };
  const auto lanes = [&](auto* array) {
    return columns_of(call, array, call.columns, sample, head, from, count);
  };
  const int M = padded(call.width), W = lanes(y).size();
  const bool shift = backward != call.from_end && !call.from_end;
  Room room;
  float* state = room.take(M * W);
  float *decays = room.take(kSteps * M), *xs = room.take(kSteps * M);
  float *zs = room.take(kSteps * M), *ys = room.take(kSteps * W);
  float* outs = room.take(kSteps * W);
  in_blocks(call, sample, backward, [&](const Block& block) {
    if (block.starts) std::fill(state, state + M * W, 0.0f);
    read_decays(call, block, sample, head, 0, call.width, decays, shift);
    read(block, rows(x), xs);
    read(block, rows(z), zs);
    read(block, lanes(y), ys);
    with_read(call, [&](auto order) {
      pass<Decays::kRows, decltype(order)::value>({decays, xs, ys, zs, outs}, block.count,
                                                  M, W, state);
    });
    write(block, outs, lanes(out));
  });
}

// Writes the gradients of some columns of queries, keys and decays. Rows are columns of
// values.
inline void gated_slopes(const Recurrence& call, int64_t sample, int head, int from,
                         int count, const float* of_out, float* of_query, float* of_key,
                         float* of_log_decay) {
  const auto rows = [&](const float* array) {
    return columns_of(call, array, call.columns, sample, head, 0, call.columns);
  };
  const auto lanes = [&](auto* array) {
    return columns_of(call, array, call.width, sample, head, from, count);
  };
  const int M = padded(call.columns), W = lanes(of_query).size();
  const bool backward = call.from_end, shift = !call.from_end;
  Room room;
  float* state = room.take(M * W);
  float *values = room.take(kSteps * M), *slopes = room.take(kSteps * M);
  float *decays = room.take(kSteps * W), *queries = room.take(kSteps * W);
  float *keys = room.take(kSteps * W), *of_queries = room.take(kSteps * W);
  float* of_keys = room.take(kSteps * W);
  Anchors anchors(call, M * W, room);
  std::vector<double> totals(W);
  in_blocks(call, sample, backward, [&](const Block& block) {
    if (block.starts) std::fill(state, state + M * W, 0.0f);
    read_decays(call, block, sample, head, from, count, decays, false);
    read(block, rows(call.value), values);
    read(block, rows(of_out), slopes);
    read(block, lanes(call.key), keys);
    with_read(call, [&](auto order) {
      pass<Decays::kColumns, decltype(order)::value>(
          {decays, values, keys, slopes, of_queries}, block.count, M, W, state);
    });
    write(block, of_queries, lanes(of_query));
    anchors.keep(block, state);
  });
  in_blocks(call, sample, !backward, [&](const Block& block) {
    if (block.starts) {
      std::fill(state, state + M * W, 0.0f);
      std::fill(totals.begin(), totals.end(), 0.0);
    }
    read_decays(call, block, sample, head, from, count, decays, shift);
    read(block, rows(call.value), values);
    read(block, rows(of_out), slopes);
    read(block, lanes(call.query), queries);
    read(block, lanes(call.key), keys);
    read(block, lanes(static_cast<const float*>(of_query)), of_queries);
    if (const float* kept = anchors.before(block)) {
      std::fill(totals.begin(), totals.end(), 0.0);
      for (int i = 0; i < M * W; i++) {
        const float decay = shift ? decays[i % W] : 1.0f;
        totals[i % W] += static_cast<double>(decay * state[i]) * kept[i];
      }
    }
    with_read(call, [&](auto order) {
      pass<Decays::kColumns, decltype(order)::value>(
          {decays, slopes, queries, values, of_keys}, block.count, M, W, state);
    });
    write(block, of_keys, lanes(of_key));
    if (!call.log_decay) return;
    for (int i = 0; i < block.count * W; i++) {
      double& total = totals[i % W];
      const double of_read = static_cast<double>(queries[i]) * of_queries[i];
      if (!call.from_end) total += of_read;
      total -= static_cast<double>(keys[i]) * of_keys[i];
      decays[i] = static_cast<float>(total);
      if (call.from_end) total += of_read;
    }
    write(block, decays, lanes(of_log_decay));
  });
}

inline void gated_forward(const Recurrence& call, xla::ffi::ThreadPool& pool,
                          float* out) {
  const Ranges ranges(call, call.columns, threads_of(pool));
  in_parallel(pool, ranges.count(), [&](int64_t task) {
    gated_walk(call, ranges.sample(task), ranges.head(task), ranges.first(task),
               ranges.size(), call.from_end, call.key, call.value, call.query, out);
  });
}

inline void gated_backward(const Recurrence& call, xla::ffi::ThreadPool& pool,
                           const float* of_out, float* of_query, float* of_key,
                           float* of_value, float* of_log_decay) {
  const Ranges values(call, call.columns, threads_of(pool));
  const Ranges keys(call, call.width, threads_of(pool));
  in_parallel(pool, keys.count() + values.count(), [&](int64_t task) {
    if (task < keys.count())
      return gated_slopes(call, keys.sample(task), keys.head(task), keys.first(task),
                          keys.size(), of_out, of_query, of_key, of_log_decay);
    task -= keys.count();
    gated_walk(call, values.sample(task), values.head(task), values.first(task),
               values.size(), !call.from_end, call.query, of_out, call.key, of_value);
  });
}

}  // namespace lra
