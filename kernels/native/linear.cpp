// Linear layers over packed weights: out[m][n] = bias[n] + sum_k x[m][k] w[n][k].
//
// Weights stand in panels of kLanes columns, [panel][k][kLanes], so that one column of a panel is
// one vector (as bf16 pairs: [panel][k / 2][kLanes][2]; as bf16 halves the columns of a step stand as
// 0, 8, 1, 9, .., 15). The sum over k runs in order, one fused multiply-add each, for every m and n
// alone: a row has the same bits whatever the batch. Weights that bf16 holds exactly are kept in
// bf16 also where the arithmetic is fp32: half the memory to read, the same numbers. Torch twin:
// kernels.reference.linear.
#include <algorithm>
#include <vector>

#include "lanes.h"
#include "pool.h"

namespace quire {

struct LinearCall {
  void* out;         // [rows, columns]
  const void* x;     // [rows, depth]
  const void* packed;
  const float* bias;  // [columns] or null
  int64_t rows, columns, depth;
  int64_t out_row, x_row;  // strides in elements
  int64_t x_is_bf16;       // also of out
  int64_t packed_kind;     // 0: fp32, 1: bf16, 2: bf16 pairs, 3: bf16 halves
};

namespace {

#if defined(__AVX512F__)
constexpr int kMostRows = 12, kPanelsTogether = 2;
#else
constexpr int kMostRows = 6, kPanelsTogether = 2;
#endif
// What one thread takes at a time: small, so that at many rows too the last one to finish is not
// waited for long, and rows that stay near while the panels pass.
constexpr int64_t kPanelsOfUnit = 2, kRowsOfUnit = 48;
constexpr int64_t kAhead = 1024;  // bytes of a panel that are asked for before they are used

// What is asked for while a tile is computed: a place that moves on at every step. The first tile
// of rows asks for its own panel, the others for a share each of the panel that this thread will
// probably take next, so that no tile has to wait for as many bytes as memory gives to all cores.
struct Ahead {
  const char* at;
  int64_t step;
  void ask() {
    __builtin_prefetch(at);
    at += step;
  }
};

// A step of a panel, and one number of each row times it.
template <class W>
struct Plain {
  using Weight = W;
  using Input = float;
  static constexpr int64_t kDepth = 1;  // inputs that one step takes
  static Lanes weights(const Weight* w) { return load(w); }
  static Lanes step(Lanes w, const Input* x, Lanes sum) { return fma(splat(*x), w, sum); }
};

#if defined(__AVX512F__)
constexpr int64_t kBf16Kind = 1;
using Bf16 = Plain<bf16>;
#else
// One register holds all columns of a step, two in each of its numbers: a shift and a mask make
// floats of them. Widening neighbours takes two shuffles more: 2 % of six rows, 5 % of 16 to 32.
constexpr int64_t kBf16Kind = 3;
struct Bf16 : Plain<bf16> {
  static Lanes weights(const bf16* w) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
    const __m256i high = _mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16)), _mm256_castsi256_ps(high)};
  }
};
#endif

#if defined(__AVX512BF16__)
// Two inputs at once, multiplied and added by the bf16 unit.
struct Pairs {
  using Weight = bf16;
  using Input = bf16;
  static constexpr int64_t kDepth = 2;
  static __m512i weights(const Weight* w) { return _mm512_loadu_si512(w); }
  static Lanes step(__m512i w, const Input* x, Lanes sum) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof(pair));
    const __m512i both = _mm512_set1_epi32(pair);
    return {_mm512_dpbf16_ps(sum.all, reinterpret_cast<__m512bh>(both),
                             reinterpret_cast<__m512bh>(w))};
  }
};
#endif

// R rows by P panels.
template <class Kind, int R, int P, class Out>
void tile(const LinearCall& call, const typename Kind::Input* x, int64_t x_row,
          const typename Kind::Weight* panels, int64_t panel_size, int64_t column, Out* out,
          Ahead ahead) {
  Lanes sum[R][P];
  QUIRE_UNROLL
  for (int r = 0; r < R; r++) {
    QUIRE_UNROLL
    for (int p = 0; p < P; p++) sum[r][p] = splat(0.0f);
  }
  constexpr int64_t kStep = kLanes * Kind::kDepth;
  const int64_t steps = panel_size / kStep;
  const int64_t apart = panel_size * sizeof(typename Kind::Weight);
  for (int64_t k = 0; k < steps; k++) {
    QUIRE_UNROLL
    for (int p = 1; p < P; p++) __builtin_prefetch(ahead.at + p * apart);
    ahead.ask();
    QUIRE_UNROLL
    for (int p = 0; p < P; p++) {
      const auto w = Kind::weights(panels + p * panel_size + k * kStep);
      QUIRE_UNROLL
      for (int r = 0; r < R; r++) {
        sum[r][p] = Kind::step(w, x + r * x_row + k * Kind::kDepth, sum[r][p]);
      }
    }
  }
  QUIRE_UNROLL
  for (int p = 0; p < P; p++) {
    const int64_t first = column + p * kLanes, count = std::min(kLanes, call.columns - first);
    QUIRE_UNROLL
    for (int r = 0; r < R; r++) {
      Lanes y = sum[r][p];
      Out* to = out + r * call.out_row + first;
      if (count == kLanes) {
        store(to, call.bias == nullptr ? y : y + load(call.bias + first));
      } else {
        if (call.bias != nullptr) y = y + load_first(call.bias + first, count);
        store_first(to, y, count);
      }
    }
  }
}

