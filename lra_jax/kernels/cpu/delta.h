// The delta rule: ``S_t = a_t S_(t-1) + b_t k_t e_t^T`` with what is missing of the value,
// ``e_t = v_t - a_t S_(t-1)^T k_t``, and ``o_t = S_t^T q_t``.
//
// Missing values, and backward their gradients ``de_t = D_t^T k_t`` with D_t as that of
// S_t, need whole columns of a state before the next position: these walks keep it in the
// first cache. ``D_(t-1) = a_t (D_t - b_t k_t de_t^T) + q_(t-1) do_(t-1)^T``. From them
// follow the other gradients: ``dq_t = S_t do_t``, ``dk_t = b_t (D_t e_t - a_t S_(t-1)
// de_t)``, ``dv_t = b_t de_t`` and ``db_t = e_t . de_t``. That of log(a_t) is the sum of
// ``D_(t-1) S_(t-1)`` over all entries. It grows by ``q_t . dq_t - v_t . dv_t`` with every
// position back, and is computed afresh now and then, as in gated.h.

#pragma once

#include "walks.h"

namespace lra {

// The numbers of a block's positions, or with `shift` of those before.
struct Numbers {
  float decay[kSteps] = {}, share[kSteps] = {};

  Numbers(const Recurrence& call, const Block& block, int64_t sample, int head,
          bool shift = false) {
    read_numbers(call, block, call.log_decay, sample, head, decay, shift);
    exponentials(kSteps, decay);
    read_numbers(call, block, call.share, sample, head, share, shift);
  }
  // Multiplies rows [count, size] by the shares.
  void apply(const Block& block, int size, float sign, float* rows) const {
    for (int i = 0; i < block.count; i++)
      for (int j = 0; j < size; j++) rows[i * size + j] *= sign * share[i];
  }
};

// Arrays of a block: [count, M] rows and [count, W] columns.
struct Corrections {
  const float *query, *key;   // rows
  const float *incoming;       // columns: the value, or backward the output's gradient
  float *missing, *out;       // columns: e and the output, or backward de and nothing
};

// Takes some columns of the state [M, W] through a block: writes missing values and the
// output.
template <Read kRead, int kWide>
void store_values(const Corrections& block, const Numbers& numbers, int count, int M,
                  int W, int column, float* state) {
  for (int t = 0; t < count; t++) {
    const float *key = block.key + t * M, *query = block.query + t * M;
    Vec stored[2][kWide] = {}, out[2][kWide] = {}, added[kWide];
    for (int row = 0; row < M; row += 2) {
      for (int half = 0; half < 2; half++) {
        for (int j = 0; j < kWide; j++) {
          const Vec s = load(state + (row + half) * W + column + j * kLanes);
          stored[half][j] += key[row + half] * s;
          if (kRead == Read::kBefore) out[half][j] += query[row + half] * s;
        }
      }
    }
    for (int j = 0; j < kWide; j++) {
      const int at = t * W + column + j * kLanes;
      const Vec missing =
          load(block.incoming + at) - numbers.decay[t] * (stored[0][j] + stored[1][j]);
      store(block.missing + at, missing);
      added[j] = numbers.share[t] * missing;
    }
    for (int row = 0; row < M; row += 2) {
      for (int half = 0; half < 2; half++) {
        for (int j = 0; j < kWide; j++) {
          float* at = state + (row + half) * W + column + j * kLanes;
          const Vec s = numbers.decay[t] * load(at) + key[row + half] * added[j];
          store(at, s);
          if (kRead == Read::kAfter) out[half][j] += query[row + half] * s;
        }
      }
    }
    for (int j = 0; j < kWide; j++)
      store(block.out + t * W + column + j * kLanes, out[0][j] + out[1][j]);
  }
}

// The same for the state's gradient: writes the gradients of missing values.
template <Read kRead, int kWide>
void pass_back(const Corrections& block, const Numbers& numbers, int count, int M, int W,
               int column, float* state) {
  for (int t = 0; t < count; t++) {
    const float *key = block.key + t * M, *query = block.query + t * M;
    Vec read[2][kWide] = {}, incoming[kWide], taken[kWide];
    for (int j = 0; j < kWide; j++)
      incoming[j] = load(block.incoming + t * W + column + j * kLanes);
    for (int row = 0; row < M; row += 2) {
      for (int half = 0; half < 2; half++) {
        for (int j = 0; j < kWide; j++) {
          float* at = state + (row + half) * W + column + j * kLanes;
          Vec s = load(at);
          if (kRead == Read::kAfter) store(at, s += query[row + half] * incoming[j]);
          read[half][j] += key[row + half] * s;
        }
      }
    }
    for (int j = 0; j < kWide; j++) {
      const Vec of_missing = read[0][j] + read[1][j];
      store(block.missing + t * W + column + j * kLanes, of_missing);
      taken[j] = numbers.share[t] * of_missing;
    }
    for (int row = 0; row < M; row += 2) {
      for (int half = 0; half < 2; half++) {
        for (int j = 0; j < kWide; j++) {
          float* at = state + (row + half) * W + column + j * kLanes;
          Vec s = numbers.decay[t] * (load(at) - key[row + half] * taken[j]);
          if (kRead == Read::kBefore) s += query[row + half] * incoming[j];
          store(at, s);
        }
      }
    }
  }
}

// Calls `step(width, column)` with the columns of a block, as many at a time as a step
// takes, and the number of their registers as a constant.
template <class Step>
void in_columns(int W, const Step& step) {
  int column = 0;
  for (; column + kHeld * kLanes <= W; column += kHeld * kLanes)
    step(std::integral_constant<int, kHeld>(), column);
  for (; column < W; column += kLanes) step(std::integral_constant<int, 1>(), column);
}

// A walk that needs whole columns of the state: forward with values, which writes what
// is missing of them and the output, or backward with the output's gradients.
inline void corrected_walk(const Recurrence& call, int64_t sample, int head, int from,
                           int count, const float* incoming, float* missing, float* out) {
  const auto rows = [&](const float* array) {
    return columns_of(call, array, call.width, sample, head, 0, call.width);
  };
  const auto lanes = [&](auto* array) {
    return columns_of(call, array, call.columns, sample, head, from, count);
  };
  const int M = padded(call.width), W = lanes(incoming).size();
  Room room;
  float *state = room.take(M * W), *givens = room.take(kSteps * W);
  float *queries = room.take(kSteps * M), *keys = room.take(kSteps * M);
  float *errors = room.take(kSteps * W), *outs = room.take(kSteps * W);
  const Corrections arrays{queries, keys, givens, errors, outs};
  in_blocks(call, sample, call.from_end == (out != nullptr), [&](const Block& block) {
    if (block.starts) std::fill(state, state + M * W, 0.0f);
    const Numbers numbers(call, block, sample, head);
    read(block, rows(call.query), queries);
    read(block, rows(call.key), keys);
    read(block, lanes(incoming), givens);
    with_read(call, [&](auto order) {
      in_columns(W, [&](auto wide, int column) {
        constexpr Read kRead = decltype(order)::value;
        constexpr int kWide = decltype(wide)::value;
        if (out)
          store_values<kRead, kWide>(arrays, numbers, block.count, M, W, column, state);
        else
          pass_back<kRead, kWide>(arrays, numbers, block.count, M, W, column, state);
      });
    });
    write(block, errors, lanes(missing));
    if (out) write(block, outs, lanes(out));
  });
}

// Writes the gradients of some columns of queries and keys, from those of what was
// missing, and adds these columns' part of the sums at anchors. Rows are columns of
// values.
inline void delta_slopes(const Recurrence& call, int64_t sample, int head, int from,
                         int count, const float* missing, const float* of_out,
                         const float* of_missing, float* of_query, float* of_key,
                         double* totals) {
  const auto rows = [&](const float* array) {
    return columns_of(call, array, call.columns, sample, head, 0, call.columns);
  };
  const auto lanes = [&](auto* array) {
    return columns_of(call, array, call.width, sample, head, from, count);
  };
  const int M = padded(call.columns), W = lanes(of_query).size();
  const bool shift = !call.from_end;
  Room room;
  float *state = room.take(M * W), *added = room.take(kSteps * M);
  float *slopes = room.take(kSteps * M), *taken = room.take(kSteps * M);
  float *queries = room.take(kSteps * W), *keys = room.take(kSteps * W);
  float *outs = room.take(kSteps * W), *parts = room.take(kSteps * W);
  Anchors anchors(call, M * W, room);
  in_blocks(call, sample, call.from_end, [&](const Block& block) {
    if (block.starts) std::fill(state, state + M * W, 0.0f);
    const Numbers numbers(call, block, sample, head);
    read(block, rows(missing), added);
    numbers.apply(block, M, 1.0f, added);
    read(block, rows(of_missing), taken);
    numbers.apply(block, M, -1.0f, taken);
    read(block, rows(of_out), slopes);
    read(block, lanes(call.key), keys);
    Arrays arrays{numbers.decay, added, keys, slopes, outs};
    arrays.z2 = taken;
    arrays.out2 = parts;
    with_read(call, [&](auto order) {
      pass<Decays::kOne, decltype(order)::value, false, true>(arrays, block.count, M, W,
                                                              state);
    });
    write(block, outs, lanes(of_query));
    write(block, parts, lanes(of_key));
    anchors.keep(block, state);
  });
  in_blocks(call, sample, !call.from_end, [&](const Block& block) {
    if (block.starts) std::fill(state, state + M * W, 0.0f);
    const Numbers numbers(call, block, sample, head);
    const Numbers before(call, block, sample, head, shift);
    read(block, rows(missing), added);
    numbers.apply(block, M, 1.0f, added);
    read(block, rows(of_missing), taken, shift);
    before.apply(block, M, -1.0f, taken);
    read(block, rows(of_out), slopes);
    read(block, lanes(call.query), queries);
    read(block, lanes(call.key), keys, shift);
    Arrays arrays{before.decay, slopes, queries, added, outs, taken, keys};
    if (const float* kept = anchors.before(block)) {
      double total = 0;
      for (int i = 0; i < M * W; i++) {
        const float back = before.decay[0] * (state[i] + taken[i / W] * keys[i % W]);
        total += static_cast<double>(shift ? back : state[i]) * kept[i];
      }
      totals[Anchors::number(block.start())] = total;
    }
    with_read(call, [&](auto order) {
      pass<Decays::kOne, decltype(order)::value, true>(arrays, block.count, M, W, state);
    });
    read(block, lanes(static_cast<const float*>(of_key)), parts);
    for (int i = 0; i < block.count * W; i++) outs[i] += parts[i];
    write(block, outs, lanes(of_key));
  });
}

inline float inner(const float* x, const float* y, int n) {
  Vec lanes{};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) lanes += load(x + i) * load(y + i);
  float total = sum(lanes);
  for (; i < n; i++) total += x[i] * y[i];
  return total;
}

