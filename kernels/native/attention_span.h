// Attention of a few query rows over one span of at most kSpan keys.
//
// A query row is one query token with one head; the rows of a tile share a KV head. For row m and
// key n of the span:
//
//     s[m][n] = cap(scale * sum_d q[m][d] k[n][d]) * log2(e)      -inf where m may not see n
//     top[m] = max_n s[m][n]    p[m][n] = 2^(s[m][n] - top[m])    total[m] = sum_n p[m][n]
//     acc[m][d] = sum_n p[m][n] v[n][d]
//
// The sum over d is one of four sums, of every fourth d in order, which are added as (0 + 2) +
// (1 + 3): registers hold four neighbours of each of several keys then, as they come from memory.
// The sum of acc runs over n in order. Either is made of fused multiply-adds; total is summed in
// kLanes lanes by the key's place in the span. None of it depends on which rows stand beside m, on
// where its tile begins, on registers' widths or on keys that it does not see: so a token has the
// same bits in a decode and in any chunk of a prefill.
//
// Memory is what a decode waits for, so every key and value is asked for kAhead keys before it is
// used, a few lines at a time: many at once would hold up everything else. It is asked for in the
// order in which it lies in memory, also where the arithmetic takes parts of many values in turn.
#pragma once
#include <algorithm>
#include <vector>

#include "attention.h"
#include "lanes.h"

namespace quire {

constexpr int64_t kSpan = 256;     // keys; a multiple of kLanes
constexpr int64_t kAhead = 32;     // keys; also those whose values are weighed while they are near
constexpr int64_t kTileRows = 48;  // query rows of a tile, unless one token has more heads
constexpr int64_t kAtOnce = kRegister;            // keys that are scored at once
constexpr int kScored = kRegisters == 16 ? 3 : 6;  // query rows likewise
constexpr int kWeighed = 6;                        // query rows that are weighed at once

// Query rows that stand together: positions rise by one every `group` rows.
struct Tile {
  int64_t rows, group, first_pos;
  int64_t pos(int64_t m) const { return first_pos + m / group; }
};

// Buffers of one thread.
struct Scratch {
  std::vector<float> q, quads, scores, acc, sums, padded;
  std::vector<float> span_acc, span_sums;
  std::vector<const void*> keys, values, next;  // `next`: the first keys of what comes after
  std::vector<float> zeros;

