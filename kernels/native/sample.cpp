// The choice of the next token of each row. Rules and formulas stand in gpu_worker/sampler.py,
// whose numpy functions are the twin: the same token from the same logits.
//
// Nothing is sorted as a whole. The cut of top_k, top_p and min_p is sought among the likely
// tokens, where they do not hold it among all. If those are many they are counted and weighed by
// their distance from the largest logit, in kBuckets, and only the tokens of the one bucket in
// which the cut falls are put in order. What is kept is then everything before one token in the
// order (logit descending, id ascending). Noise is made for what is kept, eight tokens at once, or
// in pieces where it is much; logarithms only for tokens that can still win: with
// E = -log(1 - v) >= v the winner has the least E / weight, so a token with v / weight above the
// least E / weight so far is out.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "lanes.h"
#include "philox.h"
#include "pool.h"

namespace quire {

struct SampleCall {
  int64_t* tokens;     // [rows], -1 where the logits choose nothing
  const void* logits;  // [rows, vocabulary]
  int64_t rows, vocabulary, logits_row, is_bf16;
  const double *temperature, *top_p, *min_p;
  const int64_t *top_k, *seed, *position, *sample_index;
  // Lists by row lie in starts[row] .. starts[row + 1]; null where no row has any.
  const int64_t *bias_starts, *bias_tokens;
  const double* bias_values;
  const int64_t *forbidden_starts, *forbidden_tokens;
  const int64_t *history_starts, *history_tokens, *output_starts;
  const double *repetition, *frequency, *presence;
};

namespace {

constexpr float kGreedyBelow = 1e-5f;
constexpr int64_t kPiece = 32;  // tokens of one call of philox32
constexpr float kMargin = 1.001f;
constexpr size_t kMostLikely = 16384;  // tokens among which the cut is sought first
constexpr size_t kInOrder = 256;       // tokens that are put in order without counting first
constexpr int64_t kBuckets = 1024;
constexpr int64_t kStretch = 128;      // weights that are added up in fp32
constexpr int64_t kEach = 8;           // tokens whose noise is made at once

using Candidate = std::pair<float, int32_t>;  // distance from the largest logit, token

// Of what may be kept. Room once taken is kept, and not cleared.
struct List {
  std::vector<Candidate> room;
  size_t size = 0;
  Candidate* begin() { return room.data(); }
  Candidate* end() { return room.data() + size; }
  Candidate* make_room(size_t most) {
    if (room.size() < most) room.resize(most);
    size = 0;
    return begin();
  }
};

struct Buffers {
  std::vector<float> logits, weights;  // of the row; padded with -inf and 0
  std::vector<int32_t> seen, kept;
  List list;
  std::vector<Candidate> edge;  // what is put in order
  int32_t counts[kBuckets];
  double masses[kBuckets];
};

// A row's logits, changed, with -inf up to a whole piece behind them.
struct Logits {
  const float* of;
  int64_t padded;
};

// The last kept token in the order of (logit descending, id ascending).
struct Cut {
  float gap = -kInfinity;
  int64_t token = INT64_MAX;
};

bool has(const int64_t* starts, int64_t row) {
  return starts != nullptr && starts[row + 1] > starts[row];
}

void change(const SampleCall& call, int64_t row, Buffers& buffers) {
  float* logits = buffers.logits.data();
  if (call.bias_starts != nullptr) {
    for (int64_t i = call.bias_starts[row]; i < call.bias_starts[row + 1]; i++) {
      logits[call.bias_tokens[i]] += static_cast<float>(call.bias_values[i]);
    }
  }
  if (call.forbidden_starts != nullptr) {
    for (int64_t i = call.forbidden_starts[row]; i < call.forbidden_starts[row + 1]; i++) {
      logits[call.forbidden_tokens[i]] = -kInfinity;
    }
  }
  if (!has(call.history_starts, row)) return;
  const int64_t begin = call.history_starts[row], end = call.history_starts[row + 1];
  std::vector<int32_t>& seen = buffers.seen;
  seen.resize(call.vocabulary);
  const float repetition = static_cast<float>(call.repetition[row]);
  if (call.repetition[row] != 1.0) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t token = call.history_tokens[i];
      if (seen[token]++ > 0) continue;
      float& logit = logits[token];
      logit = logit < 0.0f ? logit * repetition : logit / repetition;
    }
    for (int64_t i = begin; i < end; i++) seen[call.history_tokens[i]] = 0;
  }
  if (call.frequency[row] == 0.0 && call.presence[row] == 0.0) return;
  const int64_t output = call.output_starts[row];
  const float frequency = static_cast<float>(call.frequency[row]);
  const float presence = static_cast<float>(call.presence[row]);
  for (int64_t i = output; i < end; i++) seen[call.history_tokens[i]]++;
  for (int64_t i = output; i < end; i++) {
    const int64_t token = call.history_tokens[i];
    if (seen[token] == 0) continue;
    logits[token] -= static_cast<float>(seen[token]) * frequency + presence;
    seen[token] = 0;
  }
}

