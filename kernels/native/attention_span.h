// Attention of a few query rows over one span of at most kSpan keys.
//
// A query row is one query token with one head; the rows of a tile share a KV head. For row m and
// key n of the span:
//
//     s[m][n] = cap(scale * sum_d q[m][d] k[n][d]) * log2(e)      -inf where m may not see n
//     top[m] = max_n s[m][n]    p[m][n] = 2^(s[m][n] - top[m])    total[m] = sum_n p[m][n]
//     acc[m][d] = sum_n p[m][n] v[n][d]
//
// Sums over d and, for acc, over n run in order, one fused multiply-add each; total is summed in
// kLanes lanes by the key's place in the span. None of it depends on which rows stand beside m, on
// where its tile begins or on keys that it does not see: so a token has the same bits in a decode
// and in any chunk of a prefill.
#pragma once
#include <algorithm>
#include <vector>

#include "attention.h"
#include "lanes.h"

namespace quire {

constexpr int64_t kSpan = 256;     // keys; a multiple of kLanes
constexpr int64_t kStretch = 32;   // keys whose values are weighed while they are near
#if defined(__AVX512F__)
constexpr int kWide = 2;           // vectors of three rows that registers hold beside the rest
#else
constexpr int kWide = 1;
#endif
constexpr int64_t kTileRows = 32;  // query rows of a tile, unless one token has more heads

// Query rows that stand together: positions rise by one every `group` rows.
struct Tile {
  int64_t rows, group, first_pos;
  int64_t pos(int64_t m) const { return first_pos + m / group; }
};

// Buffers of one thread.
struct Scratch {
  std::vector<float> q, columns, scores, acc, sums, padded;
  std::vector<float> span_acc, span_sums;
  std::vector<const void*> keys, values;
  std::vector<float> zeros;

