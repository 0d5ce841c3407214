// Features of length one, ``u / sqrt(|u|^2 + eps)`` with ``u = phi(x)``, row by row.

#pragma once

#include <cmath>

#include "tasks.h"
#include "vectors.h"

namespace lra {

// Rows of a task.
constexpr int64_t kRowsOfTask = 512;

// Calls `work(first, last, room)` with ranges of the rows, on all threads; `room` has
// three rows, whose columns fill registers.
template <class Work>
void in_rows(xla::ffi::ThreadPool& pool, int64_t rows, int width, const Work& work) {
  const int64_t tasks = (rows + kRowsOfTask - 1) / kRowsOfTask;
  in_parallel(pool, tasks, [&](int64_t task) {
    Room room;
    float* made = room.take(3 * padded(width));
    work(task * kRowsOfTask, std::min(rows, (task + 1) * kRowsOfTask), made);
  });
}

// Writes phi(x) of a row, zero beyond its columns; returns what makes its length one.
// The squares of large features would be infinite, so these are added up as doubles.
template <class Map>
float unit_scale(const float* x, int width, float eps, const Map& map, float* features) {
  const int size = padded(width);
  std::memcpy(features, x, width * sizeof(float));
  for (int j = 0; j < size; j += kLanes)
    store(features + j, map.phi(load(features + j)));
  std::fill(features + width, features + size, 0.0f);
  Vec squares{};
  for (int j = 0; j < size; j += kLanes)
    squares += load(features + j) * load(features + j);
  const float total = sum(squares);
  if (total < 1e30f) return total + eps > 0 ? 1.0f / std::sqrt(total + eps) : 1.0f;
  double wide = 0;
  for (int j = 0; j < width; j++)
    wide += static_cast<double>(features[j]) * features[j];
  return static_cast<float>(1.0 / std::sqrt(wide + eps));
}

inline void unit_forward(xla::ffi::ThreadPool& pool, int64_t rows, int width,
                         int64_t number, float eps, const float* x, float* out) {
  in_rows(pool, rows, width, [&](int64_t first, int64_t last, float* features) {
    with_map(number, [&](auto map) {
      for (int64_t row = first; row < last; row++) {
        const float scale = unit_scale(x + row * width, width, eps, map, features);
        for (int j = 0; j < padded(width); j += kLanes)
          store(features + j, load(features + j) * scale);
        std::memcpy(out + row * width, features, width * sizeof(float));
      }
    });
  });
}

inline void unit_backward(xla::ffi::ThreadPool& pool, int64_t rows, int width,
                          int64_t number, float eps, const float* x, const float* of_out,
                          float* of_x) {
  const int size = padded(width);
  in_rows(pool, rows, width, [&](int64_t first, int64_t last, float* features) {
    float *slopes = features + size, *raw = slopes + size;
    with_map(number, [&](auto map) {
      for (int64_t row = first; row < last; row++) {
        const float scale = unit_scale(x + row * width, width, eps, map, features);
        std::memcpy(slopes, of_out + row * width, width * sizeof(float));
        std::memcpy(raw, x + row * width, width * sizeof(float));
        Vec lanes{};
        for (int j = 0; j < size; j += kLanes)
          lanes += load(slopes + j) * (load(features + j) * scale);
        const float along = sum(lanes);
        for (int j = 0; j < size; j += kLanes) {
          const Vec unit = load(features + j) * scale;
          const Vec of_features = (load(slopes + j) - along * unit) * scale;
          store(slopes + j, of_features * map.slope(load(raw + j)));
        }
        std::memcpy(of_x + row * width, slopes, width * sizeof(float));
      }
    });
  });
}

}  // namespace lra
