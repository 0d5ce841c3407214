// Non-causal Flow-Attention of packed rows: each document as a sequence of its own.

#pragma once

#include "flow_whole.h"
#include "packed.h"

namespace lra {

// One document, and memory for what its forward pass gives.
class FlowDocument {
 public:
  // From now on the call reads the terms made here.
  FlowDocument(Call& call, const FlowOptions& options)
      : call_(call),
        options_(options),
        totals_(totals_of(call)),
        terms_(terms_of(call, room_)),
        product_sums_(room_.take_unset(call.heads * Sums::size(call))) {
    call.weights = terms_.competition;
  }
  template <class Passes>
  void forward(const Passes& passes, float* out) {
    each(passes, [&](const auto& some) {
      whole_flow_forward(some, call_, options_, totals_, terms_, out, product_sums_);
    });
  }
  // The forward pass is repeated, as its terms are in the caches then.
  template <class Passes>
  void backward(const Passes& passes, const float* of_out, float* of_query, float* of_key,
                float* of_value) {
    float* out = room_.take_unset(call_.queries * call_.heads * call_.columns);
    const Slopes slopes{of_out, out, terms_.factor};
    each(passes, [&](const auto& some) {
      whole_flow_forward(some, call_, options_, totals_, terms_, out, product_sums_);
      whole_flow_backward(some, call_, options_, totals_, terms_, slopes, product_sums_,
                          of_query, of_key, of_value);
    });
  }

 private:
  template <class Visit>
  void each(const AllHeads& passes, const Visit& visit) {
    visit(passes);
  }
  // One head after another, whose features are computed once if they fit into the caches.
  template <class Visit>
  void each(const SomeHeads& passes, const Visit& visit) {
    const int64_t size = (call_.queries + kChunk - 1) / kChunk * kChunk * call_.M();
    const bool few = 2 * size <= kMostKept;
    float* queries = few ? room_.take_unset(size) : nullptr;
    float* keys = few ? room_.take_unset(size) : nullptr;
    for (int head = passes.first_head; head < passes.last_head; head++) {
      if (few) {
        passes.chunk.query.keep(queries);
        passes.chunk.key.keep(keys);
      }
      visit(SomeHeads{passes.chunk, head, head + 1});
    }
  }
  static WholeTerms terms_of(const Call& call, Room& room) {
    const int64_t size = call.heads * call.queries;
    WholeTerms to{};
    for (float** x : {&to.incoming, &to.allocation, &to.outgoing, &to.logit,
                      &to.competition, &to.factor})
      *x = room.take_unset(size);
    to.sums = room.take_unset(FlowSums::size(call));
    return to;
  }

  Room room_;
  const Call& call_;
  const FlowOptions& options_;
  const std::vector<Totals> totals_;
  const WholeTerms terms_;
  float* const product_sums_;
};

inline void packed_flow_forward(const Call& call, xla::ffi::ThreadPool& pool,
                                const FlowOptions& options, const float* numbers,
                                float* out) {
  const auto work = [&](const Document& document, Call& one, const auto& passes) {
    FlowDocument(one, options).forward(passes, document.in(out, call, call.columns));
  };
  for_documents(call, pool, numbers, work);
}

inline void packed_flow_backward(const Call& call, xla::ffi::ThreadPool& pool,
                                 const FlowOptions& options, const float* numbers,
                                 const float* of_out, float* of_query, float* of_key,
                                 float* of_value) {
  const auto work = [&](const Document& document, Call& one, const auto& passes) {
    FlowDocument(one, options)
        .backward(passes, document.in(of_out, call, call.columns),
                  document.in(of_query, call, call.width),
                  document.in(of_key, call, call.width),
                  document.in(of_value, call, call.columns));
  };
  for_documents(call, pool, numbers, work);
}

}  // namespace lra
