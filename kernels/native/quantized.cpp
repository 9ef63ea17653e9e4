// Linear layers over weights of 8 or 4 bits: out[m][n] = bias[n] + sum_k x[m][k] w[n][k].
//
// Weights stand in panels of kLanes columns, as in linear.cpp, each panel in one piece:
//   8 bits  scale as float [kLanes], then levels as int8 [k][kLanes];  w = scale q
//   4 bits  for each kGroup of k: scale and least as bf16 [kLanes], then levels as words
//           [kGroup / 8][kLanes] of eight along k, the first in the lowest bits;
//           w = scale q + least
// The sum over k runs in order, one fused multiply-add each, for every m and n alone. The scale
// comes last, with 4 bits after each group, and with it `least` times the sum of the group's x. So
// a row has the same bits whatever the batch. Levels become floats in registers, once for up to
// kMostRows rows: no other copy of the weights is needed, however many rows there are. Torch twin:
// kernels.quantization.
#include <algorithm>
#include <vector>

#include "lanes.h"
#include "pool.h"

#define QUIRE_INLINE __attribute__((always_inline)) inline

namespace quire {

struct QuantizedCall {
  void* out;      // [rows, columns]
  const void* x;  // [rows, depth]
  const uint8_t* packed;
  const float* bias;  // [columns] or null
  int64_t rows, columns, depth;
  int64_t out_row, x_row;  // strides in elements
  int64_t x_is_bf16;       // also of out
  int64_t bits;            // 8, or 4 where depth is a multiple of kGroup
};

namespace {

#if defined(__AVX512F__)
constexpr int kMostRows = 12;
#else
constexpr int kMostRows = 6;
#endif
// As in linear.cpp, which says why.
constexpr int64_t kPanelsOfUnit = 2, kRowsOfUnit = 48;
constexpr int64_t kAhead = 1024;  // bytes
constexpr int64_t kLine = 64;     // bytes of a cache line
constexpr int64_t kGroup = 32, kOfWord = 8;
constexpr int64_t kGroupHead = 2 * kLanes * sizeof(bf16);
constexpr int64_t kGroupBytes = kGroupHead + kGroup * kLanes / 2;

inline void ask(const void* at) { __builtin_prefetch(static_cast<const char*>(at) + kAhead); }

#if defined(__AVX512F__)
struct Words {
  __m512i all;
};
inline Words words_at(const uint8_t* from) { return {_mm512_loadu_si512(from)}; }

// The level at `place`, 0 .. 7, of each word.
inline Lanes level(Words words, int place) {
  const __m512i low = _mm512_srli_epi32(words.all, 4 * place);
  return {_mm512_cvtepi32_ps(_mm512_and_si512(low, _mm512_set1_epi32(15)))};
}

inline Lanes levels_at(const uint8_t* from) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
}
#else
struct Words {
  __m256i low, high;
};
inline Words words_at(const uint8_t* from) {
  const __m256i* parts = reinterpret_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(parts), _mm256_loadu_si256(parts + 1)};
}

inline __m256 level(__m256i words, int place) {
  const __m256i low = _mm256_srli_epi32(words, 4 * place);
  return _mm256_cvtepi32_ps(_mm256_and_si256(low, _mm256_set1_epi32(15)));
}
// The level at `place`, 0 .. 7, of each word.
inline Lanes level(Words words, int place) {
  return {level(words.low, place), level(words.high, place)};
}

inline __m256 eight_levels_at(const uint8_t* from) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}
inline Lanes levels_at(const uint8_t* from) {
  return {eight_levels_at(from), eight_levels_at(from + 8)};
}
#endif

struct Inputs {
  const float* x;  // [rows, depth]
  int64_t row;     // its stride
  const float* sums;  // [rows, groups], of the x of each group; null for 8 bits
  int64_t groups;
};

struct Bytes {
  static int64_t panel_bytes(int64_t depth) {
    return kLanes * (static_cast<int64_t>(sizeof(float)) + depth);
  }

  // One column of P panels times one number of each of R rows.
  template <int R, int P>
  static QUIRE_INLINE void step(const float* x, int64_t row, const uint8_t* at, int64_t panel,
                                Lanes (&sum)[R][P]) {
    QUIRE_UNROLL
    for (int p = 0; p < P; p++) {
      const Lanes q = levels_at(at + p * panel);
      QUIRE_UNROLL
      for (int r = 0; r < R; r++) sum[r][p] = fma(splat(x[r * row]), q, sum[r][p]);
    }
  }

