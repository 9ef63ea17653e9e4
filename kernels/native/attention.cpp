// Paged attention over the blocks of the KV cache: decodes, prefill chunks and mixed steps shared
// out at once. Torch twin: kernels.reference.paged_attention.
//
// The keys of a row are cut into spans at multiples of kSpan (attention_span.h). A unit of work is
// one span of a row with a single query token, or all spans of a tile of query tokens; a unit is of
// one KV head. Spans join in order:
//
//     top = max(top, top')  acc = acc 2^(top_old - top) + acc' 2^(top' - top)  likewise total
//
// for a decode by the thread that ends its last span, so that the arithmetic does not depend on
// threads.
#include "attention.h"

#include <atomic>
#include <memory>

#include "attention_span.h"
#include "pool.h"

namespace quire {
namespace {

struct Unit {
  int64_t row, kv_head, first_token, num_tokens;  // tokens of the row's query
  int64_t span, num_spans;  // num_spans 0: all spans of the tile
  int64_t part, join;       // where a split decode leaves its part, and its count of open spans
};

int64_t begin_key(const AttentionCall& call, int64_t first_pos) {
  return call.window ? std::max<int64_t>(0, first_pos - call.window + 1) : 0;
}

// acc and sums of a span into those of the spans before it.
void join(int64_t rows, int64_t wide, float* acc, float* sums, const float* more_acc,
          const float* more_sums) {
  for (int64_t m = 0; m < rows; m++) {
    const float top = sums[2 * m], other = more_sums[2 * m];
    if (other == -kInfinity) continue;  // nothing of it was attended
    const float best = top > other ? top : other;
    const float keep = top == -kInfinity ? 0.0f : exp2(top - best), add = exp2(other - best);
    sums[2 * m] = best;
    sums[2 * m + 1] = sums[2 * m + 1] * keep + more_sums[2 * m + 1] * add;
    for (int64_t d = 0; d < wide; d += kLanes) {
      float* to = acc + m * wide + d;
      store(to, fma(load(more_acc + m * wide + d), splat(add), load(to) * splat(keep)));
    }
  }
}

template <class T>
void finish(const AttentionCall& call, const Unit& unit, int64_t group, int64_t wide,
            const float* acc, const float* sums) {
  const int64_t first = call.starts[unit.row] + unit.first_token;
  for (int64_t m = 0; m < unit.num_tokens * group; m++) {
    const int64_t head = unit.kv_head * group + m % group;
    float total = sums[2 * m + 1], factor = 1.0f;
    if (call.sinks != nullptr) {
      const float sink = call.sinks[head] * kLog2E;
      const float best = sums[2 * m] > sink ? sums[2 * m] : sink;
      factor = sums[2 * m] == -kInfinity ? 0.0f : exp2(sums[2 * m] - best);
      total = total * factor + exp2(sink - best);
    }
    const Lanes by = splat(factor), under = splat(total == 0.0f ? 1.0f : total);
    T* to = static_cast<T*>(call.out) + (first + m / group) * call.out_token +
            head * call.out_head;
    for (int64_t d = 0; d < call.dim; d += kLanes) {
      const Lanes y = load(acc + m * wide + d) * by / under;
      if (d + kLanes <= call.dim) {
        store(to + d, y);
      } else {
        store_first(to + d, y, call.dim - d);
      }
    }
  }
}

// Rows of a multiple of four, with zeros behind.
template <class T>
void gather_queries(const AttentionCall& call, const Unit& unit, int64_t group, float* q) {
  const int64_t first = call.starts[unit.row] + unit.first_token, wide = up(call.dim, 4);
  for (int64_t m = 0; m < unit.num_tokens * group; m++) {
    const T* from = static_cast<const T*>(call.q) + (first + m / group) * call.q_token +
                    (unit.kv_head * group + m % group) * call.q_head;
    for (int64_t d = 0; d < call.dim; d++) q[m * wide + d] = as_float(from[d]);
    std::fill(q + m * wide + call.dim, q + (m + 1) * wide, 0.0f);
  }
}

// What a call needs besides its arguments; kept between calls.
struct Plan {
  std::vector<Unit> units;
  std::vector<float> parts;  // per unit of a split decode: acc [group, wide], sums [group, 2]
  std::unique_ptr<std::atomic<int>[]> open;
  int64_t num_open = 0, room = 0;
};

// Where the first keys of a decode's unit stand, to be asked for while what comes before it ends.
template <class T>
void look_ahead(const AttentionCall& call, const Unit& unit, Scratch& scratch) {
  if (unit.num_tokens != 1) return;
  const int64_t len = call.lens[unit.row], begin = begin_key(call, len - 1);
  const int64_t span = begin / kSpan + unit.span, first = std::max(begin, span * kSpan);
  const int64_t count = std::min({kAhead, len - first, (span + 1) * kSpan - first});
  place<T>(call, unit.row, head_of<T>(call, call.k_cache, unit.kv_head), first, 0, count,
           scratch.next.data());
}

// `next`: what this thread will probably do after it, or null.
template <class T>
void run_unit(const AttentionCall& call, const Unit& unit, const Unit* next, int64_t wide,
              Plan& plan, Scratch& scratch) {
  const int64_t group = call.num_heads / call.num_kv_heads;
  const int64_t rows = unit.num_tokens * group, len = call.lens[unit.row];
  const int64_t query_len = call.starts[unit.row + 1] - call.starts[unit.row];
  const Tile tile{rows, group, len - query_len + unit.first_token};
  scratch.fit(rows, call.dim, wide);
  gather_queries<T>(call, unit, group, scratch.q.data());
  if (next != nullptr) look_ahead<T>(call, *next, scratch);
  if (unit.num_spans > 0) {
    const int64_t part_size = group * (wide + 2);
    float* parts = plan.parts.data() + unit.part * part_size;
    float* mine = parts + unit.span * part_size;
    const int64_t first_span = begin_key(call, tile.first_pos) / kSpan;
    attend_span<T>(call, unit.row, unit.kv_head, tile, first_span + unit.span, wide, scratch, mine,
                   mine + group * wide);
    if (plan.open[unit.join].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (int64_t span = 1; span < unit.num_spans; span++) {
      const float* more = parts + span * part_size;
      join(rows, wide, parts, parts + group * wide, more, more + group * wide);
    }
    finish<T>(call, unit, group, wide, parts, parts + group * wide);
    return;
  }
  float *acc = scratch.acc.data(), *sums = scratch.sums.data();
  const int64_t first = begin_key(call, tile.first_pos) / kSpan;
  for (int64_t span = first; span * kSpan <= tile.pos(rows - 1); span++) {
    const bool fresh = span == first;
    float* span_acc = fresh ? acc : scratch.span_acc.data();
    float* span_sums = fresh ? sums : scratch.span_sums.data();
    attend_span<T>(call, unit.row, unit.kv_head, tile, span, wide, scratch, span_acc, span_sums);
    if (!fresh) join(rows, wide, acc, sums, span_acc, span_sums);
  }
  finish<T>(call, unit, group, wide, acc, sums);
}

// Zeros for tokens that no row attends for.
template <class T>
void clear(const AttentionCall& call, int64_t first, int64_t end) {
  for (int64_t token = first; token < end; token++) {
    for (int64_t head = 0; head < call.num_heads; head++) {
      T* to = static_cast<T*>(call.out) + token * call.out_token + head * call.out_head;
      std::memset(to, 0, call.dim * sizeof(T));
    }
  }
}

int64_t check(const AttentionCall& call) {
  const int64_t rows = call.num_rows;
  if (call.starts[0] != 0 || call.starts[rows] > call.num_tokens) return kLengths;
  for (int64_t row = 0; row < rows; row++) {
    const int64_t query_len = call.starts[row + 1] - call.starts[row], len = call.lens[row];
    if (query_len < 0 || len < 0 || (len > 0 && query_len > len)) return row * 4 + kLengths;
    if (query_len == 0 || len == 0) continue;
    const int64_t blocks = (len + call.block_size - 1) / call.block_size;
    if (blocks > call.table_width) return row * 4 + kTableTooShort;
    const int32_t* table = call.tables + row * call.table_stride;
    for (int64_t i = begin_key(call, len - query_len) / call.block_size; i < blocks; i++) {
      if (table[i] < 0 || table[i] >= call.num_blocks) return row * 4 + kBlockOutside;
    }
  }
  return kNone;
}

// Large units first, then the decodes.
void make_units(const AttentionCall& call, int64_t wide, Plan& plan) {
  const int64_t group = call.num_heads / call.num_kv_heads;
  const int64_t tile_tokens = std::max<int64_t>(1, kTileRows / group);
  int64_t num_parts = 0;
  plan.units.clear();
  plan.num_open = 0;
  for (const bool decodes : {false, true}) {
    for (int64_t row = 0; row < call.num_rows; row++) {
      const int64_t query_len = call.starts[row + 1] - call.starts[row], len = call.lens[row];
      if (query_len == 0 || len == 0 || (query_len == 1) != decodes) continue;
      for (int64_t head = 0; head < call.num_kv_heads; head++) {
        if (decodes) {
          const int64_t first = begin_key(call, len - 1) / kSpan;
          const int64_t spans = (len + kSpan - 1) / kSpan - first;
          if (spans == 1) {
            plan.units.push_back({row, head, 0, 1, 0, 0, 0, 0});
            continue;
          }
          for (int64_t span = 0; span < spans; span++) {
            plan.units.push_back({row, head, 0, 1, span, spans, num_parts, plan.num_open});
          }
          num_parts += spans;
          plan.num_open++;
          continue;
        }
        for (int64_t token = 0; token < query_len; token += tile_tokens) {
          const int64_t count = std::min(tile_tokens, query_len - token);
          plan.units.push_back({row, head, token, count, 0, 0, 0, 0});
        }
      }
    }
  }
  plan.parts.resize(num_parts * group * (wide + 2));
  if (plan.num_open > plan.room) {
    plan.open.reset(new std::atomic<int>[plan.num_open]);
    plan.room = plan.num_open;
  }
  for (const Unit& unit : plan.units) {
    if (unit.num_spans > 0) plan.open[unit.join].store(static_cast<int>(unit.num_spans));
  }
}

template <class T>
void run(const AttentionCall& call) {
  thread_local Plan kept;
  Plan& plan = kept;
  const int64_t wide = up(call.dim, kLanes);
  make_units(call, wide, plan);
  for (int64_t row = 0; row < call.num_rows; row++) {
    if (call.lens[row] == 0) clear<T>(call, call.starts[row], call.starts[row + 1]);
  }
  clear<T>(call, call.starts[call.num_rows], call.num_tokens);
  const int64_t num_units = static_cast<int64_t>(plan.units.size()), threads = num_threads();
  for_units(num_units, [&](int64_t unit) {
    thread_local Scratch scratch;
    const Unit* next = unit + threads < num_units ? &plan.units[unit + threads] : nullptr;
    run_unit<T>(call, plan.units[unit], next, wide, plan, scratch);
  });
}

}  // namespace
}  // namespace quire

// 0, or row * 4 + Refusal when nothing was computed.
QUIRE_EXPORT int64_t quire_attention(const quire::AttentionCall* call) {
  const int64_t refusal = quire::check(*call);
  if (refusal != quire::kNone) return refusal;
  if (call->is_bf16) {
    quire::run<quire::bf16>(*call);
  } else {
    quire::run<float>(*call);
  }
  return quire::kNone;
}