// The row's logits as fp32, -inf up to a whole piece behind them.
template <class T>
void copy_row(const T* from, int64_t count, std::vector<float>& to) {
  to.resize(up(count, kPiece));
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to.data() + i, load(from + i));
  for (; i < count; i++) to[i] = as_float(from[i]);
  for (; i < static_cast<int64_t>(to.size()); i++) to[i] = -kInfinity;
}

// Largest of all; NaN where a logit is NaN or plus infinity.
float top_of(const Logits& logits) {
  const Lanes zero = splat(0.0f), one = splat(1.0f), limit = splat(kInfinity);
  Lanes best = splat(-kInfinity), bad = zero;
  for (int64_t i = 0; i < logits.padded; i += kLanes) {
    const Lanes x = load(logits.of + i);
    best = larger(x, best);
    bad = bad + where_less(x, limit, zero, one);
  }
  return sum(bad) > 0.0f ? std::numeric_limits<float>::quiet_NaN() : largest(best);
}

// exp(gap / temperature) in fp32; `rate` is log2(e) / temperature.
Lanes weights(Lanes gaps, Lanes rate) { return exp2(gaps * rate); }

Lanes rate_of(double temperature) {
  return splat(static_cast<float>(1.44269504088896341 / temperature));
}

// The cuts of a row, as numbers.
struct Limits {
  double temperature, top_p, total;  // total weight of what min_p lets through
  int64_t count;                     // of tokens that min_p and top_k let through, at most
  bool by_count;                     // top_p is a share of what `count` keeps
};

// The cut by `limits` in buffers.edge, which is put in order: all before it has `count` and `mass`.
Cut cut_edge(const Limits& limits, bool by_mass, double wanted, int64_t count, double mass,
             Buffers& buffers, double* reached) {
  std::sort(buffers.edge.begin(), buffers.edge.end());
  Cut cut;
  for (const auto& [distance, token] : buffers.edge) {
    if (count == limits.count) break;
    mass += std::exp(-static_cast<double>(distance) / limits.temperature);
    cut = {-distance, token};
    count++;
    if (by_mass && mass >= wanted) break;
  }
  *reached = mass;
  return cut;
}

// Which bucket a distance falls in: it rises with it. Infinite ones are in the last.
struct Buckets {
  float per_unit;
  int64_t of(float distance) const {
    const float place = distance * per_unit;
    return place < kBuckets - 1 ? static_cast<int64_t>(place) : kBuckets - 1;
  }
};

Buckets count_and_weigh(Buffers& buffers) {
  float furthest = 0.0f;
  for (const auto& [distance, token] : buffers.list) {
    if (distance < kInfinity) furthest = std::max(furthest, distance);
  }
  const Buckets buckets{furthest > 0.0f ? (kBuckets - 1) / furthest : 0.0f};
  std::fill(buffers.counts, buffers.counts + kBuckets, 0);
  std::fill(buffers.masses, buffers.masses + kBuckets, 0.0);
  for (const auto& [distance, token] : buffers.list) {
    const int64_t bucket = buckets.of(distance);
    buffers.counts[bucket]++;
    buffers.masses[bucket] += buffers.weights[token];
  }
  return buckets;
}