  // R rows from m on by P panels.
  template <int R, int P>
  static QUIRE_INLINE void sum_up(const Inputs& in, int64_t m, int64_t depth, const uint8_t* panels,
                                  Lanes (&sum)[R][P]) {
    constexpr int64_t kSteps = kLine / kLanes;  // of one line of a panel
    const int64_t panel = panel_bytes(depth), row = in.row;
    const float* x = in.x + m * row;
    const uint8_t* levels = panels + kLanes * sizeof(float);
    QUIRE_UNROLL
    for (int r = 0; r < R; r++) {
      QUIRE_UNROLL
      for (int p = 0; p < P; p++) sum[r][p] = splat(0.0f);
    }
    int64_t k = 0;
    for (; k + kSteps <= depth; k += kSteps) {
      QUIRE_UNROLL
      for (int p = 0; p < P; p++) ask(levels + p * panel + k * kLanes);
      QUIRE_UNROLL
      for (int64_t i = 0; i < kSteps; i++) {
        step<R, P>(x + k + i, row, levels + (k + i) * kLanes, panel, sum);
      }
    }
    for (; k < depth; k++) step<R, P>(x + k, row, levels + k * kLanes, panel, sum);
    QUIRE_UNROLL
    for (int p = 0; p < P; p++) {
      const Lanes scale = load(reinterpret_cast<const float*>(panels + p * panel));
      QUIRE_UNROLL
      for (int r = 0; r < R; r++) sum[r][p] = sum[r][p] * scale;
    }
  }
};

struct Nibbles {
  static int64_t panel_bytes(int64_t depth) { return depth / kGroup * kGroupBytes; }

  // One group, without scale and least.
  template <int R, int P>
  static QUIRE_INLINE void group(const float* x, int64_t row, const uint8_t* at, int64_t panel,
                                 Lanes (&part)[R][P]) {
    for (int64_t word = 0; word < kGroup / kOfWord; word++) {
      const uint8_t* words = at + kGroupHead + word * kLanes * sizeof(uint32_t);
      QUIRE_UNROLL
      for (int i = 0; i < kOfWord; i++) {
        QUIRE_UNROLL
        for (int p = 0; p < P; p++) {
          const Lanes q = level(words_at(words + p * panel), i);
          QUIRE_UNROLL
          for (int r = 0; r < R; r++) {
            part[r][p] = fma(splat(x[r * row + word * kOfWord + i]), q, part[r][p]);
          }
        }
      }
    }
  }

  template <int R, int P>
  static QUIRE_INLINE void sum_up(const Inputs& in, int64_t m, int64_t depth, const uint8_t* panels,
                                  Lanes (&sum)[R][P]) {
    const int64_t panel = panel_bytes(depth);
    for (int r = 0; r < R; r++) {
      for (int p = 0; p < P; p++) sum[r][p] = splat(0.0f);
    }
    for (int64_t g = 0; g < in.groups; g++) {
      const uint8_t* at = panels + g * kGroupBytes;
      for (int p = 0; p < P; p++) {
        for (int64_t line = 0; line < kGroupBytes; line += kLine) ask(at + p * panel + line);
      }
      Lanes part[R][P];
      QUIRE_UNROLL
      for (int r = 0; r < R; r++) {
        QUIRE_UNROLL
        for (int p = 0; p < P; p++) part[r][p] = splat(0.0f);
      }
      group<R, P>(in.x + m * in.row + g * kGroup, in.row, at, panel, part);
      QUIRE_UNROLL
      for (int p = 0; p < P; p++) {
        const bf16* head = reinterpret_cast<const bf16*>(at + p * panel);
        const Lanes scale = load(head), least = load(head + kLanes);
        QUIRE_UNROLL
        for (int r = 0; r < R; r++) {
          const Lanes low = splat(in.sums[(m + r) * in.groups + g]);
          sum[r][p] = fma(part[r][p], scale, fma(low, least, sum[r][p]));
        }
      }
    }
  }
};

// The first `count` lanes of a row of the result.
template <class Out>
inline void put_lanes(const QuantizedCall& call, int64_t m, int64_t first, int64_t count, Lanes y) {
  Out* to = static_cast<Out*>(call.out) + m * call.out_row + first;
  if (count == kLanes) {
    store(to, y);
  } else {
    store_first(to, y, count);
  }
}

template <class Kind, int R, int P>
void tile(const QuantizedCall& call, const Inputs& in, int64_t m, int64_t panel) {
  Lanes sum[R][P];
  const uint8_t* panels = call.packed + panel * Kind::panel_bytes(call.depth);
  Kind::template sum_up<R, P>(in, m, call.depth, panels, sum);
  QUIRE_UNROLL
  for (int p = 0; p < P; p++) {
    const int64_t first = (panel + p) * kLanes, count = std::min(kLanes, call.columns - first);
    Lanes bias = splat(0.0f);
    if (call.bias != nullptr) {
      const float* from = call.bias + first;
      bias = count == kLanes ? load(from) : load_first(from, count);
    }
    QUIRE_UNROLL
    for (int r = 0; r < R; r++) {
      const Lanes y = call.bias == nullptr ? sum[r][p] : sum[r][p] + bias;
      if (call.x_is_bf16) {
        put_lanes<bf16>(call, m + r, first, count, y);
      } else {
        put_lanes<float>(call, m + r, first, count, y);
      }
    }
  }
}

