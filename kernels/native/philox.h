// The counted noise of gpu_worker/sampler.py: Philox4x32-10, eight counters at once.
//
// Token i's noise is word i % 4 of the block with counter (i / 4, position, sample index, 0); the
// words of a call are those of tokens 4 * first .. 4 * first + 31.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace quire {

struct Noise {
  uint32_t key0, key1, position, sample_index;
};

// Upper and lower halves of the products of eight pairs of 32-bit numbers.
inline __m256i high_product(__m256i a, __m256i b) {
  const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(a, b), 32);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
  return _mm256_blend_epi32(even, odd, 0xaa);
}

// Four words of eight counters.
struct Words {
  __m256i of[4];
};

inline Words philox(const Noise& noise, __m256i c0) {
  const __m256i m0 = _mm256_set1_epi32(static_cast<int>(0xD2511F53u));
  const __m256i m1 = _mm256_set1_epi32(static_cast<int>(0xCD9E8D57u));
  __m256i c1 = _mm256_set1_epi32(static_cast<int>(noise.position));
  __m256i c2 = _mm256_set1_epi32(static_cast<int>(noise.sample_index));
  __m256i c3 = _mm256_setzero_si256();
  uint32_t k0 = noise.key0, k1 = noise.key1;
  for (int round = 0; round < 10; round++) {
    const __m256i high0 = high_product(c0, m0), low0 = _mm256_mullo_epi32(c0, m0);
    const __m256i high2 = high_product(c2, m1), low2 = _mm256_mullo_epi32(c2, m1);
    c0 = _mm256_xor_si256(_mm256_xor_si256(high2, c1), _mm256_set1_epi32(static_cast<int>(k0)));
    c2 = _mm256_xor_si256(_mm256_xor_si256(high0, c3), _mm256_set1_epi32(static_cast<int>(k1)));
    c1 = low2;
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {c0, c1, c2, c3};
}

// words[i] of eight tokens anywhere.
inline void philox_of(const Noise& noise, const int32_t* tokens, uint32_t* words) {
  const __m256i token = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tokens));
  const Words all = philox(noise, _mm256_srli_epi32(token, 2));
  // The two low bits of a token choose its word: as signs, for the blends.
  const __m256 odd = _mm256_castsi256_ps(_mm256_slli_epi32(token, 31));
  const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(token, 30));
  __m256 of[4];
  for (int i = 0; i < 4; i++) of[i] = _mm256_castsi256_ps(all.of[i]);
  const __m256 low = _mm256_blendv_ps(of[0], of[1], odd);
  const __m256 high = _mm256_blendv_ps(of[2], of[3], odd);
  _mm256_storeu_ps(reinterpret_cast<float*>(words), _mm256_blendv_ps(low, high, upper));
}

// words[4 * counter + word] of the eight counters from `first` on.
inline void philox32(const Noise& noise, uint32_t first, uint32_t* words) {
  const Words all = philox(noise, _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(first)),
                                                   _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)));
  const __m256i c0 = all.of[0], c1 = all.of[1], c2 = all.of[2], c3 = all.of[3];
  // Four by eight to eight by four; the halves of the registers hold counters 0 .. 3 and 4 .. 7.
  const __m256i ab_low = _mm256_unpacklo_epi32(c0, c1), ab_high = _mm256_unpackhi_epi32(c0, c1);
  const __m256i cd_low = _mm256_unpacklo_epi32(c2, c3), cd_high = _mm256_unpackhi_epi32(c2, c3);
  const __m256i r0 = _mm256_unpacklo_epi64(ab_low, cd_low);
  const __m256i r1 = _mm256_unpackhi_epi64(ab_low, cd_low);
  const __m256i r2 = _mm256_unpacklo_epi64(ab_high, cd_high);
  const __m256i r3 = _mm256_unpackhi_epi64(ab_high, cd_high);
  __m256i* to = reinterpret_cast<__m256i*>(words);
  _mm256_storeu_si256(to, _mm256_permute2x128_si256(r0, r1, 0x20));
  _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(r2, r3, 0x20));
  _mm256_storeu_si256(to + 2, _mm256_permute2x128_si256(r0, r1, 0x31));
  _mm256_storeu_si256(to + 3, _mm256_permute2x128_si256(r2, r3, 0x31));
}

}  // namespace quire
