// Sixteen floats as one AVX-512 register. The same functions stand in lanes_avx2.h.
#pragma once
#include <immintrin.h>

#include "numbers.h"

namespace quire {

struct Lanes {
  __m512 all;
};

inline Lanes splat(float value) { return {_mm512_set1_ps(value)}; }

inline Lanes load(const float* from) { return {_mm512_loadu_ps(from)}; }

inline Lanes load(const bf16* from) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}

inline __m256 widen(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

inline void store(float* to, Lanes x) { _mm512_storeu_ps(to, x.all); }

inline Lanes operator+(Lanes x, Lanes y) { return {_mm512_add_ps(x.all, y.all)}; }
inline Lanes operator-(Lanes x, Lanes y) { return {_mm512_sub_ps(x.all, y.all)}; }
inline Lanes operator*(Lanes x, Lanes y) { return {_mm512_mul_ps(x.all, y.all)}; }
inline Lanes operator/(Lanes x, Lanes y) { return {_mm512_div_ps(x.all, y.all)}; }

// x * y + z, rounded once.
inline Lanes fma(Lanes x, Lanes y, Lanes z) { return {_mm512_fmadd_ps(x.all, y.all, z.all)}; }

// The second one where either is NaN.
inline Lanes larger(Lanes x, Lanes y) { return {_mm512_max_ps(x.all, y.all)}; }
inline Lanes smaller(Lanes x, Lanes y) { return {_mm512_min_ps(x.all, y.all)}; }

// yes where x < y, else no (also where either is NaN).
inline Lanes where_less(Lanes x, Lanes y, Lanes yes, Lanes no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.all, y.all, _CMP_LT_OQ), no.all, yes.all)};
}

// Bit i: lane i of x is less than that of y.
inline uint32_t less_bits(Lanes x, Lanes y) {
  return _mm512_cmp_ps_mask(x.all, y.all, _CMP_LT_OQ);
}

// Half of each unsigned number, rounded down.
inline Lanes halves_of(const uint32_t* from) {
  return {_mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_loadu_si512(from), 1))};
}

inline Lanes nearest(Lanes x) {
  return {_mm512_roundscale_ps(x.all, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// x * 2^by for whole numbers that leave a normal number.
inline Lanes shift_exponent(Lanes x, Lanes by) {
  const __m512i steps = _mm512_slli_epi32(_mm512_cvtps_epi32(by.all), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x.all), steps))};
}

inline __m512i bf16_bits(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_blend_epi32(is_nan, rounded, _mm512_set1_epi32(0x7fc0));
}

inline void store(bf16* to, Lanes x) {
  const __m256i halves = _mm512_cvtepi32_epi16(bf16_bits(x.all));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}

// The nearest bf16, as float.
inline Lanes as_bf16(Lanes x) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bf16_bits(x.all), 16))};
}

// Lane i and lane i + 8, then i + 4, i + 2, i + 1.
inline float sum(Lanes x) {
  return fold_sum(_mm256_add_ps(_mm512_castps512_ps256(x.all), _mm512_extractf32x8_ps(x.all, 1)));
}
inline float largest(Lanes x) {
  return fold_largest(
      _mm256_max_ps(_mm512_castps512_ps256(x.all), _mm512_extractf32x8_ps(x.all, 1)));
}

// One register, for loops that must know how many there are.
using Register = __m512;
constexpr int64_t kRegister = 16;  // floats of one
constexpr int kRegisters = 32;     // of the machine

inline Register register_of(float value) { return _mm512_set1_ps(value); }
inline Register load_register(const float* from) { return _mm512_loadu_ps(from); }
inline Register load_register(const bf16* from) { return load(from).all; }
inline void store_register(float* to, Register x) { _mm512_storeu_ps(to, x); }
inline Register times(Register x, Register y) { return _mm512_mul_ps(x, y); }
inline Register fma(Register x, Register y, Register z) { return _mm512_fmadd_ps(x, y, z); }

// A register of quads: four neighbours at d of the rows at 0, 4, 8 and 12; quads c = 0 .. 3 begin
// there.
template <class T>
Register quads_of(const void* const* rows, int64_t d);
template <>
inline Register quads_of<float>(const void* const* rows, int64_t d) {
  Register x = _mm512_castps128_ps512(_mm_loadu_ps(static_cast<const float*>(rows[0]) + d));
  x = _mm512_insertf32x4(x, _mm_loadu_ps(static_cast<const float*>(rows[4]) + d), 1);
  x = _mm512_insertf32x4(x, _mm_loadu_ps(static_cast<const float*>(rows[8]) + d), 2);
  return _mm512_insertf32x4(x, _mm_loadu_ps(static_cast<const float*>(rows[12]) + d), 3);
}
template <>
inline Register quads_of<bf16>(const void* const* rows, int64_t d) {
  const __m256i halves = _mm256_inserti128_si256(
      _mm256_castsi128_si256(two_quads(rows[0], rows[4], d)), two_quads(rows[8], rows[12], d), 1);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
// The same four floats in every quad.
inline Register splat_quad(const float* from) {
  return _mm512_broadcast_f32x4(_mm_loadu_ps(from));
}
// Sums of the quads of four registers, (0 + 2) + (1 + 3) of each, in the order of their rows.
inline Register sum_quads(Register a, Register b, Register c, Register d) {
  const Register ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Register cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
}

}  // namespace quire
