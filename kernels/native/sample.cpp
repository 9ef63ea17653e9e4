// The choice of the next token of each row. Rules and formulas stand in gpu_worker/sampler.py, whose
// numpy functions are the twin: the same token from the same logits.
//
// Nothing is sorted as a whole. The cut of top_k, top_p and min_p is sought among the likely tokens;
// where they do not hold it, tokens are counted by the leading bits of their distance from the
// largest logit, and only those of the one bucket in which the cut falls are put in order. What is
// kept is then everything before one token in the order (logit descending, id ascending). Noise is made for pieces in which something is kept;
// logarithms only for tokens that can still win: with E = -log(1 - v) >= v the winner has the least
// E / weight, so a token with v / weight above the least E / weight so far is out.
#include <algorithm>
#include <cmath>
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
constexpr size_t kMostLikely = 4096;  // tokens that are put in order without counting first
constexpr int kDropped = 17;  // bits of a distance that its bucket leaves out
constexpr int64_t kBuckets = int64_t{1} << (32 - 1 - kDropped);

struct Buffers {
  std::vector<float> logits, weights;  // of the row, changed; padded with -inf and 0
  std::vector<int32_t> counts, seen;
  std::vector<double> masses;
  std::vector<std::pair<float, int32_t>> edge;
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
float top_of(const std::vector<float>& logits) {
  const Lanes zero = splat(0.0f), one = splat(1.0f), limit = splat(kInfinity);
  Lanes best = splat(-kInfinity), bad = zero;
  for (size_t i = 0; i < logits.size(); i += kLanes) {
    const Lanes x = load(logits.data() + i);
    best = larger(x, best);
    bad = bad + where_less(x, limit, zero, one);
  }
  return sum(bad) > 0.0f ? std::numeric_limits<float>::quiet_NaN() : largest(best);
}

int32_t bucket_of(float gap) {
  const float distance = -gap;  // 0 or more; its bits rise with it
  uint32_t bits;
  std::memcpy(&bits, &distance, sizeof(bits));
  return static_cast<int32_t>((bits & 0x7fffffffu) >> kDropped);
}

// The least distance of a bucket. Behind the one of infinity it is NaN and nothing is less: a cut
// there keeps all, and tokens at that distance have no weight.
float first_of(int64_t bucket) {
  const uint32_t bits = static_cast<uint32_t>(bucket) << kDropped;
  float distance;
  std::memcpy(&distance, &bits, sizeof(distance));
  return distance;
}

// exp(gap / temperature) in fp32, as the twin weighs tokens.
Lanes weights(Lanes gaps, float temperature) {
  return exp2(gaps / splat(temperature) * splat(kLog2E));
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

// The cut when all that can be kept weighs at least `share` of the total; false when it may not.
bool cut_likely(const Limits& limits, float top, float share, Buffers& buffers, Cut* cut) {
  const Lanes least = splat(static_cast<float>(share * limits.total));
  buffers.edge.clear();
  double mass = 0.0;
  for (size_t i = 0; i < buffers.weights.size(); i += kLanes) {
    uint32_t likely = less_bits(least, load(buffers.weights.data() + i));
    for (; likely != 0; likely &= likely - 1) {
      const size_t token = i + __builtin_ctz(likely);
      mass += buffers.weights[token];
      buffers.edge.emplace_back(top - buffers.logits[token], static_cast<int32_t>(token));
    }
    if (buffers.edge.size() > kMostLikely) return false;
  }
  const int64_t found = static_cast<int64_t>(buffers.edge.size());
  if (limits.by_count ? found < limits.count : mass <= limits.top_p * limits.total) return false;
  double reached = 0.0;
  double wanted = limits.top_p * limits.total;
  if (limits.by_count) {
    *cut = cut_edge(limits, false, 0.0, 0, 0.0, buffers, &reached);
    wanted = limits.top_p * reached;
  }
  if (limits.top_p < 1.0) *cut = cut_edge(limits, true, wanted, 0, 0.0, buffers, &reached);
  return true;
}

// The tokens of a bucket: distances from its first one up to that of the next.
void collect(int64_t vocabulary, float top, int64_t bucket, Buffers& buffers) {
  const Lanes near = splat(first_of(bucket)), far = splat(first_of(bucket + 1));
  buffers.edge.clear();
  for (int64_t i = 0; i < vocabulary; i += kLanes) {
    const Lanes distance = splat(top) - load(buffers.logits.data() + i);
    uint32_t here = less_bits(distance, far) & ~less_bits(distance, near);
    for (; here != 0; here &= here - 1) {
      const int64_t token = i + __builtin_ctz(here);
      if (token >= vocabulary) break;
      buffers.edge.emplace_back(top - buffers.logits[token], static_cast<int32_t>(token));
    }
  }
}

// The cut in any case: tokens are counted and weighed by bucket first.
Cut cut_buckets(const SampleCall& call, Limits limits, float top, float least, Buffers& buffers) {
  buffers.counts.assign(kBuckets, 0);
  buffers.masses.assign(kBuckets, 0.0);
  for (int64_t i = 0; i < call.vocabulary; i++) {
    if (buffers.weights[i] < least) continue;
    const int32_t bucket = bucket_of(buffers.logits[i] - top);
    buffers.counts[bucket]++;
    buffers.masses[bucket] += buffers.weights[i];
  }
  Cut cut;
  double wanted = limits.top_p * limits.total;
  for (const bool by_mass : {false, true}) {
    if (by_mass && limits.top_p >= 1.0) break;
    int64_t count = 0, bucket = 0;
    double mass = 0.0;
    for (; bucket < kBuckets; bucket++) {
      const int64_t after = count + buffers.counts[bucket];
      const bool reaches = by_mass && mass + buffers.masses[bucket] >= wanted;
      if (buffers.counts[bucket] > 0 && (reaches || after >= limits.count)) break;
      count = after;
      mass += buffers.masses[bucket];
    }
    collect(call.vocabulary, top, bucket, buffers);
    double reached = 0.0;
    cut = cut_edge(limits, by_mass, wanted, count, mass, buffers, &reached);
    if (limits.by_count) wanted = limits.top_p * reached;
  }
  return cut;
}

// What min_p, top_k and top_p keep.
Cut find_cut(const SampleCall& call, int64_t row, float top, Buffers& buffers) {
  const double min_p = call.min_p[row];
  const int64_t top_k = call.top_k[row];
  const bool by_count = top_k > 0 && top_k < call.vocabulary;
  const float least = static_cast<float>(min_p);  // of a weight; the largest one is 1
  buffers.weights.resize(buffers.logits.size());
  double total = 0.0;
  int64_t probable = 0;
  const Lanes zero = splat(0.0f), edge = splat(least);
  Lanes furthest = zero;  // gap that min_p lets through
  for (size_t i = 0; i < buffers.weights.size();) {
    Lanes some = zero;  // of a stretch: few enough terms for fp32
    for (const size_t end = i + kPiece; i < end; i += kLanes) {
      const Lanes gap = load(buffers.logits.data() + i) - splat(top);
      Lanes part = weights(gap, static_cast<float>(call.temperature[row]));
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
  if (!by_count && limits.top_p >= 1.0) return {-largest(zero - furthest), INT64_MAX};
  Cut cut;
  for (const float share : {1e-3f, 1e-5f}) {
    if (cut_likely(limits, top, share, buffers, &cut)) return cut;
  }
  return cut_buckets(call, limits, top, least, buffers);
}

// The kept token with the largest gap / temperature - log(E).
int64_t draw(const SampleCall& call, int64_t row, float top, const Cut& cut,
             const std::vector<float>& logits) {
  const double temperature = call.temperature[row];
  const uint64_t seed = static_cast<uint64_t>(call.seed[row]);
  const Noise noise{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                    static_cast<uint32_t>(call.position[row]),
                    static_cast<uint32_t>(call.sample_index[row])};
  int64_t chosen = -1;
  double best = -std::numeric_limits<double>::infinity();
  float reach = kInfinity;
  uint32_t words[kPiece];
  const int64_t padded = static_cast<int64_t>(logits.size());
  const Lanes shift = splat(top), edge = splat(cut.gap);
  for (int64_t first = 0; first < padded; first += kPiece) {
    Lanes gaps[2], parts[2];
    for (int h = 0; h < 2; h++) gaps[h] = load(logits.data() + first + h * kLanes) - shift;
    if (largest(larger(gaps[0], gaps[1])) < cut.gap) continue;
    philox32(noise, static_cast<uint32_t>(first / 4), words);
    for (int h = 0; h < 2; h++) {
      parts[h] = weights(gaps[h], static_cast<float>(temperature));
      // A lower bound of v, so that no winner is lost; weights of 0 lose.
      const Lanes bound = halves_of(words + h * kLanes) * splat(0x1p-31f);
      uint32_t open = ~less_bits(splat(reach) * parts[h], bound) & ~less_bits(gaps[h], edge);
      open &= less_bits(splat(0.0f), parts[h]);
      for (; open != 0; open &= open - 1) {
        const int64_t i = h * kLanes + __builtin_ctz(open), token = first + i;
        const float gap = logits[token] - top;
        if (gap == cut.gap && token > cut.token) continue;
        const double v = (static_cast<double>(words[i]) + 0.5) * 0x1p-32;
        const double exponential = -std::log1p(-v);
        const double score = static_cast<double>(gap) / temperature - std::log(exponential);
        if (score <= best) continue;
        best = score;
        chosen = token;
        const double weight = std::exp(static_cast<double>(gap) / temperature);
        reach = static_cast<float>(exponential / weight) * kMargin;
      }
    }
  }
  return chosen;
}

template <class T>
int64_t sample_row(const SampleCall& call, int64_t row, Buffers& buffers) {
  copy_row(static_cast<const T*>(call.logits) + row * call.logits_row, call.vocabulary,
           buffers.logits);
  change(call, row, buffers);
  const float top = top_of(buffers.logits);
  if (!std::isfinite(top)) return -1;
  if (call.temperature[row] < kGreedyBelow) {
    const auto found = std::find(buffers.logits.begin(), buffers.logits.end(), top);
    return found - buffers.logits.begin();
  }
  Cut cut;
  const bool cuts = call.min_p[row] > 0.0 || call.top_p[row] < 1.0 ||
                    (call.top_k[row] > 0 && call.top_k[row] < call.vocabulary);
  if (cuts) cut = find_cut(call, row, top, buffers);
  return draw(call, row, top, cut, buffers.logits);
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
