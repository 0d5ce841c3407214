// The form that is not causal: ``out_i = scale_i sum_j w_ij v_j``. One pass adds up keys
// and values, another reads the sums.

#pragma once

#include "chunk.h"

namespace lra {

// Positions of a task: so that results do not depend on the number of threads.
constexpr int64_t kBlock = 16 * kChunk;

// Calls `visit` with each chunk of each head; the chunks of a block in one task.
template <class Visit>
void visit_chunks(const Call& call, xla::ffi::ThreadPool& pool, int64_t length,
                  const Visit& visit) {
  const Groups groups(call, pool.num_threads());
  const int64_t blocks = (length + kBlock - 1) / kBlock;
  in_parallel(pool, groups.count() * blocks, [&](int64_t task) {
    const Heads mine = groups[task / blocks];
    const int64_t first = task % blocks * kBlock, last = std::min(length, first + kBlock);
    Chunk chunk(call, mine.sample);
    for (int64_t at = first; at < last; at += kChunk) {
      chunk.move_to(at, length);
      for (int head = mine.first; head < mine.last; head++) visit(chunk, head);
    }
  });
}

// A sum of `size` numbers over the positions of each head. `add` adds a chunk of a head
// to the part of its block, and may write its results; `take` is given the sum.
template <class Add, class Take>
void add_up(const Call& call, xla::ffi::ThreadPool& pool, int64_t length, int64_t size,
            const Add& add, const Take& take) {
  const int64_t blocks = (length + kBlock - 1) / kBlock;
  const int64_t heads = call.batch * call.heads;
  Room room;
  float* parts = room.take(heads * std::max<int64_t>(1, blocks) * size);
  visit_chunks(call, pool, length, [&](Chunk& chunk, int head) {
    const int64_t part = chunk.row(head) * blocks + chunk.first() / kBlock;
    add(chunk, head, parts + part * size);
  });
  in_parallel(pool, heads, [&](int64_t row) {
    float* sum = parts + row * blocks * size;
    for (int64_t part = 1; part < blocks; part++)
      for (int64_t i = 0; i < size; i++) sum[i] += sum[part * size + i];
    take(row, sum);
  });
}

// ``sum_j phi(k_j) v_j^T`` and ``sum_j phi(k_j)`` of each head, [B, N, size]; or those
// of queries and gradients.
template <class Add>
void add_products(const Call& call, xla::ffi::ThreadPool& pool, int64_t length, float* to,
                  const Add& add) {
  const int64_t size = Sums::size(call);
  add_up(
      call, pool, length, size,
      [&](Chunk& chunk, int head, float* part) {
        add(chunk, head, Sums::at(call, part, 0));
      },
      [&](int64_t row, const float* sum) {
        std::copy(sum, sum + size, to + row * size);
      });
}

// The outer sums transposed, [B, N, W, F].
inline float* transposed_sums(const Call& call, xla::ffi::ThreadPool& pool, float* sums,
                              Room& room) {
  const int64_t size = static_cast<int64_t>(call.F()) * call.W();
  const int64_t heads = call.batch * call.heads;
  float* to = room.take(heads * size);
  in_parallel(pool, heads, [&](int64_t row) {
    transpose(call.F(), call.W(), Sums::at(call, sums, row).outer, to + row * size);
  });
  return to;
}

// Writes out [B, T, N, Hv], the sums [B, N, size] and, unless it is given, the scale
// [B, T, N].
inline void whole_forward(const Call& call, xla::ffi::ThreadPool& pool,
                          const float* given, float* out, float* scale, float* sums) {
  add_products(call, pool, call.keys, sums, [&](Chunk& chunk, int head, Sums to) {
    add_keys(call, chunk, head, to);
  });
  const int W = call.W(), F = call.F();
  visit_chunks(call, pool, call.queries, [&](Chunk& chunk, int head) {
    const Sums all = Sums::at(call, sums, chunk.row(head));
    chunk.read_query(head);
    product(kChunk, F, W, chunk.query.turned, all.outer, chunk.rows, false);
    for (int i = 0; i < chunk.count; i++) {
      const int64_t place = chunk.place(i, call.queries, head);
      if (call.denominator == Denominator::kGiven) {
        chunk.through[i] = given[place];
        continue;
      }
      const float total = dot(F, chunk.query.turned + i * F, all.total);
      const float inverse = scale[place] = inverse_of(call, total);
      chunk.through[i] =
          call.denominator == Denominator::kClamp ? std::abs(inverse) : inverse;
    }
    write_rows(call, chunk.rows, chunk.through, out, call.queries, chunk.sample(), head,
               chunk.first(), chunk.count);
  });
}

// Writes the gradients of query, key and value, from the sums of the forward pass; and,
// unless they are null, those of the logarithms of given scales and of weights.
inline void whole_backward(const Call& call, xla::ffi::ThreadPool& pool,
                           const Slopes& slopes, float* sums, float* of_query,
                           float* of_key, float* of_value, float* of_weights,
                           float* of_scale) {
  const int W = call.W(), F = call.F();
  const int64_t size = static_cast<int64_t>(F) * W, heads = call.batch * call.heads;
  Room room;
  const float* turned = transposed_sums(call, pool, sums, room);
  float* mirrored = room.take(heads * Sums::size(call));
  add_products(call, pool, call.queries, mirrored, [&](Chunk& chunk, int head, Sums to) {
    add_queries(call, chunk, head, slopes, to);
    const int64_t row = chunk.row(head);
    product(kChunk, W, F, chunk.slope, turned + row * size, chunk.far, false);
    const float* total = Sums::at(call, sums, row).total;
    for (int i = 0; i < chunk.count; i++)
      add_scaled(F, chunk.through[i], total, chunk.far + i * F);
    chunk.write_query(head, nullptr, of_query);
    for (int i = 0; of_scale && i < chunk.count; i++)
      of_scale[chunk.place(i, call.queries, head)] = chunk.along[i];
  });
  turned = transposed_sums(call, pool, mirrored, room);
  visit_chunks(call, pool, call.keys, [&](Chunk& chunk, int head) {
    const int64_t row = chunk.row(head);
    const Sums all = Sums::at(call, mirrored, row);
    chunk.read_key(head);
    chunk.read_value(head);
    product(kChunk, F, W, chunk.key.turned, all.outer, chunk.rows, false);
    write_rows_of_values(call, chunk, head, of_value, of_weights);
    product(kChunk, W, F, chunk.value, turned + row * size, chunk.far, false);
    for (int j = 0; j < chunk.count; j++)
      add_scaled(F, 1.0f, all.total, chunk.far + j * F);
    chunk.write_key(head, nullptr, of_key);
  });
}

}  // namespace lra
