// Vectors of floats in the registers of the machine, and the feature maps.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace lra {

// Floats of a register, and registers of a row that a step of a product holds.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kWide = 4;
#elif defined(__AVX__)
constexpr int kLanes = 8, kWide = 2;
#else
constexpr int kLanes = 4, kWide = 2;
#endif

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(float))));

inline Vec load(const float* from) {
  Vec x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void store(float* to, Vec x) { std::memcpy(to, &x, sizeof x); }

inline Vec all(float x) { return x - Vec{}; }

// The sum of all lanes, by halves: a loop over them would wait for each addition.
inline float sum(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(reinterpret_cast<__m512>(x));
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
  return lanes[0];
#endif
}

// n rounded up to whole registers.
inline int padded(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

// 2^power x for whole powers from -126 to 127.
inline Vec scaled(Vec x, Vec power) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_scalef_ps(reinterpret_cast<__m512>(x),
                                                reinterpret_cast<__m512>(power)));
#else
  const Ints bits = (__builtin_convertvector(power, Ints) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x * scale;
#endif
}

// exp(x) to two units in the last place; 0 below -87, and above 88 the value at 88. The
// power of two is split off, and the rest is a polynomial (Cephes, S. Moshier).
inline Vec exponential(Vec x) {
  const Vec input = x;
  x = x < -87.0f ? all(-87.0f) : x;
  x = x > 88.0f ? all(88.0f) : x;
  // Adding 1.5 * 2^23 rounds to a whole number.
  Vec power = x * 1.44269504088896341f + 12582912.0f;
  power -= 12582912.0f;
  const Vec rest = x - power * 0.693359375f + power * 2.12194440e-4f;
  Vec p = all(1.9875691500e-4f);
  p = p * rest + 1.3981999507e-3f;
  p = p * rest + 8.3334519073e-3f;
  p = p * rest + 4.1665795894e-2f;
  p = p * rest + 1.6666665459e-1f;
  p = p * rest + 5.0000001201e-1f;
  p = p * rest * rest + rest + 1.0f;
  return input < -87.0f ? Vec{} : scaled(p, power);
}

// 1 / x to one unit in the last place, for x from 1 to 2^126.
inline Vec inverse(Vec x) {
#if defined(__AVX512F__)
  const Vec y = reinterpret_cast<Vec>(_mm512_rcp14_ps(reinterpret_cast<__m512>(x)));
  return y + y * (1.0f - x * y);
#else
  return 1.0f / x;
#endif
}

// phi and its derivative; their numbers are those of `programs.MAPS`.
struct Identity {
  static Vec phi(Vec x) { return x; }
  static Vec slope(Vec) { return all(1.0f); }
};

struct Elu {
  // NaN is neither above nor below 0, and has to stay.
  static Vec low(Vec x) { return exponential(x > 0.0f ? Vec{} : x); }
  static Vec phi(Vec x) { return x > 0.0f ? x + 1.0f : low(x); }
  static Vec slope(Vec x) { return x > 0.0f ? all(1.0f) : low(x); }
};

struct Relu {
  static Vec phi(Vec x) { return x < 0.0f ? Vec{} : x; }
  static Vec slope(Vec x) { return x > 0.0f ? all(1.0f) : Vec{}; }
};

struct LeakyRelu {
  static Vec phi(Vec x) { return x < 0.0f ? 0.01f * x : x; }
  static Vec slope(Vec x) { return x < 0.0f ? all(0.01f) : all(1.0f); }
};

struct Sigmoid {
  static Vec phi(Vec x) { return inverse(1.0f + exponential(-x)); }
  static Vec slope(Vec x) {
    const Vec y = phi(x);
    return y * (1.0f - y);
  }
};

struct Silu {
  static Vec phi(Vec x) { return x * Sigmoid::phi(x); }
  static Vec slope(Vec x) {
    const Vec y = Sigmoid::phi(x);
    return y * (1.0f + x * (1.0f - y));
  }
};

// Calls a function with the feature map of a number.
template <class Function>
void with_map(int64_t number, Function function) {
  switch (number) {
    case 0: return function(Identity{});
    case 1: return function(Elu{});
    case 2: return function(Relu{});
    case 3: return function(LeakyRelu{});
    case 4: return function(Sigmoid{});
    default: return function(Silu{});
  }
}

}  // namespace lra