// Rows m .. end in tiles of about one size.
template <class Kind, int P, class Out>
void rows_of(const LinearCall& call, const typename Kind::Input* x, int64_t x_row,
             const typename Kind::Weight* panels, int64_t panel_size, int64_t column, Out* out,
             int64_t m, int64_t end, const typename Kind::Weight* next) {
  constexpr int64_t kStepBytes = kLanes * Kind::kDepth * sizeof(typename Kind::Weight);
  int64_t tiles = (end - m + kMostRows - 1) / kMostRows;
  const int64_t share = tiles > 1 ? (kStepBytes + tiles - 2) / (tiles - 1) : 0;
  const int64_t share_bytes = share * (panel_size / (kLanes * Kind::kDepth));
  Ahead ahead{reinterpret_cast<const char*>(panels) + kAhead, kStepBytes};
  const char* later = reinterpret_cast<const char*>(next);
  for (; m < end; tiles--) {
    const int64_t rows = (end - m + tiles - 1) / tiles;
    const auto* from = x + m * x_row;
    Out* to = out + m * call.out_row;
#define QUIRE_TILE(R)                                                                 \
  case R:                                                                             \
    tile<Kind, R, P>(call, from, x_row, panels, panel_size, column, to, ahead);       \
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
    ahead = {later, share};
    later += share_bytes;
  }
}

template <class Kind, class Out>
void run(const LinearCall& call, const typename Kind::Input* x, int64_t x_row) {
  using Weight = typename Kind::Weight;
  const Weight* packed = static_cast<const Weight*>(call.packed);
  const int64_t panel_size = up(call.depth, Kind::kDepth) * kLanes;
  const int64_t panels = (call.columns + kLanes - 1) / kLanes;
  const int64_t groups = (panels + kPanelsOfUnit - 1) / kPanelsOfUnit;
  const int64_t blocks = (call.rows + kRowsOfUnit - 1) / kRowsOfUnit;
  const int64_t tiles = (call.rows + kMostRows - 1) / kMostRows;
  const auto row_of = [&](int64_t block) {  // its first one: blocks are of whole tiles
    return std::min(tiles * block / blocks * kMostRows, call.rows);
  };
  // Registers hold kMostRows * 2 sums with AVX2: many rows go panel by panel, few by two.
  const bool together = call.rows <= 3 || kMostRows > 6;
  Out* out = static_cast<Out*>(call.out);
  const int64_t threads = num_threads();
  // All rows of one group of panels, then the next group: weights come from memory once.
  for_units(groups * blocks, [&](int64_t unit) {
    const int64_t first = row_of(unit % blocks), last = row_of(unit % blocks + 1);
    int64_t panel = unit / blocks * kPanelsOfUnit;
    const int64_t end = std::min(panel + kPanelsOfUnit, panels);
    // Asking for what is behind the last panel does no harm.
    const int64_t ahead = (unit + threads) / blocks * kPanelsOfUnit - panel;
    if (together) {
      for (; panel + 2 <= end; panel += 2) {
        const Weight* from = packed + panel * panel_size;
        rows_of<Kind, 2>(call, x, x_row, from, panel_size, panel * kLanes, out, first, last,
                         from + ahead * panel_size);
      }
    }
    for (; panel < end; panel++) {
      const Weight* from = packed + panel * panel_size;
      rows_of<Kind, 1>(call, x, x_row, from, panel_size, panel * kLanes, out, first, last,
                       from + ahead * panel_size);
    }
  });
}

// The rows as fp32, in memory that is kept.
const float* as_floats(const LinearCall& call) {
  thread_local std::vector<float> kept;
  if (static_cast<int64_t>(kept.size()) < call.rows * call.depth) {
    kept.resize(call.rows * call.depth);
  }
  float* const floats = kept.data();  // the helpers have a `kept` of their own
  for_units((call.rows + kRowsOfUnit - 1) / kRowsOfUnit, [&](int64_t unit) {
    const int64_t end = std::min((unit + 1) * kRowsOfUnit, call.rows);
    for (int64_t row = unit * kRowsOfUnit; row < end; row++) {
      const bf16* from = static_cast<const bf16*>(call.x) + row * call.x_row;
      float* to = floats + row * call.depth;
      int64_t k = 0;
      for (; k + kLanes <= call.depth; k += kLanes) store(to + k, load(from + k));
      for (; k < call.depth; k++) to[k] = as_float(from[k]);
    }
  });
  return floats;
}

}  // namespace
}  // namespace quire

// 0; 1 when this build can't multiply weights of that kind.
QUIRE_EXPORT int64_t quire_linear(const quire::LinearCall* call) {
  using namespace quire;
  if (call->rows == 0) return 0;
  if (call->packed_kind == 2) {
#if defined(__AVX512BF16__)
    if (!call->x_is_bf16 || call->depth % 2) return 1;
    run<Pairs, bf16>(*call, static_cast<const bf16*>(call->x), call->x_row);
    return 0;
#else
    return 1;
#endif
  }
  if (call->x_is_bf16) {
    if (call->packed_kind != kBf16Kind) return 1;
    run<Bf16, bf16>(*call, as_floats(*call), call->depth);
  } else if (call->packed_kind == kBf16Kind) {
    run<Bf16, float>(*call, static_cast<const float*>(call->x), call->x_row);
  } else if (call->packed_kind == 0) {
    run<Plain<float>, float>(*call, static_cast<const float*>(call->x), call->x_row);
  } else {
    return 1;
  }
  return 0;
}

// The kind of weights held in bf16 that this build multiplies with fp32 inputs, and with any that
// are no pairs.
QUIRE_EXPORT int64_t quire_bf16_kind() { return quire::kBf16Kind; }

// Whether this build multiplies bf16 pairs: the best kind for bf16 inputs.
QUIRE_EXPORT int64_t quire_takes_pairs() {
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}