  void fit(int64_t rows, int64_t dim, int64_t wide) {
    q.resize(rows * up(dim, 4));
    quads.resize(up(dim, 4) * kAtOnce);
    scores.resize(rows * kSpan);
    for (auto* of : {&acc, &span_acc}) of->resize(rows * wide);
    for (auto* of : {&sums, &span_sums}) of->resize(2 * rows);
    for (auto* of : {&keys, &values}) of->resize(kSpan + kAhead);
    zeros.assign(up(dim, 4), 0.0f);
    next.assign(kAhead, zeros.data());
    if (dim != wide) padded.resize(kSpan * wide);
  }
};

template <class T>
inline void ask(const void* row, int64_t dim) {
  const T* at = static_cast<const T*>(row);
  for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(at + d);
}

// The quads of kAtOnce keys where they stand in the cache.
template <class T>
struct InPlace {
  static constexpr bool kAsks = true;
  const void* const* rows;
  Register at(int64_t d, int c) const { return quads_of<T>(rows + c, d); }
  void ask_ahead(int64_t i, int64_t dim) const { ask<T>(rows[kAhead + i], dim); }
};

// The same, laid side by side for many query rows.
struct Packed {
  static constexpr bool kAsks = false;  // pack has done so
  const float* from;
  Register at(int64_t d, int c) const { return load_register(from + d * kAtOnce + c * kRegister); }
};

template <class T>
void pack(const void* const* rows, int64_t dim, float* out) {
  const InPlace<T> keys{rows};
  int64_t d = 0, asked = 0;
  for (; d + 4 <= dim; d += 4) {
    for (; asked * dim <= d * kAtOnce; asked++) keys.ask_ahead(asked, dim);
    for (int c = 0; c < 4; c++) store_register(out + d * kAtOnce + c * kRegister, keys.at(d, c));
  }
  if (d == dim) return;
  for (int64_t i = 0; i < kAtOnce; i++) {
    float* to = out + d * kAtOnce + i % 4 * kRegister + i / 4 * 4;
    for (int64_t e = 0; e < 4; e++) {
      to[e] = d + e < dim ? as_float(static_cast<const T*>(rows[i])[d + e]) : 0.0f;
    }
  }
}

// Scores of R query rows and kAtOnce keys, times `factor`; `wide` is of q's rows, a multiple of 4.
template <int R, class Keys>
void score(const float* q, int64_t wide, const Keys& keys, float factor, float* scores) {
  Register s[R][4];
  QUIRE_UNROLL for (int r = 0; r < R; r++) {
    QUIRE_UNROLL for (int c = 0; c < 4; c++) s[r][c] = register_of(0.0f);
  }
  int64_t asked = 0;
  _Pragma("GCC unroll 4") for (int64_t d = 0; d < wide; d += 4) {
    if constexpr (Keys::kAsks) {
      for (; asked * wide <= d * kAtOnce; asked++) keys.ask_ahead(asked, wide);
    }
    Register of[R];
    QUIRE_UNROLL for (int r = 0; r < R; r++) of[r] = splat_quad(q + r * wide + d);
    QUIRE_UNROLL for (int c = 0; c < 4; c++) {
      const Register k = keys.at(d, c);
      QUIRE_UNROLL for (int r = 0; r < R; r++) s[r][c] = fma(of[r], k, s[r][c]);
    }
  }
  QUIRE_UNROLL for (int r = 0; r < R; r++) {
    const Register all = sum_quads(s[r][0], s[r][1], s[r][2], s[r][3]);
    store_register(scores + r * kSpan, times(all, register_of(factor)));
  }
}

// Vectors of R rows that registers hold beside what is added to them.
template <int R>
constexpr int at_once() {
  if (kRegisters == 32) return 4;
  return R == 1 ? 8 : R <= 3 ? 4 : 2;
}

// acc[r][..] += p[r][n] v[n][d ..] for R rows, W registers, keys begin .. end in order. Where it is
// to ask for the values kAhead keys later, this share of a row's width asks for as large a share
// of them, one after the other.
template <int R, int W, bool kAsks, class T>
void weigh(float* acc, int64_t wide, const float* p, const void* const* values, int64_t d,
           int64_t begin, int64_t end) {
  Register a[R][W];
  QUIRE_UNROLL for (int r = 0; r < R; r++) {
    const float* from = acc + r * wide + d;
    QUIRE_UNROLL for (int w = 0; w < W; w++) a[r][w] = load_register(from + w * kRegister);
  }
  const int64_t before = d * (end - begin);
  const void* const* asked = values + begin + kAhead + before / wide;
  int64_t part = before % wide;
  for (int64_t n = begin; n < end; n++) {
    const T* from = static_cast<const T*>(values[n]) + d;
    if constexpr (kAsks) {
      const T* later = static_cast<const T*>(*asked) + part;
      for (int64_t i = 0; i < W * kRegister; i += 64 / sizeof(T)) __builtin_prefetch(later + i);
      part += W * kRegister;
      if (part >= wide) part -= wide, asked++;
    }
    if constexpr (R > W) {  // whichever of the two takes fewer registers is held
      Register v[W];
      QUIRE_UNROLL for (int w = 0; w < W; w++) v[w] = load_register(from + w * kRegister);
      QUIRE_UNROLL for (int r = 0; r < R; r++) {
        const Register weight = register_of(p[r * kSpan + n]);
        QUIRE_UNROLL for (int w = 0; w < W; w++) a[r][w] = fma(weight, v[w], a[r][w]);
      }
    } else {
      Register weight[R];
      QUIRE_UNROLL for (int r = 0; r < R; r++) weight[r] = register_of(p[r * kSpan + n]);
      QUIRE_UNROLL for (int w = 0; w < W; w++) {
        const Register v = load_register(from + w * kRegister);
        QUIRE_UNROLL for (int r = 0; r < R; r++) a[r][w] = fma(weight[r], v, a[r][w]);
      }
    }
  }
  QUIRE_UNROLL for (int r = 0; r < R; r++) {
    float* to = acc + r * wide + d;
    QUIRE_UNROLL for (int w = 0; w < W; w++) store_register(to + w * kRegister, a[r][w]);
  }
}

// All of a row's vectors, widest first.
template <int R, bool kAsks, class T>
void weigh_rows(float* acc, int64_t wide, const float* p, const void* const* values, int64_t begin,
                int64_t end) {
  constexpr int W = at_once<R>(), kLeast = kLanes / kRegister;
  int64_t d = 0;
  for (; d + W * kRegister <= wide; d += W * kRegister) {
    weigh<R, W, kAsks, T>(acc, wide, p, values, d, begin, end);
  }
  for (; d < wide; d += kLanes) {
    weigh<R, kLeast, kAsks, T>(acc, wide, p, values, d, begin, end);
  }
}

template <bool kAsks, class T>
void weigh_any(int64_t rows, float* acc, int64_t wide, const float* p, const void* const* values,
               int64_t begin, int64_t end) {
  switch (rows) {
    case 1: weigh_rows<1, kAsks, T>(acc, wide, p, values, begin, end); break;
    case 2: weigh_rows<2, kAsks, T>(acc, wide, p, values, begin, end); break;
    case 3: weigh_rows<3, kAsks, T>(acc, wide, p, values, begin, end); break;
    case 4: weigh_rows<4, kAsks, T>(acc, wide, p, values, begin, end); break;
    case 5: weigh_rows<5, kAsks, T>(acc, wide, p, values, begin, end); break;
    default: weigh_rows<6, kAsks, T>(acc, wide, p, values, begin, end); break;
  }
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

// out[n] for keys begin .. end of a span: where their rows stand in one of the caches, of which
// `head` is the row's KV head.
template <class T>
void place(const AttentionCall& call, int64_t row, const T* head, int64_t base, int64_t begin,
           int64_t end, const void** out) {
  const int32_t* table = call.tables + row * call.table_stride;
  for (int64_t n = begin; n < end;) {
    const int64_t key = base + n, slot = key % call.block_size;
    const int64_t block = table[key / call.block_size];
    const int64_t last = std::min(end, n + call.block_size - slot);
    const T* at = head + block * call.cache_block + slot * call.cache_slot;
    for (; n < last; n++, at += call.cache_slot) out[n] = at;
  }
}

template <class T>
const T* head_of(const AttentionCall& call, const void* cache, int64_t kv_head) {
  return static_cast<const T*>(cache) + kv_head * call.cache_head;
}

// Where the span's keys and values stand; outside begin .. end a row of zeros stands for them.
// Behind the last ones, where it is only asked for them, follow the first values, and the first
// keys of what comes next.
template <class T>
void locate(const AttentionCall& call, int64_t row, int64_t kv_head, int64_t base, int64_t from,
            int64_t to, int64_t begin, int64_t end, Scratch& scratch) {
  const void *zeros = scratch.zeros.data(), **keys = scratch.keys.data();
  const void** values = scratch.values.data();
  std::fill(keys + from, keys + begin, zeros);
  std::fill(values + from, values + begin, zeros);
  place<T>(call, row, head_of<T>(call, call.k_cache, kv_head), base, begin, end, keys);
  place<T>(call, row, head_of<T>(call, call.v_cache, kv_head), base, begin, end, values);
  std::fill(keys + end, keys + to, zeros);
  std::copy(scratch.next.begin(), scratch.next.end(), values + end);
  std::copy(values + begin, values + begin + kAhead, keys + to);
}

template <class T>
void weigh_tile(const Tile& tile, const AttentionCall& call, int64_t wide, int64_t base,
                int64_t begin, int64_t end, Scratch& scratch, float* acc) {
  for (int64_t near = begin / kAhead * kAhead; near < end; near += kAhead) {
    const int64_t near_end = std::min(near + kAhead, end);
    for (int64_t m = 0; m < tile.rows; m += kWeighed) {
      const int64_t r = std::min<int64_t>(kWeighed, tile.rows - m);
      int64_t first = std::max(near, begin);
      if (call.window) first = std::max(first, tile.pos(m) - call.window + 1 - base);
      const int64_t last = std::min(near_end, tile.pos(m + r - 1) + 1 - base);
      if (first >= last) continue;
      const float* p = scratch.scores.data() + m * kSpan;
      const void* const* v = scratch.values.data();
      float* to = acc + m * wide;
      if (m == 0) {  // the other rows find the values near
        weigh_any<true, T>(r, to, wide, p, v, first, last);
      } else {
        weigh_any<false, T>(r, to, wide, p, v, first, last);
      }
    }
  }
}

template <class Keys>
void score_rows(int64_t rows, const float* q, int64_t wide, const Keys& keys, float factor,
                float* to) {
  for (; rows > 0; rows -= kScored, q += kScored * wide, to += kScored * kSpan) {
    switch (std::min<int64_t>(rows, kScored)) {
      case 1: score<1>(q, wide, keys, factor, to); break;
      case 2: score<2>(q, wide, keys, factor, to); break;
      case 3: score<3>(q, wide, keys, factor, to); break;
#if defined(__AVX512F__)
      case 4: score<4>(q, wide, keys, factor, to); break;
      case 5: score<5>(q, wide, keys, factor, to); break;
      case 6: score<6>(q, wide, keys, factor, to); break;
#endif
      default: __builtin_unreachable();
    }
  }
}

// Scores of the tile and keys from .. to, not yet capped.
template <class T>
void score_tile(const Tile& tile, int64_t dim, float factor, int64_t from, int64_t to,
                Scratch& scratch) {
  const int64_t wide = up(dim, 4);
  const float* q = scratch.q.data();
  for (int64_t n = from; n < to; n += kAtOnce) {
    const void* const* rows = scratch.keys.data() + n;
    float* scores = scratch.scores.data() + n;
    if (tile.rows <= kScored && dim == wide) {
      score_rows(tile.rows, q, wide, InPlace<T>{rows}, factor, scores);
    } else {
      pack<T>(rows, dim, scratch.quads.data());
      score_rows(tile.rows, q, wide, Packed{scratch.quads.data()}, factor, scores);
    }
  }
}

inline void cap(float* s, int64_t from, int64_t to, float softcap) {
  for (int64_t n = from; n < to; n += kLanes) {
    store(s + n, splat(softcap * kLog2E) * tanh(load(s + n)));
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
  const bool capped = call.softcap > 0.0f;
  score_tile<T>(tile, call.dim, capped ? call.scale / call.softcap : call.scale * kLog2E, from, to,
                scratch);
  for (int64_t m = 0; m < tile.rows; m++) {
    float* scores = scratch.scores.data() + m * kSpan;
    if (capped) cap(scores, from, to, call.softcap);
    int64_t first = begin;
    if (call.window) first = std::max(first, tile.pos(m) - call.window + 1 - base);
    const int64_t last = std::min(end, tile.pos(m) + 1 - base);
    soften(scores, from, to, first, last, sums + 2 * m);
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