// Writes the gradients of a head's shares and decays, and those of its values in place of
// those of what was missing. `totals` has `parts` parts of each sum at an anchor.
inline void finish_slopes(const Recurrence& call, int64_t sample, int head,
                          const float* missing, const float* of_query, float* of_value,
                          const double* totals, int64_t parts, float* of_log_decay,
                          float* of_share) {
  const int H = call.width, Hv = call.columns;
  double total = 0;
  in_blocks(call, sample, !call.from_end, [&](const Block& block) {
    const int64_t anchor = block.starts ? -1 : Anchors::number(block.start());
    if (block.starts || anchor >= 0) total = 0;
    for (int64_t part = 0; part < parts && anchor >= 0; part++)
      total += totals[part * Anchors::count(call) + anchor];
    for (int i = 0; i < block.count; i++) {
      const int64_t at = (sample * call.length + block.position(i)) * call.heads + head;
      float* slope = of_value + at * Hv;
      of_share[at] = inner(missing + at * Hv, slope, Hv);
      for (int j = 0; j < Hv; j++) slope[j] *= call.share[at];
      if (!call.log_decay) continue;
      const float of_read = inner(call.query + at * H, of_query + at * H, H);
      if (!call.from_end) total += of_read;
      total -= inner(call.value + at * Hv, slope, Hv);
      of_log_decay[at] = static_cast<float>(total);
      if (call.from_end) total += of_read;
    }
  });
}

