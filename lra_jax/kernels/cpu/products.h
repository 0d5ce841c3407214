// Products and transposes of small row-major matrices whose columns fill registers.

#pragma once

#include <algorithm>
#include <cstring>

#include "vectors.h"

namespace lra {

// Positions computed quadratically, a multiple of kTall and kLanes.
constexpr int kChunk = 64;
// Rows of a step of a product.
constexpr int kTall = 4;

// Which part of a square matrix is not zero, or not needed.
enum class Part { kWhole, kLower, kUpper };

// Tall by Wide registers of ``c = a b``, or ``c + a b``, over the columns from..to of a.
template <int Wide>
inline void product_step(const float* a, int a_row, const float* b, int b_row,
                         float* c, int c_row, int from, int to, bool add) {
  // Added up on their own: one product after another would be lost in a large sum.
  Vec sums[kTall][Wide] = {};
  for (int k = from; k < to; k++) {
    Vec row[Wide];
    for (int j = 0; j < Wide; j++) row[j] = load(b + k * b_row + j * kLanes);
    for (int i = 0; i < kTall; i++) {
      const Vec x = all(a[i * a_row + k]);
      for (int j = 0; j < Wide; j++) sums[i][j] += x * row[j];
    }
  }
  for (int i = 0; i < kTall; i++) {
    for (int j = 0; j < Wide; j++) {
      float* to = c + i * c_row + j * kLanes;
      store(to, add ? load(to) + sums[i][j] : sums[i][j]);
    }
  }
}

// ``c = a b``, or ``c + a b`` if `add`: [rows, inner] by [inner, columns].
// `of_a` is the part of a that is not zero, `of_c` the part of c that is needed; of the
// blocks on the diagonal, all is computed.
inline void product(int rows, int inner, int columns, const float* a, const float* b,
                    float* c, bool add, Part of_a = Part::kWhole,
                    Part of_c = Part::kWhole) {
  for (int i = 0; i < rows; i += kTall) {
    const int from = of_a == Part::kUpper ? i : 0;
    const int to = of_a == Part::kLower ? i + kTall : inner;
    const int last = of_c == Part::kLower ? padded(i + kTall) : columns;
    const float* a_rows = a + i * inner;
    float* c_rows = c + i * columns;
    int j = of_c == Part::kUpper ? i / kLanes * kLanes : 0;
    for (; j + kWide * kLanes <= last; j += kWide * kLanes)
      product_step<kWide>(a_rows, inner, b + j, columns, c_rows + j, columns, from, to,
                          add);
    for (; j < last; j += kLanes)
      product_step<1>(a_rows, inner, b + j, columns, c_rows + j, columns, from, to, add);
  }
}

typedef float Four __attribute__((vector_size(16)));
#if defined(__clang__)
#define LRA_MERGED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t FourInts __attribute__((vector_size(16)));
#define LRA_MERGED(a, b, ...) __builtin_shuffle(a, b, FourInts{__VA_ARGS__})
#endif

// ``to = from^T``: [rows, columns] to [columns, rows], both multiples of 4.
inline void transpose(int rows, int columns, const float* from, float* to) {
  for (int i = 0; i < rows; i += 4) {
    for (int j = 0; j < columns; j += 4) {
      Four x[4], y[4];
      for (int k = 0; k < 4; k++) std::memcpy(&x[k], from + (i + k) * columns + j, 16);
      const Four a = LRA_MERGED(x[0], x[1], 0, 4, 1, 5);
      const Four b = LRA_MERGED(x[0], x[1], 2, 6, 3, 7);
      const Four c = LRA_MERGED(x[2], x[3], 0, 4, 1, 5);
      const Four d = LRA_MERGED(x[2], x[3], 2, 6, 3, 7);
      y[0] = LRA_MERGED(a, c, 0, 1, 4, 5);
      y[1] = LRA_MERGED(a, c, 2, 3, 6, 7);
      y[2] = LRA_MERGED(b, d, 0, 1, 4, 5);
      y[3] = LRA_MERGED(b, d, 2, 3, 6, 7);
      for (int k = 0; k < 4; k++) std::memcpy(to + (j + k) * rows + i, &y[k], 16);
    }
  }
}
#undef LRA_MERGED

// ``x . y`` of n numbers, a multiple of kLanes.
inline float dot(int n, const float* x, const float* y) {
  Vec total{};
  for (int j = 0; j < n; j += kLanes) total += load(x + j) * load(y + j);
  return sum(total);
}

// ``to += sum_i weights_i x_i`` over rows [rows, n], added up on their own; null = 1.
inline void add_rows(int rows, int n, const float* x, const float* weights, float* to) {
  for (int j = 0; j < n; j += kLanes) {
    Vec total{};
    for (int i = 0; i < rows; i++)
      total += (weights ? weights[i] : 1.0f) * load(x + i * n + j);
    store(to + j, load(to + j) + total);
  }
}

// ``y += scale x`` of n numbers, a multiple of kLanes.
inline void add_scaled(int n, float scale, const float* x, float* y) {
  for (int j = 0; j < n; j += kLanes) store(y + j, load(y + j) + scale * load(x + j));
}

}  // namespace lra