// As many rows as the sums of P panels leave registers for.
template <int P>
constexpr int most_rows() {
  return P == 1 || kMostRows > 6 ? kMostRows : kMostRows / 2;
}

// Rows m .. end in tiles of about one size, by the P panels from `panel` on.
template <class Kind, int P>
void tiles(const QuantizedCall& call, const Inputs& in, int64_t m, int64_t end, int64_t panel) {
  constexpr int kMost = most_rows<P>();
  for (int64_t left = (end - m + kMost - 1) / kMost; m < end; left--) {
    const int64_t rows = (end - m + left - 1) / left;
#define QUIRE_TILE(R)                                              \
  case R:                                                          \
    if constexpr (R <= kMost) tile<Kind, R, P>(call, in, m, panel); \
    break
    switch (rows) {
      QUIRE_TILE(1);
      QUIRE_TILE(2);
      QUIRE_TILE(3);
      QUIRE_TILE(4);
      QUIRE_TILE(5);
      QUIRE_TILE(6);
#if defined(__AVX512F__)
      QUIRE_TILE(7);
      QUIRE_TILE(8);
      QUIRE_TILE(9);
      QUIRE_TILE(10);
      QUIRE_TILE(11);
      QUIRE_TILE(12);
#endif
      default: break;
    }
#undef QUIRE_TILE
    m += rows;
  }
}

template <class Kind>
void run(const QuantizedCall& call, const Inputs& in) {
  const int64_t panels = (call.columns + kLanes - 1) / kLanes;
  const int64_t units = (panels + kPanelsOfUnit - 1) / kPanelsOfUnit;
  const int64_t blocks = (call.rows + kRowsOfUnit - 1) / kRowsOfUnit;
  const int64_t row_tiles = (call.rows + kMostRows - 1) / kMostRows;
  const auto row_of = [&](int64_t block) {  // its first one: blocks are of whole tiles
    return std::min(row_tiles * block / blocks * kMostRows, call.rows);
  };
  // Registers hold kMostRows * 2 sums with AVX2: many rows go panel by panel, few by two.
  const bool together = kMostRows > 6 || call.rows <= most_rows<2>();
  // All rows of one unit's panels, then the next ones: weights come from memory once.
  for_units(units * blocks, [&](int64_t unit) {
    const int64_t first = row_of(unit % blocks), last = row_of(unit % blocks + 1);
    int64_t panel = unit / blocks * kPanelsOfUnit;
    const int64_t end = std::min(panel + kPanelsOfUnit, panels);
    if (together) {
      for (; panel + 2 <= end; panel += 2) tiles<Kind, 2>(call, in, first, last, panel);
    }
    for (; panel < end; panel++) tiles<Kind, 1>(call, in, first, last, panel);
  });
}

void widen_row(const bf16* from, float* to, int64_t depth) {
  int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) store(to + k, load(from + k));
  for (; k < depth; k++) to[k] = as_float(from[k]);
}

// The rows as floats with the sums of their groups, in memory that is kept.
Inputs inputs_of(const QuantizedCall& call) {
  thread_local std::vector<float> kept, kept_sums;
  Inputs in{static_cast<const float*>(call.x), call.x_row, nullptr, 0};
  if (call.bits == 4) in.groups = call.depth / kGroup;
  float *floats = nullptr, *sums = nullptr;  // the helpers have a `kept` of their own
  const auto at_least = [](std::vector<float>& numbers, int64_t count) {
    if (static_cast<int64_t>(numbers.size()) < count) numbers.resize(count);
    return numbers.data();
  };
  if (call.x_is_bf16) {
    in.x = floats = at_least(kept, call.rows * call.depth);
    in.row = call.depth;
  }
  if (in.groups > 0) in.sums = sums = at_least(kept_sums, call.rows * in.groups);
  if (floats == nullptr && sums == nullptr) return in;
  for_units((call.rows + kRowsOfUnit - 1) / kRowsOfUnit, [&](int64_t unit) {
    const int64_t end = std::min((unit + 1) * kRowsOfUnit, call.rows);
    for (int64_t row = unit * kRowsOfUnit; row < end; row++) {
      if (floats != nullptr) {
        const bf16* from = static_cast<const bf16*>(call.x) + row * call.x_row;
        widen_row(from, floats + row * call.depth, call.depth);
      }
      const float* x = in.x + row * in.row;
      for (int64_t g = 0; g < in.groups; g++) {
        sums[row * in.groups + g] = sum(load(x + g * kGroup) + load(x + g * kGroup + kLanes));
      }
    }
  });
  return in;
}

}  // namespace
}  // namespace quire

// 0; 1 when there is no kernel for such weights.
QUIRE_EXPORT int64_t quire_quantized(const quire::QuantizedCall* call) {
  using namespace quire;
  if (call->bits == 8) {
    if (call->rows > 0) run<Bytes>(*call, inputs_of(*call));
    return 0;
  }
  if (call->bits != 4 || call->depth % kGroup) return 1;
  if (call->rows > 0) run<Nibbles>(*call, inputs_of(*call));
  return 0;
}