// One cut, by mass or by count, among what is listed.
Cut cut_bucket(const Limits& limits, const Buckets& buckets, bool by_mass, double wanted,
               Buffers& buffers, double* reached) {
  int64_t count = 0, bucket = 0;
  double mass = 0.0;
  for (; bucket < kBuckets; bucket++) {
    const int64_t after = count + buffers.counts[bucket];
    const bool reaches = by_mass && mass + buffers.masses[bucket] >= wanted;
    if (buffers.counts[bucket] > 0 && (reaches || after >= limits.count)) break;
    count = after;
    mass += buffers.masses[bucket];
  }
  buffers.edge.clear();
  for (const Candidate& candidate : buffers.list) {
    if (buckets.of(candidate.first) == bucket) buffers.edge.push_back(candidate);
  }
  return cut_edge(limits, by_mass, wanted, count, mass, buffers, reached);
}

// The cut, when it is known to fall among what is listed.
Cut cut_list(const Limits& limits, Buffers& buffers) {
  const bool few = buffers.list.size <= kInOrder;
  Buckets buckets{};
  if (few) {
    buffers.edge.assign(buffers.list.begin(), buffers.list.end());
  } else {
    buckets = count_and_weigh(buffers);
  }
  Cut cut;
  double wanted = limits.top_p * limits.total;
  for (const bool by_mass : {false, true}) {
    if (by_mass ? limits.top_p >= 1.0 : !limits.by_count) continue;
    double reached = 0.0;
    cut = few ? cut_edge(limits, by_mass, wanted, 0, 0.0, buffers, &reached)
              : cut_bucket(limits, buckets, by_mass, wanted, buffers, &reached);
    if (!by_mass) wanted = limits.top_p * reached;
  }
  return cut;
}

// Lists the tokens of at least `share` of the total; false where the cut may fall among others.
bool list_likely(const Limits& limits, const Logits& logits, float top, float share,
                 Buffers& buffers) {
  const Lanes least = splat(static_cast<float>(share * limits.total));
  const float* weights = buffers.weights.data();
  Candidate* const begin = buffers.list.make_room(kMostLikely + kLanes);
  Candidate *end = begin, *const most = begin + kMostLikely;
  double mass = 0.0;
  for (int64_t i = 0; i < logits.padded && end <= most; i += kLanes) {
    uint32_t likely = less_bits(least, load(weights + i));
    for (; likely != 0; likely &= likely - 1) {
      const int64_t token = i + __builtin_ctz(likely);
      mass += weights[token];
      *end++ = {top - logits.of[token], static_cast<int32_t>(token)};
    }
  }
  const int64_t found = end - begin;
  buffers.list.size = found;
  if (end > most) return false;
  return limits.by_count ? found >= limits.count : mass > limits.top_p * limits.total;
}

// Lists what min_p lets through.
void list_all(int64_t vocabulary, const Logits& logits, float top, float least, Buffers& buffers) {
  Candidate* end = buffers.list.make_room(vocabulary);
  for (int64_t token = 0; token < vocabulary; token++) {
    if (buffers.weights[token] < least) continue;
    *end++ = {top - logits.of[token], static_cast<int32_t>(token)};
  }
  buffers.list.size = end - buffers.list.begin();
}

