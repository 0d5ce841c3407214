// Non-causal Flow-Attention of packed rows: each document as a sequence of its own.

#pragma once

#include "flow_whole.h"
#include "packed.h"

namespace lra {

// One document and memory for what the forward pass gives, for one head after another.
class DocumentPass {
 public:
  const Document document;

  DocumentPass(const Call& whole, const Document& one)
      : document(one),
        call_(one.alone(whole)),
        totals_(totals_of(call_)),
        terms_(terms_of(call_, room_)),
        product_sums_(room_.take_unset(call_.heads * Sums::size(call_))),
        chunk_(call_, 0) {
    call_.weights = terms_.competition;
    const int64_t rows = (document.length() + kChunk - 1) / kChunk * kChunk;
    if (2 * rows * call_.M() > kMostKept) return;
    for (float** x : {&queries_, &keys_}) *x = room_.take_unset(rows * call_.M());
  }
  void forward(const FlowOptions& options, int head, float* out) {
    whole_flow_forward(alone(head), call_, options, totals_, terms_, out, product_sums_);
  }
  // After `forward`, which gave `out`.
  void backward(const FlowOptions& options, int head, const float* of_out,
                const float* out, float* of_query, float* of_key, float* of_value) {
    whole_flow_backward(alone(head), call_, options, totals_, terms_,
                        {of_out, out, terms_.factor}, product_sums_, of_query, of_key,
                        of_value);
  }
  // Room for an output of the document.
  float* out() {
    if (!out_)
      out_ = room_.take_unset(document.length() * call_.heads * call_.columns);
    return out_;
  }

 private:
  // Features that fit into the caches are computed once.
  SomeHeads alone(int head) {
    if (queries_) {
      chunk_.query.keep(queries_);
      chunk_.key.keep(keys_);
    }
    return {chunk_, head, head + 1};
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
  Call call_;
  const std::vector<Totals> totals_;
  const WholeTerms terms_;
  float* const product_sums_;
  Chunk chunk_;
  float *queries_ = nullptr, *keys_ = nullptr, *out_ = nullptr;
};

// Calls `work` with a `DocumentPass` and a head, for each head of each document.
template <class Work>
void for_document_heads(const Call& call, xla::ffi::ThreadPool& pool,
                        const float* numbers, const Work& work) {
  for_documents(call, pool, numbers, [&](const Document& document, const Heads& mine) {
    DocumentPass pass(call, document);
    for (int head = mine.first; head < mine.last; head++) work(pass, head);
  });
}

inline void packed_flow_forward(const Call& call, xla::ffi::ThreadPool& pool,
                                const FlowOptions& options, const float* numbers,
                                float* out) {
  for_document_heads(call, pool, numbers, [&](DocumentPass& pass, int head) {
    pass.forward(options, head, pass.document.in(out, call, call.columns));
  });
}

// The forward pass is repeated, as the terms of a document are in the caches then.
inline void packed_flow_backward(const Call& call, xla::ffi::ThreadPool& pool,
                                 const FlowOptions& options, const float* numbers,
                                 const float* of_out, float* of_query, float* of_key,
                                 float* of_value) {
  for_document_heads(call, pool, numbers, [&](DocumentPass& pass, int head) {
    const Document& document = pass.document;
    pass.forward(options, head, pass.out());
    pass.backward(options, head, document.in(of_out, call, call.columns), pass.out(),
                  document.in(of_query, call, call.width),
                  document.in(of_key, call, call.width),
                  document.in(of_value, call, call.columns));
  });
}

}  // namespace lra