  void fit(int64_t rows, int64_t dim, int64_t wide) {
    q.resize(rows * dim);
    columns.resize(up(dim, 8) * kLanes);
    scores.resize(rows * kSpan);
    for (auto* of : {&acc, &span_acc}) of->resize(rows * wide);
    for (auto* of : {&sums, &span_sums}) of->resize(2 * rows);
    keys.resize(kSpan + kLanes);  // one group and one stretch more than there are: for prefetches
    values.resize(kSpan + kStretch);
    zeros.assign(dim, 0.0f);
    if (dim != wide) padded.resize(kSpan * wide);
  }
};

inline __m256 load8(const float* from) { return _mm256_loadu_ps(from); }
inline __m256 load8(const bf16* from) {
  return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// out[d][i] = rows[i][d] for sixteen rows. The sixteen behind them are asked for meanwhile, a few
// lines at a time: many at once would hold up everything else.
template <class T>
void as_columns(const void* const* rows, int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + 8 <= dim; d += 8) {
    constexpr int64_t kPerLine = 64 / sizeof(T), steps = kPerLine / 8;
    const int64_t part = d / 8 % steps;
    for (int64_t i = part * kLanes / steps; i < (part + 1) * kLanes / steps; i++) {
      __builtin_prefetch(static_cast<const T*>(rows[kLanes + i]) + d / kPerLine * kPerLine);
    }
    for (int64_t half = 0; half < kLanes; half += 8) {
      __m256 r[8], pairs[8];
      for (int i = 0; i < 8; i++) r[i] = load8(static_cast<const T*>(rows[half + i]) + d);
      for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
      }
      for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
      }
      for (int i = 0; i < 4; i++) {
        float* to = out + (d + i) * kLanes + half;
        _mm256_storeu_ps(to, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(to + 4 * kLanes, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
      }
    }
  }
  for (; d < dim; d++) {
    for (int64_t i = 0; i < kLanes; i++) {
      out[d * kLanes + i] = as_float(static_cast<const T*>(rows[i])[d]);
    }
  }
}

// Scores of R query rows and sixteen keys.
template <int R>
void score(const float* q, int64_t dim, const float* columns, float scale, float softcap,
           float* scores) {
  Lanes s[R];
  for (int r = 0; r < R; r++) s[r] = splat(0.0f);
  for (int64_t d = 0; d < dim; d++) {
    const Lanes k = load(columns + d * kLanes);
    for (int r = 0; r < R; r++) s[r] = fma(splat(q[r * dim + d]), k, s[r]);
  }
  for (int r = 0; r < R; r++) {
    if (softcap > 0.0f) {
      s[r] = splat(softcap * kLog2E) * tanh(s[r] * splat(scale / softcap));
    } else {
      s[r] = s[r] * splat(scale * kLog2E);
    }
    store(scores + r * kSpan, s[r]);
  }
}

// acc[r][..] += p[r][n] v[n][d ..] for R rows, W vectors, keys begin .. end in order. What the next
// stretch needs is asked for.
template <int R, int W, class T>
void weigh(float* acc, int64_t wide, const float* p, const void* const* values, int64_t d,
           int64_t begin, int64_t end) {
  Lanes a[R][W];
  for (int r = 0; r < R; r++) {
    for (int w = 0; w < W; w++) a[r][w] = load(acc + r * wide + d + w * kLanes);
  }
  for (int64_t n = begin; n < end; n++) {
    const T* from = static_cast<const T*>(values[n]) + d;
    const T* later = static_cast<const T*>(values[n + kStretch]) + d;
    for (int64_t i = 0; i < W * kLanes; i += 64 / sizeof(T)) __builtin_prefetch(later + i);
    Lanes v[W];
    for (int w = 0; w < W; w++) v[w] = load(from + w * kLanes);
    for (int r = 0; r < R; r++) {
      const Lanes weight = splat(p[r * kSpan + n]);
      for (int w = 0; w < W; w++) a[r][w] = fma(weight, v[w], a[r][w]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int w = 0; w < W; w++) store(acc + r * wide + d + w * kLanes, a[r][w]);
  }
}

// All of a row's vectors, widest first.
template <int R, int W, class T>
void weigh_row(float* acc, int64_t wide, const float* p, const void* const* values, int64_t begin,
               int64_t end) {
  int64_t d = 0;
  for (; d + W * kLanes <= wide; d += W * kLanes) {
    weigh<R, W, T>(acc, wide, p, values, d, begin, end);
  }
  for (; d < wide; d += kLanes) weigh<R, 1, T>(acc, wide, p, values, d, begin, end);
}

// -inf outside begin .. end of a row's scores, then its weights, top and total.
inline void soften(float* s, int64_t from, int64_t to, int64_t begin, int64_t end, float* sums) {
  for (int64_t n = from; n < std::min(begin, to); n++) s[n] = -kInfinity;
  for (int64_t n = std::max(end, from); n < to; n++) s[n] = -kInfinity;
  Lanes best = splat(-kInfinity);
  for (int64_t n = from; n < to; n += kLanes) best = larger(best, load(s + n));
  const float top = largest(best);
  const Lanes shift = splat(top == -kInfinity ? 0.0f : top);
  Lanes total = splat(0.0f);
  for (int64_t n = from; n < to; n += kLanes) {
    const Lanes p = exp2(load(s + n) - shift);
    total = total + p;
    store(s + n, p);
  }
  sums[0] = top;
  sums[1] = sum(total);
}

// Asks for a row, to be in the second cache when it is read.
template <class T>
inline void fetch(const void* row, int64_t dim) {
  const char* at = static_cast<const char*>(row);
  for (int64_t byte = 0; byte < dim * static_cast<int64_t>(sizeof(T)); byte += 64) {
    __builtin_prefetch(at + byte, 0, 2);
  }
}

// Where the span's keys and values stand; outside begin .. end a row of zeros stands for them, also
// behind the last ones, where only prefetches look.
template <class T>
void locate(const AttentionCall& call, int64_t row, int64_t kv_head, int64_t base, int64_t from,
            int64_t to, int64_t begin, int64_t end, Scratch& scratch) {
  const int32_t* table = call.tables + row * call.table_stride;
  const T* k_head = static_cast<const T*>(call.k_cache) + kv_head * call.cache_head;
  const T* v_head = static_cast<const T*>(call.v_cache) + kv_head * call.cache_head;
  for (int64_t n = from; n < to + kLanes; n++) scratch.keys[n] = scratch.zeros.data();
  for (int64_t n = from; n < begin; n++) scratch.values[n] = scratch.zeros.data();
  for (int64_t n = end; n < end + kStretch; n++) scratch.values[n] = scratch.zeros.data();
  for (int64_t n = begin; n < end;) {
    const int64_t key = base + n, slot = key % call.block_size;
    const int64_t block = table[key / call.block_size];
    const int64_t last = std::min(end, n + call.block_size - slot);
    int64_t place = block * call.cache_block + slot * call.cache_slot;
    for (; n < last; n++, place += call.cache_slot) {
      scratch.keys[n] = k_head + place;
      scratch.values[n] = v_head + place;
    }
  }
}

template <class T>
void weigh_tile(const Tile& tile, const AttentionCall& call, int64_t wide, int64_t base,
                int64_t begin, int64_t end, Scratch& scratch, float* acc) {
  for (int64_t near = begin / kStretch * kStretch; near < end; near += kStretch) {
    const int64_t near_end = std::min(near + kStretch, end);
    for (int64_t m = 0; m < tile.rows;) {
      const int64_t r = std::min<int64_t>(6, tile.rows - m);
      int64_t first = std::max(near, begin);
      if (call.window) first = std::max(first, tile.pos(m) - call.window + 1 - base);
      const int64_t last = std::min(near_end, tile.pos(m + r - 1) + 1 - base);
      if (first < last) {
        const float* p = scratch.scores.data() + m * kSpan;
        const void* const* v = scratch.values.data();
        float* to = acc + m * wide;
        switch (r) {
          case 1: weigh_row<1, 4, T>(to, wide, p, v, first, last); break;
          case 2: weigh_row<2, 2, T>(to, wide, p, v, first, last); break;
          case 3: weigh_row<3, kWide, T>(to, wide, p, v, first, last); break;
          case 4: weigh_row<4, 1, T>(to, wide, p, v, first, last); break;
          case 5: weigh_row<5, 1, T>(to, wide, p, v, first, last); break;
          default: weigh_row<6, 1, T>(to, wide, p, v, first, last); break;
        }
      }
      m += r;
    }
  }
}

inline void score_rows(int64_t r, const float* q, int64_t dim, const float* columns, float scale,
                       float softcap, float* to) {
  switch (r) {
    case 1: score<1>(q, dim, columns, scale, softcap, to); break;
    case 2: score<2>(q, dim, columns, scale, softcap, to); break;
    case 3: score<3>(q, dim, columns, scale, softcap, to); break;
    case 4: score<4>(q, dim, columns, scale, softcap, to); break;
    case 5: score<5>(q, dim, columns, scale, softcap, to); break;
    default: score<6>(q, dim, columns, scale, softcap, to); break;
  }
}

// The tile over keys `span` * kSpan on: acc [rows, wide] and sums [rows, top and total] afresh.
template <class T>
void attend_span(const AttentionCall& call, int64_t row, int64_t kv_head, const Tile& tile,
                 int64_t span, int64_t wide, Scratch& scratch, float* acc, float* sums) {
  const int64_t base = span * kSpan;
  int64_t begin = 0;
  if (call.window) begin = std::max<int64_t>(0, tile.first_pos - call.window + 1 - base);
  const int64_t end = std::min(kSpan, tile.pos(tile.rows - 1) + 1 - base);
  const int64_t from = begin / kLanes * kLanes, to = up(end, kLanes);
  locate<T>(call, row, kv_head, base, from, to, begin, end, scratch);

  for (int64_t n = from; n < to; n += kLanes) {
    // Scoring takes more time than memory needs for the keys: it brings the values meanwhile.
    for (int64_t i = n; i < n + kLanes; i++) fetch<T>(scratch.values[i], call.dim);
    as_columns<T>(scratch.keys.data() + n, call.dim, scratch.columns.data());
    for (int64_t m = 0; m < tile.rows; m += 6) {
      score_rows(tile.rows - m, scratch.q.data() + m * call.dim, call.dim, scratch.columns.data(),
                 call.scale, call.softcap, scratch.scores.data() + m * kSpan + n);
    }
  }
  for (int64_t m = 0; m < tile.rows; m++) {
    int64_t first = begin;
    if (call.window) first = std::max(first, tile.pos(m) - call.window + 1 - base);
    const int64_t last = std::min(end, tile.pos(m) + 1 - base);
    soften(scratch.scores.data() + m * kSpan, from, to, first, last, sums + 2 * m);
  }
  std::fill(acc, acc + tile.rows * wide, 0.0f);
  if (call.dim == wide) {
    weigh_tile<T>(tile, call, wide, base, begin, end, scratch, acc);
    return;
  }
  // A head dim that is no multiple of kLanes: values are copied into rows that are.
  for (int64_t n = begin; n < end; n++) {
    float* row_of = scratch.padded.data() + n * wide;
    const T* value = static_cast<const T*>(scratch.values[n]);
    for (int64_t d = 0; d < wide; d++) row_of[d] = d < call.dim ? as_float(value[d]) : 0.0f;
    scratch.values[n] = row_of;
  }
  weigh_tile<float>(tile, call, wide, base, begin, end, scratch, acc);
}

}  // namespace quire