// What min_p, top_k and top_p keep. Leaves a list that holds it, or an empty one.
Cut find_cut(const SampleCall& call, int64_t row, const Logits& logits, float top,
             Buffers& buffers) {
  const double min_p = call.min_p[row];
  const int64_t top_k = call.top_k[row];
  const bool by_count = top_k > 0 && top_k < call.vocabulary;
  const float least = static_cast<float>(min_p);  // of a weight; the largest one is 1
  buffers.weights.resize(logits.padded);
  double total = 0.0;
  int64_t probable = 0;
  const Lanes zero = splat(0.0f), edge = splat(least), rate = rate_of(call.temperature[row]);
  Lanes furthest = zero;  // gap that min_p lets through
  for (int64_t i = 0; i < logits.padded;) {
    Lanes some = zero;  // of a stretch: few enough terms for fp32
    for (const int64_t end = std::min(i + kStretch, logits.padded); i < end; i += kLanes) {
      const Lanes gap = load(logits.of + i) - splat(top);
      Lanes part = weights(gap, rate);
      if (min_p > 0.0) {
        furthest = smaller(furthest, where_less(part, edge, zero, gap));
        probable += kLanes - __builtin_popcount(less_bits(part, edge));
        part = where_less(part, edge, zero, part);
      }
      store(buffers.weights.data() + i, part);
      some = some + part;
    }
    total += sum(some);
  }
  if (min_p <= 0.0) probable = call.vocabulary;
  const int64_t count = by_count ? std::min(top_k, probable) : probable;
  const Limits limits{call.temperature[row], call.top_p[row], total, count, by_count};
  buffers.list.size = 0;
  if (!by_count && limits.top_p >= 1.0) return {-largest(zero - furthest), INT64_MAX};
  for (const float share : {1e-4f, 1e-5f, 1e-6f}) {
    if (list_likely(limits, logits, top, share, buffers)) return cut_list(limits, buffers);
  }
  list_all(call.vocabulary, logits, top, least, buffers);
  return cut_list(limits, buffers);
}

// Who is ahead: the token with the largest gap / temperature - log(E), the first one of equals.
struct Race {
  double temperature, best = -std::numeric_limits<double>::infinity();
  int64_t chosen = -1;
  float reach = kInfinity;  // over which v / weight is out

  void enter(int64_t token, float gap, uint32_t word) {
    const double v = (static_cast<double>(word) + 0.5) * 0x1p-32;
    const double exponential = -std::log1p(-v);
    const double score = static_cast<double>(gap) / temperature - std::log(exponential);
    if (score < best || (score == best && token > chosen)) return;
    best = score;
    chosen = token;
    const double weight = std::exp(static_cast<double>(gap) / temperature);
    reach = static_cast<float>(exponential / weight) * kMargin;
  }
};

// Half of the noise, rounded down: a lower bound of v, so that no winner is lost.
constexpr float kUnit = 0x1p-31f;

// The winner of what is listed and within the cut.
int64_t draw_listed(const Noise& noise, double temperature, const Logits& logits, float top,
                    const Cut& cut, Buffers& buffers) {
  std::vector<int32_t>& kept = buffers.kept;
  kept.clear();
  for (const auto& [distance, token] : buffers.list) {
    if (-distance > cut.gap || (-distance == cut.gap && token <= cut.token)) kept.push_back(token);
  }
  const size_t count = kept.size();
  kept.resize(up(count, kEach));  // with token 0, whose noise nobody looks at
  Race race{temperature};
  uint32_t words[kEach];
  for (size_t i = 0; i < count; i += kEach) {
    philox_of(noise, kept.data() + i, words);
    const size_t end = std::min<size_t>(count - i, kEach);
    for (size_t h = 0; h < end; h++) {
      const int32_t token = kept[i + h];
      const float weight = buffers.weights[token];
      if (!(weight > 0.0f) || race.reach * weight < (words[h] >> 1) * kUnit) continue;
      race.enter(token, logits.of[token] - top, words[h]);
    }
  }
  return race.chosen;
}

