// Log probabilities: of one token of each row, and of the most likely ones beside it. Torch twin:
// kernels.reference_sampling.logprobs.
//
//     logprob[token] = logit[token] - top - log(sum exp(logit - top))    top: the largest logit
//
// Two passes over a row, without a copy: one for `top` and the likeliest tokens, one for the sum. It
// is added up in fp32 over a stretch, then in fp64, in an order that neither the rows beside nor the
// threads change. The likeliest are kept in the order (logit descending, id ascending); what
// follows is compared with the last of them, sixteen tokens at once.
#include <algorithm>
#include <cmath>

#include "lanes.h"
#include "pool.h"

namespace quire {

struct LogprobsCall {
  float* own;               // [rows], NaN where a logit is NaN, none is finite or the token negative
  int64_t* top_ids;         // [rows, num_top]
  float* top_logprobs;      // [rows, num_top]
  const void* logits;       // [rows, vocabulary]
  const int64_t* tokens;    // [rows]
  int64_t rows, vocabulary, logits_row, num_top, is_bf16;  // num_top: at most vocabulary, kMostTop
};

namespace {

constexpr int64_t kMostTop = 20;
constexpr int64_t kStretch = 128;  // weights that are added up in fp32

// Sixteen of a row's logits, -inf behind its end.
template <class T>
Lanes lanes_at(const T* logits, int64_t i, int64_t count) {
  if (i + kLanes <= count) return load(logits + i);
  float part[kLanes];
  for (int64_t lane = 0; lane < kLanes; lane++) {
    part[lane] = i + lane < count ? as_float(logits[i + lane]) : -kInfinity;
  }
  return load(part);
}

// The likeliest so far, in order.
struct Best {
  float logits[kMostTop];
  int64_t ids[kMostTop];
  int64_t size = 0, most;

  // Of tokens in the order of their ids: behind those that equal it.
  void take(float logit, int64_t id) {
    int64_t place = size < most ? size++ : most - 1;
    for (; place > 0 && logits[place - 1] < logit; place--) {
      logits[place] = logits[place - 1], ids[place] = ids[place - 1];
    }
    logits[place] = logit, ids[place] = id;
  }
  float least() const { return logits[most - 1]; }
};

// Largest of all that are numbers; the likeliest go into `best`.
template <class T>
float find_top(const T* logits, int64_t count, Best& best) {
  // The first are taken whatever they are, so that there are always enough.
  for (int64_t id = 0; id < best.most; id++) best.take(as_float(logits[id]), id);
  Lanes largest_of = splat(-kInfinity);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes x = lanes_at(logits, i, count);
    largest_of = larger(x, largest_of);
    if (best.most == 0 || i + kLanes <= best.most) continue;
    for (uint32_t above = less_bits(splat(best.least()), x); above != 0; above &= above - 1) {
      const int64_t id = i + __builtin_ctz(above);
      const float logit = as_float(logits[id]);
      if (id >= best.most && best.least() < logit) best.take(logit, id);
    }
  }
  return largest(largest_of);
}

// NaN where one of them is.
template <class T>
double log_total(const T* logits, int64_t count, float top) {
  double total = 0.0;
  for (int64_t begin = 0; begin < count; begin += kStretch) {
    Lanes weights = splat(0.0f);
    for (int64_t i = begin; i < std::min(begin + kStretch, count); i += kLanes) {
      weights = weights + exp2((lanes_at(logits, i, count) - splat(top)) * splat(kLog2E));
    }
    total += sum(weights);
  }
  return std::log(total);
}

template <class T>
void score_row(const LogprobsCall& call, int64_t row) {
  const T* logits = static_cast<const T*>(call.logits) + row * call.logits_row;
  Best best;
  best.most = call.num_top;
  const double top = find_top(logits, call.vocabulary, best);
  const double nothing = std::numeric_limits<double>::quiet_NaN();
  const double all =
      std::isfinite(top) ? top + log_total(logits, call.vocabulary, top) : nothing;
  const int64_t token = call.tokens[row];
  call.own[row] = static_cast<float>(token < 0 ? nothing : as_float(logits[token]) - all);
  for (int64_t i = 0; i < call.num_top; i++) {
    call.top_ids[row * call.num_top + i] = best.ids[i];
    call.top_logprobs[row * call.num_top + i] = static_cast<float>(best.logits[i] - all);
  }
}

}  // namespace
}  // namespace quire

// 0, or row + 1 of a token outside the vocabulary when nothing was computed.
QUIRE_EXPORT int64_t quire_logprobs(const quire::LogprobsCall* call) {
  using namespace quire;
  for (int64_t row = 0; row < call->rows; row++) {
    if (call->tokens[row] >= call->vocabulary) return row + 1;
  }
  for_units(call->rows, [&](int64_t row) {
    call->is_bf16 ? score_row<bf16>(*call, row) : score_row<float>(*call, row);
  });
  return 0;
}
