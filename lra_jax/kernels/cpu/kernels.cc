// Linear attention, its relatives and Flow-Attention on a CPU, as calls that XLA makes.
//
// Compiled on the machine by lra_jax/kernels/cpu/library.py. Arrays are float32 and have
// the axes of lra_jax, after any further axes of `jax.vmap`, which count as samples. An
// array without elements is absent.

#include "causal.h"
#include "columns.h"
#include "delta.h"
#include "flow.h"
#include "flow_packed.h"
#include "flow_whole.h"
#include "gated.h"
#include "packed.h"
#include "units.h"
#include "whole.h"

namespace {

namespace ffi = xla::ffi;
using In = ffi::Buffer<ffi::F32>;
using Out = ffi::Result<ffi::Buffer<ffi::F32>>;

const float* present(const In& x) { return x.element_count() ? x.typed_data() : nullptr; }

lra::Call call_of(const In& query, const In& key, const In& value, const In& mask,
                  const In& unit, int64_t map) {
  const auto axes = query.dimensions();
  const size_t last = axes.size();
  lra::Call call{};
  call.batch = 1;
  for (size_t axis = 0; axis + 3 < last; axis++) call.batch *= axes[axis];
  call.queries = axes[last - 3];
  call.heads = static_cast<int>(axes[last - 2]);
  call.width = static_cast<int>(axes[last - 1]);
  call.keys = key.dimensions()[last - 3];
  call.columns = static_cast<int>(value.dimensions()[last - 1]);
  call.map = map;
  call.query = query.typed_data();
  call.key = key.typed_data();
  call.value = value.typed_data();
  call.mask = present(mask);
  call.unit = unit.typed_data();
  return call;
}

lra::Call product_of(const In& query, const In& key, const In& value, const In& mask,
                     const In& turn, const In& unit, int64_t map, bool turned,
                     int64_t denominator, float eps) {
  lra::Call call = call_of(query, key, value, mask, unit, map);
  call.turned = turned;
  call.turn = turn.typed_data();
  call.denominator = static_cast<lra::Denominator>(denominator);
  call.eps = eps;
  return call;
}

lra::Call flows_of(const In& query, const In& key, const In& mask, const In& query_mask,
                   const In& unit, int64_t map) {
  lra::Call call = call_of(query, key, query, mask, unit, map);
  call.query_mask = present(query_mask);
  return call;
}

ffi::Error causal_forward(ffi::ThreadPool pool, In query, In key, In value, In mask,
                          In turn, In unit, In rates, In documents, In weights,
                          In factor, Out out, Out scale, int64_t map, bool turned,
                          int64_t denominator, float eps, bool both_sides) {
  lra::Call call =
      product_of(query, key, value, mask, turn, unit, map, turned, denominator, eps);
  call.rates = present(rates);
  call.documents = present(documents);
  call.both_sides = both_sides;
  call.weights = present(weights);
  lra::causal_forward(call, pool, present(factor), out->typed_data(),
                      scale->typed_data());
  return ffi::Error::Success();
}

ffi::Error causal_backward(ffi::ThreadPool pool, In query, In key, In value, In mask,
                           In turn, In unit, In rates, In documents, In weights, In out,
                           In scale, In of_out, Out of_query, Out of_key, Out of_value,
                           Out of_weights, Out of_scale, int64_t map, bool turned,
                           int64_t denominator, float eps, bool both_sides) {
  lra::Call call =
      product_of(query, key, value, mask, turn, unit, map, turned, denominator, eps);
  call.rates = present(rates);
  call.documents = present(documents);
  call.both_sides = both_sides;
  call.weights = present(weights);
  const lra::Slopes slopes{of_out.typed_data(), out.typed_data(), scale.typed_data()};
  lra::causal_of_query(call, pool, slopes, of_query->typed_data(),
                       of_scale->element_count() ? of_scale->typed_data() : nullptr);
  lra::causal_of_key(call, pool, slopes, of_key->typed_data(), of_value->typed_data(),
                     call.weights ? of_weights->typed_data() : nullptr);
  return ffi::Error::Success();
}

ffi::Error whole_forward(ffi::ThreadPool pool, In query, In key, In value, In mask,
                         In turn, In unit, Out out, Out scale, Out sums, int64_t map,
                         bool turned, int64_t denominator, float eps) {
  const lra::Call call =
      product_of(query, key, value, mask, turn, unit, map, turned, denominator, eps);
  lra::whole_forward(lra::AllHeads{call, pool}, call, out->typed_data(),
                     scale->typed_data(), sums->typed_data());
  return ffi::Error::Success();
}

ffi::Error whole_backward(ffi::ThreadPool pool, In query, In key, In value, In mask,
                          In turn, In unit, In out, In scale, In sums, In of_out,
                          Out of_query, Out of_key, Out of_value, int64_t map,
                          bool turned, int64_t denominator, float eps) {
  const lra::Call call =
      product_of(query, key, value, mask, turn, unit, map, turned, denominator, eps);
  const lra::Slopes slopes{of_out.typed_data(), out.typed_data(), scale.typed_data()};
  lra::whole_backward(lra::AllHeads{call, pool}, call, slopes, sums.typed_data(),
                      of_query->typed_data(), of_key->typed_data(),
                      of_value->typed_data());
  return ffi::Error::Success();
}

ffi::Error packed_forward(ffi::ThreadPool pool, In query, In key, In value, In mask,
                          In turn, In unit, In documents, Out out, Out scale, int64_t map,
                          bool turned, int64_t denominator, float eps) {
  const lra::Call call =
      product_of(query, key, value, mask, turn, unit, map, turned, denominator, eps);
  lra::packed_forward(call, pool, documents.typed_data(), out->typed_data(),
                      scale->typed_data());
  return ffi::Error::Success();
}

ffi::Error packed_backward(ffi::ThreadPool pool, In query, In key, In value, In mask,
                           In turn, In unit, In documents, In out, In scale, In of_out,
                           Out of_query, Out of_key, Out of_value, int64_t map,
                           bool turned, int64_t denominator, float eps) {
  const lra::Call call =
      product_of(query, key, value, mask, turn, unit, map, turned, denominator, eps);
  const lra::Slopes slopes{of_out.typed_data(), out.typed_data(), scale.typed_data()};
  lra::packed_backward(call, pool, documents.typed_data(), slopes,
                       of_query->typed_data(), of_key->typed_data(),
                       of_value->typed_data());
  return ffi::Error::Success();
}

ffi::Error causal_flow_terms(ffi::ThreadPool pool, In query, In key, In mask,
                             In query_mask, In unit, In documents, Out incoming,
                             Out outgoing, Out allocation, Out logit, Out total,
                             Out competition, Out factor, int64_t map, float clip,
                             float eps, float extra_eps) {
  const lra::Call call = flows_of(query, key, mask, query_mask, unit, map);
  lra::causal_flow_terms(
      call, pool, {clip, eps, extra_eps}, present(documents),
      {incoming->typed_data(), outgoing->typed_data(), allocation->typed_data(),
       logit->typed_data(), total->typed_data(), competition->typed_data(),
       factor->typed_data()});
  return ffi::Error::Success();
}

ffi::Error causal_flow_backward(ffi::ThreadPool pool, In query, In key, In mask,
                                In query_mask, In unit, In documents, In incoming,
                                In outgoing, In allocation, In logit, In total,
                                In competition, In through, In of_competition, In, In,
                                Out of_query, Out of_key, int64_t map, float clip,
                                float eps, float extra_eps) {
  const lra::Call call = flows_of(query, key, mask, query_mask, unit, map);
  lra::causal_flow_backward(
      call, pool, {clip, eps, extra_eps}, present(documents),
      {incoming.typed_data(), outgoing.typed_data(), allocation.typed_data(),
       logit.typed_data(), total.typed_data(), competition.typed_data(), nullptr},
      through.typed_data(), of_competition.typed_data(), of_query->typed_data(),
      of_key->typed_data());
  return ffi::Error::Success();
}

lra::Call whole_flow_of(const In& query, const In& key, const In& value, const In& mask,
                        const In& query_mask, const In& unit, const float* competition,
                        int64_t map) {
  lra::Call call = call_of(query, key, value, mask, unit, map);
  call.query_mask = present(query_mask);
  call.weights = competition;
  call.denominator = lra::Denominator::kGiven;
  call.heads_first = true;
  return call;
}

ffi::Error whole_flow_forward(ffi::ThreadPool pool, In query, In key, In value, In mask,
                              In query_mask, In unit, Out out, Out incoming,
                              Out allocation, Out outgoing, Out logit, Out flow_sums,
                              Out competition, Out factor, Out sums, int64_t map,
                              float clip, float eps, float extra_eps) {
  const lra::WholeTerms terms{incoming->typed_data(),    allocation->typed_data(),
                              outgoing->typed_data(),    logit->typed_data(),
                              flow_sums->typed_data(),   competition->typed_data(),
                              factor->typed_data()};
  const lra::Call call = whole_flow_of(query, key, value, mask, query_mask, unit,
                                       terms.competition, map);
  const lra::FlowOptions options{clip, eps, extra_eps};
  const auto totals = lra::totals_of(call);
  lra::in_passes(call, pool, [&](const auto& passes) {
    lra::whole_flow_forward(passes, call, options, totals, terms, out->typed_data(),
                            sums->typed_data());
  });
  return ffi::Error::Success();
}

ffi::Error whole_flow_backward(ffi::ThreadPool pool, In query, In key, In value, In mask,
                               In query_mask, In unit, In out, In incoming,
                               In allocation, In outgoing, In logit, In flow_sums,
                               In competition, In factor, In sums, In of_out,
                               Out of_query, Out of_key, Out of_value, int64_t map,
                               float clip, float eps, float extra_eps) {
  const lra::WholeTerms terms{incoming.typed_data(),    allocation.typed_data(),
                              outgoing.typed_data(),    logit.typed_data(),
                              flow_sums.typed_data(),   competition.typed_data(),
                              factor.typed_data()};
  const lra::Call call = whole_flow_of(query, key, value, mask, query_mask, unit,
                                       terms.competition, map);
  const lra::FlowOptions options{clip, eps, extra_eps};
  const lra::Slopes slopes{of_out.typed_data(), out.typed_data(), terms.factor};
  const auto totals = lra::totals_of(call);
  lra::whole_flow_backward(lra::AllHeads{call, pool}, call, options, totals, terms,
                           slopes, sums.typed_data(), of_query->typed_data(),
                           of_key->typed_data(), of_value->typed_data());
  return ffi::Error::Success();
}

ffi::Error packed_flow_forward(ffi::ThreadPool pool, In query, In key, In value, In mask,
                               In query_mask, In unit, In documents, Out out,
                               int64_t map, float clip, float eps, float extra_eps) {
  const lra::Call call =
      whole_flow_of(query, key, value, mask, query_mask, unit, nullptr, map);
  lra::packed_flow_forward(call, pool, {clip, eps, extra_eps}, documents.typed_data(),
                           out->typed_data());
  return ffi::Error::Success();
}

ffi::Error packed_flow_backward(ffi::ThreadPool pool, In query, In key, In value, In mask,
                                In query_mask, In unit, In documents, In of_out,
                                Out of_query, Out of_key, Out of_value, int64_t map,
                                float clip, float eps, float extra_eps) {
  const lra::Call call =
      whole_flow_of(query, key, value, mask, query_mask, unit, nullptr, map);
  lra::packed_flow_backward(call, pool, {clip, eps, extra_eps}, documents.typed_data(),
                            of_out.typed_data(), of_query->typed_data(),
                            of_key->typed_data(), of_value->typed_data());
  return ffi::Error::Success();
}

lra::Recurrence recurrence_of(const In& query, const In& key, const In& value,
                              const In& log_decay, const In& documents, bool from_end) {
  const lra::Call call = call_of(query, key, value, documents, documents, 0);
  lra::Recurrence made{};
  made.batch = call.batch;
  made.length = call.queries;
  made.heads = call.heads;
  made.width = call.width;
  made.columns = call.columns;
  made.from_end = from_end;
  made.query = call.query;
  made.key = call.key;
  made.value = call.value;
  made.log_decay = present(log_decay);
  made.documents = present(documents);
  return made;
}

ffi::Error gated_forward(ffi::ThreadPool pool, In query, In key, In value, In log_decay,
                         In documents, Out out, bool from_end) {
  lra::gated_forward(recurrence_of(query, key, value, log_decay, documents, from_end),
                     pool, out->typed_data());
  return ffi::Error::Success();
}

ffi::Error gated_backward(ffi::ThreadPool pool, In query, In key, In value, In log_decay,
                          In documents, In of_out, Out of_query, Out of_key,
                          Out of_value, Out of_log_decay, bool from_end) {
  lra::gated_backward(recurrence_of(query, key, value, log_decay, documents, from_end),
                      pool, of_out.typed_data(), of_query->typed_data(),
                      of_key->typed_data(), of_value->typed_data(),
                      of_log_decay->typed_data());
  return ffi::Error::Success();
}

ffi::Error delta_forward(ffi::ThreadPool pool, In query, In key, In value, In log_decay,
                         In share, In documents, Out out, Out missing, bool from_end) {
  auto call = recurrence_of(query, key, value, log_decay, documents, from_end);
  call.share = share.typed_data();
  lra::delta_forward(call, pool, missing->typed_data(), out->typed_data());
  return ffi::Error::Success();
}

ffi::Error delta_backward(ffi::ThreadPool pool, In query, In key, In value, In log_decay,
                          In share, In documents, In missing, In of_out, Out of_query,
                          Out of_key, Out of_value, Out of_log_decay, Out of_share,
                          bool from_end) {
  auto call = recurrence_of(query, key, value, log_decay, documents, from_end);
  call.share = share.typed_data();
  lra::delta_backward(call, pool, missing.typed_data(), of_out.typed_data(),
                      of_query->typed_data(), of_key->typed_data(),
                      of_value->typed_data(), of_log_decay->typed_data(),
                      of_share->typed_data());
  return ffi::Error::Success();
}

int64_t rows_of(const In& x) {
  const auto axes = x.dimensions();
  return axes.back() ? x.element_count() / axes.back() : 0;
}

ffi::Error unit_forward(ffi::ThreadPool pool, In x, Out out, int64_t map, float eps) {
  const int width = static_cast<int>(x.dimensions().back());
  lra::unit_forward(pool, rows_of(x), width, map, eps, x.typed_data(), out->typed_data());
  return ffi::Error::Success();
}

ffi::Error unit_backward(ffi::ThreadPool pool, In x, In of_out, Out of_x, int64_t map,
                         float eps) {
  const int width = static_cast<int>(x.dimensions().back());
  lra::unit_backward(pool, rows_of(x), width, map, eps, x.typed_data(),
                     of_out.typed_data(), of_x->typed_data());
  return ffi::Error::Success();
}

lra::Scan scan_of(const In& factors, int64_t forth) {
  const auto axes = factors.dimensions();
  const size_t last = axes.size();
  lra::Scan call{1, axes[last - 2], axes[last - 1], forth, factors.typed_data()};
  for (size_t axis = 0; axis + 2 < last; axis++) call.batch *= axes[axis];
  return call;
}

ffi::Error scan_forward(ffi::ThreadPool pool, In factors, In values, Out states,
                        int64_t forth) {
  lra::scan_forward(scan_of(factors, forth), pool, values.typed_data(),
                    states->typed_data());
  return ffi::Error::Success();
}

ffi::Error scan_backward(ffi::ThreadPool pool, In factors, In states, In of_states,
                         Out of_factors, Out of_values, int64_t forth) {
  lra::scan_backward(scan_of(factors, forth), pool, states.typed_data(),
                     of_states.typed_data(), of_factors->typed_data(),
                     of_values->typed_data());
  return ffi::Error::Success();
}

// A binding with the attributes of products, or of flows. Bindings cannot be copied.
template <class Binding>
auto with_product(Binding&& binding) {
  return std::move(binding)
      .template Attr<int64_t>("map")
      .template Attr<bool>("turned")
      .template Attr<int64_t>("denominator")
      .template Attr<float>("eps");
}

template <class Binding>
auto with_causal(Binding&& binding) {
  return with_product(std::move(binding)).template Attr<bool>("both_sides");
}

template <class Binding>
auto with_flow(Binding&& binding) {
  return std::move(binding)
      .template Attr<int64_t>("map")
      .template Attr<float>("clip")
      .template Attr<float>("eps")
      .template Attr<float>("extra_eps");
}

template <class Binding>
auto with_end(Binding&& binding) {
  return std::move(binding).template Attr<bool>("from_end");
}

template <class Binding>
auto with_unit(Binding&& binding) {
  return std::move(binding).template Attr<int64_t>("map").template Attr<float>("eps");
}

template <class Binding>
auto with_forth(Binding&& binding) {
  return std::move(binding).template Attr<int64_t>("forth");
}

// A binding with further arguments and results, in these numbers.
template <int kArguments, int kResults, class Binding>
auto with_arrays(Binding&& binding) {
  using Array = ffi::Buffer<ffi::F32>;
  if constexpr (kArguments > 0)
    return with_arrays<kArguments - 1, kResults>(
        std::move(binding).template Arg<Array>());
  else if constexpr (kResults > 1)
    return with_arrays<0, kResults - 1>(std::move(binding).template Ret<Array>());
  else
    return std::move(binding).template Ret<Array>();
}

template <int kArguments, int kResults>
auto binding() {
  return with_arrays<kArguments, kResults>(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_causal_forward, causal_forward,
                              with_causal(binding<10, 2>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_causal_backward, causal_backward,
                              with_causal(binding<12, 5>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_whole_forward, whole_forward,
                              with_product(binding<6, 3>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_whole_backward, whole_backward,
                              with_product(binding<10, 3>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_packed_forward, packed_forward,
                              with_product(binding<7, 2>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_packed_backward, packed_backward,
                              with_product(binding<10, 3>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_causal_flow_terms, causal_flow_terms,
                              with_flow(binding<6, 7>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_causal_flow_backward, causal_flow_backward,
                              with_flow(binding<16, 2>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_whole_flow_forward, whole_flow_forward,
                              with_flow(binding<6, 9>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_whole_flow_backward, whole_flow_backward,
                              with_flow(binding<16, 3>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_packed_flow_forward, packed_flow_forward,
                              with_flow(binding<7, 1>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_packed_flow_backward, packed_flow_backward,
                              with_flow(binding<8, 3>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_gated_forward, gated_forward,
                              with_end(binding<5, 1>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_gated_backward, gated_backward,
                              with_end(binding<6, 4>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_delta_forward, delta_forward,
                              with_end(binding<6, 2>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_delta_backward, delta_backward,
                              with_end(binding<8, 5>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_unit_forward, unit_forward,
                              with_unit(binding<1, 1>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_unit_backward, unit_backward,
                              with_unit(binding<2, 1>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_scan_forward, scan_forward,
                              with_forth(binding<2, 1>()));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lra_scan_backward, scan_backward,
                              with_forth(binding<3, 2>()));

// Floats of a register.
extern "C" int lra_lanes() { return lra::kLanes; }
