// Sixteen floats as two AVX2 registers. The same functions stand in lanes_avx512.h.
#pragma once
#include <immintrin.h>

#include "numbers.h"

namespace quire {

struct Lanes {
  __m256 low, high;
};

inline Lanes splat(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }

inline Lanes load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }

inline __m256 widen(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

inline Lanes load(const bf16* from) {
  const __m128i* parts = reinterpret_cast<const __m128i*>(from);
  return {widen(_mm_loadu_si128(parts)), widen(_mm_loadu_si128(parts + 1))};
}

inline void store(float* to, Lanes x) {
  _mm256_storeu_ps(to, x.low);
  _mm256_storeu_ps(to + 8, x.high);
}

inline Lanes operator+(Lanes x, Lanes y) {
  return {_mm256_add_ps(x.low, y.low), _mm256_add_ps(x.high, y.high)};
}
inline Lanes operator-(Lanes x, Lanes y) {
  return {_mm256_sub_ps(x.low, y.low), _mm256_sub_ps(x.high, y.high)};
}
inline Lanes operator*(Lanes x, Lanes y) {
  return {_mm256_mul_ps(x.low, y.low), _mm256_mul_ps(x.high, y.high)};
}
inline Lanes operator/(Lanes x, Lanes y) {
  return {_mm256_div_ps(x.low, y.low), _mm256_div_ps(x.high, y.high)};
}

// x * y + z, rounded once.
inline Lanes fma(Lanes x, Lanes y, Lanes z) {
  return {_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high)};
}

// The second one where either is NaN.
inline Lanes larger(Lanes x, Lanes y) {
  return {_mm256_max_ps(x.low, y.low), _mm256_max_ps(x.high, y.high)};
}
inline Lanes smaller(Lanes x, Lanes y) {
  return {_mm256_min_ps(x.low, y.low), _mm256_min_ps(x.high, y.high)};
}

// yes where x < y, else no (also where either is NaN).
inline Lanes where_less(Lanes x, Lanes y, Lanes yes, Lanes no) {
  return {_mm256_blendv_ps(no.low, yes.low, _mm256_cmp_ps(x.low, y.low, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.high, yes.high, _mm256_cmp_ps(x.high, y.high, _CMP_LT_OQ))};
}

// Bit i: lane i of x is less than that of y.
inline uint32_t less_bits(Lanes x, Lanes y) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(x.low, y.low, _CMP_LT_OQ));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(x.high, y.high, _CMP_LT_OQ));
  return static_cast<uint32_t>(low | high << 8);
}

// Half of each unsigned number, rounded down.
inline Lanes halves_of(const uint32_t* from) {
  const __m256i* parts = reinterpret_cast<const __m256i*>(from);
  return {_mm256_cvtepi32_ps(_mm256_srli_epi32(_mm256_loadu_si256(parts), 1)),
          _mm256_cvtepi32_ps(_mm256_srli_epi32(_mm256_loadu_si256(parts + 1), 1))};
}

inline Lanes nearest(Lanes x) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, kMode), _mm256_round_ps(x.high, kMode)};
}

inline __m256 shift_exponent(__m256 x, __m256 by) {
  const __m256i steps = _mm256_slli_epi32(_mm256_cvtps_epi32(by), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), steps));
}

// x * 2^by for whole numbers that leave a normal number.
inline Lanes shift_exponent(Lanes x, Lanes by) {
  return {shift_exponent(x.low, by.low), shift_exponent(x.high, by.high)};
}

inline __m256i bf16_bits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  const __m256 is_nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(is_nan));
}

inline void store(bf16* to, Lanes x) {
  const __m256i mixed = _mm256_packus_epi32(bf16_bits(x.low), bf16_bits(x.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(mixed, 0xd8));
}

// The nearest bf16, as float.
inline Lanes as_bf16(Lanes x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(x.low), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(x.high), 16))};
}

// Lane i and lane i + 8, then i + 4, i + 2, i + 1.
inline float sum(Lanes x) { return fold_sum(_mm256_add_ps(x.low, x.high)); }
inline float largest(Lanes x) { return fold_largest(_mm256_max_ps(x.low, x.high)); }

// One register, for loops that must know how many there are.
using Register = __m256;
constexpr int64_t kRegister = 8;  // floats of one
constexpr int kRegisters = 16;    // of the machine

inline Register register_of(float value) { return _mm256_set1_ps(value); }
inline Register load_register(const float* from) { return _mm256_loadu_ps(from); }
inline Register load_register(const bf16* from) {
  return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store_register(float* to, Register x) { _mm256_storeu_ps(to, x); }
inline Register times(Register x, Register y) { return _mm256_mul_ps(x, y); }
inline Register fma(Register x, Register y, Register z) { return _mm256_fmadd_ps(x, y, z); }

// A register of quads: four neighbours at d of the rows at 0 and 4; quads c = 0 .. 3 begin there.
template <class T>
Register quads_of(const void* const* rows, int64_t d);
template <>
inline Register quads_of<float>(const void* const* rows, int64_t d) {
  const __m128 first = _mm_loadu_ps(static_cast<const float*>(rows[0]) + d);
  const __m128 second = _mm_loadu_ps(static_cast<const float*>(rows[4]) + d);
  return _mm256_insertf128_ps(_mm256_castps128_ps256(first), second, 1);
}
template <>
inline Register quads_of<bf16>(const void* const* rows, int64_t d) {
  return widen(two_quads(rows[0], rows[4], d));
}
// The same four floats in every quad.
inline Register splat_quad(const float* from) {
  return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(from));
}
// Sums of the quads of four registers, (0 + 2) + (1 + 3) of each, in the order of their rows.
inline Register sum_quads(Register a, Register b, Register c, Register d) {
  const Register ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const Register cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
}

}  // namespace quire
