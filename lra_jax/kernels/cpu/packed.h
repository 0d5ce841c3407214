// Packed rows without causality or decays: each document as a sequence of its own.

#pragma once

#include "whole.h"

namespace lra {

// A document: positions first..last of a sample.
struct Document {
  int64_t sample, first, last;
  int64_t length() const { return last - first; }

  // As a call of its own.
  Call alone(const Call& call) const {
    const int64_t at = sample * call.queries + first;
    const int64_t row = at * call.heads;
    Call one = call;
    one.batch = 1;
    one.queries = one.keys = length();
    one.query += row * call.width;
    one.key += row * call.width;
    one.value += row * call.columns;
    one.unit += sample;
    if (call.turn) one.turn += sample;
    if (call.mask) one.mask += at;
    if (call.query_mask) one.query_mask += at;
    return one;
  }
  // Its rows of an array [B, T, N, columns].
  template <class Float>
  Float* in(Float* array, const Call& call, int columns) const {
    return array + (sample * call.queries + first) * call.heads * columns;
  }
};

// The documents of all samples by their numbers [B, T], the longest first, so that no
// thread is left with a long one at the end.
inline std::vector<Document> documents_of(const Call& call, const float* numbers) {
  std::vector<Document> documents;
  for (int64_t sample = 0; sample < call.batch; sample++) {
    const float* own = numbers + sample * call.queries;
    for (int64_t t = 0; t < call.queries; t++) {
      if (t == 0 || own[t] != own[t - 1]) documents.push_back({sample, t, t});
      documents.back().last = t + 1;
    }
  }
  std::stable_sort(
      documents.begin(), documents.end(),
      [](const Document& a, const Document& b) { return a.length() > b.length(); });
  return documents;
}

// Calls `work` with each document as a call of its own, and passes over some of its heads,
// by one thread. If one head of a document is more than a thread's fair share, as on a
// machine of many cores, all threads pass over its heads together.
template <class Work>
void for_documents(const Call& call, xla::ffi::ThreadPool& pool, const float* numbers,
                   const Work& work) {
  const std::vector<Document> documents = documents_of(call, numbers);
  const int64_t threads = threads_of(pool);
  const int64_t fair = call.batch * call.queries * call.heads / threads;
  size_t first = 0;
  for (; first < documents.size(); first++) {
    const Document& document = documents[first];
    if (document.length() <= std::max(fair, kBlock)) break;
    Call one = document.alone(call);
    work(document, one, AllHeads{one, pool});
  }
  Call counted = call;
  counted.batch = static_cast<int64_t>(documents.size() - first);
  const Groups groups(counted, threads);
  in_parallel(pool, groups.count(), [&](int64_t task) {
    const Heads mine = groups[task];
    const Document& document = documents[first + mine.sample];
    Call one = document.alone(call);
    Chunk chunk(one, 0);
    work(document, one, SomeHeads{chunk, mine.first, mine.last});
  });
}

// Of linear attention and cosFormer; keeps the inverse denominators, [B, T, N].
inline void packed_forward(const Call& call, xla::ffi::ThreadPool& pool,
                           const float* numbers, float* out, float* inverses) {
  const auto work = [&](const Document& document, const Call& one, const auto& passes) {
    Room room;
    whole_forward(passes, one, document.in(out, call, call.columns),
                  document.in(inverses, call, 1),
                  room.take_unset(one.heads * Sums::size(one)));
  };
  for_documents(call, pool, numbers, work);
}

// The sums are computed again, as there would be some for each document to keep.
inline void packed_backward(const Call& call, xla::ffi::ThreadPool& pool,
                            const float* numbers, const Slopes& slopes, float* of_query,
                            float* of_key, float* of_value) {
  const auto work = [&](const Document& document, const Call& one, const auto& passes) {
    Room room;
    float* sums = room.take_unset(one.heads * Sums::size(one));
    whole_sums(passes, one, sums);
    whole_backward(passes, one,
                   {document.in(slopes.of_out, call, call.columns),
                    document.in(slopes.out, call, call.columns),
                    document.in(slopes.scale, call, 1)},
                   sums, document.in(of_query, call, call.width),
                   document.in(of_key, call, call.width),
                   document.in(of_value, call, call.columns));
  };
  for_documents(call, pool, numbers, work);
}

}  // namespace lra
