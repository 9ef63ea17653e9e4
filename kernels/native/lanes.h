// The logical vector of all kernels: sixteen floats, whatever the registers.
//
// Every sum is defined over these sixteen lanes and every multiply-add is one fused operation (the
// compiler is told not to make others), so that AVX2 and AVX-512 builds give the same bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>

#if defined(__AVX512F__)
#include "lanes_avx512.h"
#else
#include "lanes_avx2.h"
#endif

namespace quire {

constexpr int64_t kLanes = 16;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// The first `count` lanes from memory, zeros after them.
template <class T>
inline Lanes load_first(const T* from, int64_t count) {
  T part[kLanes] = {};
  for (int64_t i = 0; i < count; i++) part[i] = from[i];
  return load(part);
}

template <class T>
inline void store_first(T* to, Lanes x, int64_t count) {
  T part[kLanes];
  store(part, x);
  for (int64_t i = 0; i < count; i++) to[i] = part[i];
}

// 2^x within 2 units in the last place: exactly 1 for 0, 0 below 2^-126, at most 2^127, NaN for NaN.
inline Lanes exp2(Lanes x) {
  const Lanes inside = larger(splat(-126.0f), smaller(splat(127.0f), x));
  const Lanes whole = nearest(inside);
  const Lanes rest = inside - whole;
  Lanes y = splat(1.52527338e-5f);
  y = fma(y, rest, splat(1.54035304e-4f));
  y = fma(y, rest, splat(1.33335581e-3f));
  y = fma(y, rest, splat(9.61812911e-3f));
  y = fma(y, rest, splat(5.55041087e-2f));
  y = fma(y, rest, splat(2.40226507e-1f));
  y = fma(y, rest, splat(6.93147181e-1f));
  y = fma(y, rest, splat(1.0f));
  return where_less(x, splat(-126.0f), splat(0.0f), shift_exponent(y, whole));
}

inline float exp2(float x) {
  float lanes[kLanes];
  store(lanes, exp2(splat(x)));
  return lanes[0];
}

// tanh(x) = sign (1 - t) / (1 + t) with t = exp(-2 |x|), which can't overflow.
inline Lanes tanh(Lanes x) {
  const Lanes zero = splat(0.0f);
  const Lanes size = larger(zero - x, x);
  const Lanes t = exp2(size * splat(-2.0f * kLog2E));
  const Lanes y = (splat(1.0f) - t) / (splat(1.0f) + t);
  return where_less(x, zero, zero - y, y);
}

// What an element of type T holds after arithmetic in float.
inline Lanes rounded(Lanes x, const float*) { return x; }
inline Lanes rounded(Lanes x, const bf16*) { return as_bf16(x); }

}  // namespace quire

#define QUIRE_EXPORT extern "C" __attribute__((visibility("default")))
// Before loops over arrays of registers: where one is not unrolled at once, the array is in memory.
#define QUIRE_UNROLL _Pragma("GCC unroll 16")
