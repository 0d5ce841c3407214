// The form that is not causal: ``out_i = scale_i sum_j w_ij v_j``. One pass adds up keys
// and values, another reads the sums.

#pragma once

#include "chunk.h"

namespace lra {

// Positions of a task: so that results do not depend on the number of threads.
constexpr int64_t kBlock = 16 * kChunk;

// Passes over all heads, by all threads; the chunks of a block in one task.
struct AllHeads {
  const Call& call;
  xla::ffi::ThreadPool& pool;

  // The numbers of the heads of all samples: `count` of them from `first` on.
  int64_t first() const { return 0; }
  int64_t count() const { return call.batch * call.heads; }

  // Calls `visit` with each chunk of each head.
  template <class Visit>
  void chunks(int64_t length, const Visit& visit) const {
    const Groups groups(call, threads_of(pool));
    const int64_t blocks = (length + kBlock - 1) / kBlock;
    in_parallel(pool, groups.count() * blocks, [&](int64_t task) {
      const Heads mine = groups[task / blocks];
      const int64_t first = task % blocks * kBlock;
      const int64_t last = std::min(length, first + kBlock);
      Chunk chunk(call, mine.sample);
      for (int64_t at = first; at < last; at += kChunk) {
        chunk.move_to(at, length);
        for (int head = mine.first; head < mine.last; head++) visit(chunk, head);
      }
    });
  }
  // Calls `work` with the number of each head.
  template <class Work>
  void heads(const Work& work) const {
    in_parallel(pool, count(), work);
  }
};

// The same for neighbouring heads of one sample, by one thread.
struct SomeHeads {
  Chunk& chunk;
  int first_head, last_head;