inline void delta_forward(const Recurrence& call, xla::ffi::ThreadPool& pool,
                          float* missing, float* out) {
  const Ranges ranges(call, call.columns, threads_of(pool));
  in_parallel(pool, ranges.count(), [&](int64_t task) {
    corrected_walk(call, ranges.sample(task), ranges.head(task), ranges.first(task),
                   ranges.size(), call.value, missing, out);
  });
}

inline void delta_backward(const Recurrence& call, xla::ffi::ThreadPool& pool,
                           const float* missing, const float* of_out, float* of_query,
                           float* of_key, float* of_value, float* of_log_decay,
                           float* of_share) {
  const Ranges values(call, call.columns, threads_of(pool));
  in_parallel(pool, values.count(), [&](int64_t task) {
    corrected_walk(call, values.sample(task), values.head(task), values.first(task),
                   values.size(), of_out, of_value, nullptr);
  });
  const Ranges keys(call, call.width, threads_of(pool));
  const int64_t anchors = Anchors::count(call);
  std::vector<double> totals(keys.count() * anchors);
  in_parallel(pool, keys.count(), [&](int64_t task) {
    delta_slopes(call, keys.sample(task), keys.head(task), keys.first(task), keys.size(),
                 missing, of_out, of_value, of_query, of_key, &totals[task * anchors]);
  });
  in_parallel(pool, call.batch * call.heads, [&](int64_t task) {
    finish_slopes(call, task / call.heads, static_cast<int>(task % call.heads), missing,
                  of_query, of_value, &totals[task * keys.parts() * anchors],
                  keys.parts(), of_log_decay, of_share);
  });
}

}  // namespace lra