// The winner of all within the cut.
int64_t draw(const Noise& noise, double temperature, const Logits& logits, float top,
             const Cut& cut) {
  Race race{temperature};
  uint32_t words[kPiece];
  const Lanes shift = splat(top), edge = splat(cut.gap), rate = rate_of(temperature);
  for (int64_t first = 0; first < logits.padded; first += kPiece) {
    Lanes gaps[2], parts[2];
    for (int h = 0; h < 2; h++) gaps[h] = load(logits.of + first + h * kLanes) - shift;
    if (largest(larger(gaps[0], gaps[1])) < cut.gap) continue;
    philox32(noise, static_cast<uint32_t>(first / 4), words);
    for (int h = 0; h < 2; h++) {
      parts[h] = weights(gaps[h], rate);
      const Lanes bound = halves_of(words + h * kLanes) * splat(kUnit);
      uint32_t open = ~less_bits(splat(race.reach) * parts[h], bound) & ~less_bits(gaps[h], edge);
      open &= less_bits(splat(0.0f), parts[h]);  // weights of 0 lose
      for (; open != 0; open &= open - 1) {
        const int64_t i = h * kLanes + __builtin_ctz(open), token = first + i;
        const float gap = logits.of[token] - top;
        if (gap == cut.gap && token > cut.token) continue;
        race.enter(token, gap, words[i]);
      }
    }
  }
  return race.chosen;
}

// The row as it came where nothing of it is changed and it can be read as it is, else a copy.
template <class T>
Logits logits_of(const SampleCall& call, int64_t row, Buffers& buffers) {
  const T* from = static_cast<const T*>(call.logits) + row * call.logits_row;
  const bool changed = has(call.bias_starts, row) || has(call.forbidden_starts, row) ||
                       has(call.history_starts, row);
  if constexpr (std::is_same_v<T, float>) {
    if (!changed && call.vocabulary % kPiece == 0) return {from, call.vocabulary};
  }
  copy_row(from, call.vocabulary, buffers.logits);
  if (changed) change(call, row, buffers);
  return {buffers.logits.data(), static_cast<int64_t>(buffers.logits.size())};
}

template <class T>
int64_t sample_row(const SampleCall& call, int64_t row, Buffers& buffers) {
  const Logits logits = logits_of<T>(call, row, buffers);
  const float top = top_of(logits);
  if (!std::isfinite(top)) return -1;
  const double temperature = call.temperature[row];
  if (temperature < kGreedyBelow) {
    return std::find(logits.of, logits.of + call.vocabulary, top) - logits.of;
  }
  const uint64_t seed = static_cast<uint64_t>(call.seed[row]);
  const Noise noise{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                    static_cast<uint32_t>(call.position[row]),
                    static_cast<uint32_t>(call.sample_index[row])};
  const bool cuts = call.min_p[row] > 0.0 || call.top_p[row] < 1.0 ||
                    (call.top_k[row] > 0 && call.top_k[row] < call.vocabulary);
  if (!cuts) return draw(noise, temperature, logits, top, Cut{});
  const Cut cut = find_cut(call, row, logits, top, buffers);
  // Noise of a piece costs as much as that of so many tokens one by one.
  const size_t much = logits.padded / (kPiece / kEach);
  if (buffers.list.size == 0 || buffers.list.size > much) {
    return draw(noise, temperature, logits, top, cut);
  }
  return draw_listed(noise, temperature, logits, top, cut, buffers);
}

bool inside(const SampleCall& call, const int64_t* starts, const int64_t* tokens) {
  if (starts == nullptr) return true;
  if (starts[0] != 0) return false;
  for (int64_t row = 0; row < call.rows; row++) {
    if (starts[row + 1] < starts[row]) return false;
  }
  for (int64_t i = 0; i < starts[call.rows]; i++) {
    if (tokens[i] < 0 || tokens[i] >= call.vocabulary) return false;
  }
  return true;
}

}  // namespace
}  // namespace quire

// 0, or 1 when a list holds a token outside the vocabulary or its starts do not rise.
QUIRE_EXPORT int64_t quire_sample(const quire::SampleCall* call) {
  using namespace quire;
  if (!inside(*call, call->bias_starts, call->bias_tokens) ||
      !inside(*call, call->forbidden_starts, call->forbidden_tokens) ||
      !inside(*call, call->history_starts, call->history_tokens)) {
    return 1;
  }
  for_units(call->rows, [&](int64_t row) {
    thread_local Buffers buffers;
    call->tokens[row] = call->is_bf16 ? sample_row<bf16>(*call, row, buffers)
                                      : sample_row<float>(*call, row, buffers);
  });
  return 0;
}