  int64_t first() const { return chunk.row(first_head); }
  int64_t count() const { return last_head - first_head; }
  template <class Visit>
  void chunks(int64_t length, const Visit& visit) const {
    for (int64_t at = 0; at < length; at += kChunk) {
      chunk.move_to(at, length);
      for (int head = first_head; head < last_head; head++) visit(chunk, head);
    }
  }
  template <class Work>
  void heads(const Work& work) const {
    for (int64_t row = first(); row < first() + count(); row++) work(row);
  }
};

// The most numbers that a thread keeps in its caches: 4 MiB. Beyond that, computing
// features again is as fast.
constexpr int64_t kMostKept = 1 << 20;

// Calls `work` with `AllHeads`; or for each head alone, whose features are computed once,
// if they are few and all threads have about as many heads, of which those in work are a
// small part. The gradients are faster with all heads: rows that are a whole row of heads
// apart share few sets of a cache.
template <class Work>
void in_passes(const Call& call, xla::ffi::ThreadPool& pool, const Work& work) {
  const int64_t heads = call.batch * call.heads, threads = threads_of(pool);
  const auto size = [&](int64_t length) {
    return (length + kChunk - 1) / kChunk * kChunk * call.M();
  };
  const bool even = heads % threads == 0 || heads >= 4 * threads;
  const bool few = size(call.queries) + size(call.keys) <= kMostKept;
  if (!even || !few || heads < 2 * threads) return work(AllHeads{call, pool});
  std::atomic<int64_t> next{0};
  in_parallel(pool, threads, [&](int64_t) {
    Room room;
    float* queries = room.take_unset(size(call.queries));
    float* keys = room.take_unset(size(call.keys));
    for (int64_t row; (row = next.fetch_add(1)) < heads;) {
      Chunk chunk(call, row / call.heads);
      chunk.query.keep(queries);
      chunk.key.keep(keys);
      const int head = static_cast<int>(row % call.heads);
      work(SomeHeads{chunk, head, head + 1});
    }
  });
}

// A sum of `size` numbers over the positions of each head. `add` adds a chunk of a head
// to the part of its block, and may write its results; `join` adds the parts of a head to
// the first of them; `take` gets the sum.
template <class Passes, class Add, class Take, class Join>
void add_up(const Passes& passes, int64_t length, int64_t size, const Add& add,
            const Take& take, const Join& join) {
  const int64_t blocks = (length + kBlock - 1) / kBlock;
  Room room;
  float* parts = room.take(passes.count() * std::max<int64_t>(1, blocks) * size);
  passes.chunks(length, [&](Chunk& chunk, int head) {
    const int64_t row = chunk.row(head) - passes.first();
    add(chunk, head, parts + (row * blocks + chunk.first() / kBlock) * size);
  });
  passes.heads([&](int64_t row) {
    float* sum = parts + (row - passes.first()) * blocks * size;
    join(sum, blocks);
    take(row, sum);
  });
}

template <class Passes, class Add, class Take>
void add_up(const Passes& passes, int64_t length, int64_t size, const Add& add,
            const Take& take) {
  add_up(passes, length, size, add, take, [&](float* sum, int64_t blocks) {
    for (int64_t part = 1; part < blocks; part++)
      for (int64_t i = 0; i < size; i++) sum[i] += sum[part * size + i];
  });
}

// ``sum_j phi(k_j) v_j^T`` and ``sum_j phi(k_j)`` of each head, [size]; or those of
// queries and gradients.
template <class Passes, class Add>
void add_products(const Passes& passes, const Call& call, int64_t length, float* to,
                  const Add& add) {
  const int64_t size = Sums::size(call);
  add_up(
      passes, length, size,
      [&](Chunk& chunk, int head, float* part) {
        add(chunk, head, Sums::at(call, part, 0));
      },
      [&](int64_t row, const float* sum) {
        std::copy(sum, sum + size, to + row * size);
      });
}

// The outer sums transposed, of each head, [W, F]; unset for heads of other passes.
template <class Passes>
const float* transposed_sums(const Passes& passes, const Call& call, float* sums,
                             Room& room) {
  const int64_t size = static_cast<int64_t>(call.F()) * call.W();
  float* to = room.take_unset(call.batch * call.heads * size);
  passes.heads([&](int64_t row) {
    transpose(call.F(), call.W(), Sums::at(call, sums, row).outer, to + row * size);
  });
  return to;
}

// Writes out [B, T, N, Hv] from the sums [B, N, size]. `scale` is called with a chunk,
// its head and its sums, and writes the scales of the numerators to `chunk.through`.
template <class Passes, class Scale>
void write_products(const Passes& passes, const Call& call, float* out, float* sums,
                    const Scale& scale) {
  const int W = call.W(), F = call.F();
  passes.chunks(call.queries, [&](Chunk& chunk, int head) {
    const Sums all = Sums::at(call, sums, chunk.row(head));
    chunk.read_query(head);
    product(kChunk, F, W, chunk.query.turned, all.outer, chunk.rows, false);
    scale(chunk, head, all);
    write_rows(call, chunk.rows, chunk.through, out, call.queries, chunk.sample(), head,
               chunk.first(), chunk.count);
  });
}

// The sums of keys and values of each head, [B, N, size].
template <class Passes>
void whole_sums(const Passes& passes, const Call& call, float* sums) {
  add_products(passes, call, call.keys, sums, [&](Chunk& chunk, int head, Sums to) {
    add_keys(call, chunk, head, to);
  });
}

// Of linear attention and cosFormer; keeps the inverse denominators, [B, T, N].
template <class Passes>
void whole_forward(const Passes& passes, const Call& call, float* out, float* inverses,
                   float* sums) {
  const int F = call.F();
  whole_sums(passes, call, sums);
  const auto divide = [&](Chunk& chunk, int head, const Sums& all) {
    for (int i = 0; i < chunk.count; i++) {
      const float total = dot(F, chunk.query.turned + i * F, all.total);
      const float inverse = inverse_of(call, total);
      inverses[chunk.place(i, call.queries, head)] = inverse;
      chunk.through[i] = scale_of(call, inverse);
    }
  };
  write_products(passes, call, out, sums, divide);
}

// Writes the gradients of query, key and value, from the sums of the forward pass.
template <class Passes>
void whole_backward(const Passes& passes, const Call& call, const Slopes& slopes,
                    float* sums, float* of_query, float* of_key, float* of_value) {
  const int W = call.W(), F = call.F();
  const int64_t size = static_cast<int64_t>(F) * W;
  Room room;
  const float* turned = transposed_sums(passes, call, sums, room);
  float* mirrored = room.take_unset(call.batch * call.heads * Sums::size(call));
  add_products(passes, call, call.queries, mirrored, [&](Chunk& chunk, int head, Sums to) {
    add_queries(call, chunk, head, slopes, to);
    const int64_t row = chunk.row(head);
    product(kChunk, W, F, chunk.slope, turned + row * size, chunk.far, false);
    const float* total = Sums::at(call, sums, row).total;
    for (int i = 0; i < chunk.count; i++)
      add_scaled(F, chunk.through[i], total, chunk.far + i * F);
    chunk.write_query(head, nullptr, of_query);
  });
  turned = transposed_sums(passes, call, mirrored, room);
  passes.chunks(call.keys, [&](Chunk& chunk, int head) {
    const int64_t row = chunk.row(head);
    const Sums all = Sums::at(call, mirrored, row);
    chunk.read_key(head);
    chunk.read_value(head);
    product(kChunk, F, W, chunk.key.turned, all.outer, chunk.rows, false);
    write_rows_of_values(call, chunk, head, of_value, nullptr);
    product(kChunk, W, F, chunk.value, turned + row * size, chunk.far, false);
    for (int j = 0; j < chunk.count; j++)
      add_scaled(F, 1.0f, all.total, chunk.far + j * F);
    chunk.write_key(head, nullptr, of_key);
  });
}

}  // namespace lra
