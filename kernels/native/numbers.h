// What both kinds of lanes share: the bf16 type and sums over eight floats.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace quire {

struct bf16 {
  uint16_t bits;
};

inline float as_float(float x) { return x; }
inline float as_float(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The four functions round as torch does: to nearest, ties to even, one quiet NaN.
inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (x != x) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
inline void put(float* to, float x) { *to = x; }
inline void put(bf16* to, float x) { *to = to_bf16(x); }

// Four numbers at d of each of two rows.
inline __m128i two_quads(const void* first, const void* second, int64_t d) {
  const bf16 *x = static_cast<const bf16*>(first) + d, *y = static_cast<const bf16*>(second) + d;
  const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(x));
  return _mm_castps_si128(
      _mm_loadh_pi(_mm_castsi128_ps(low), reinterpret_cast<const __m64*>(y)));
}

inline float fold_sum(__m256 x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

inline float fold_largest(__m256 x) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

}  // namespace quire
