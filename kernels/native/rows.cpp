// Operators over rows of a flat batch: RMSNorm with residual, gated activation, rotary embedding
// with the store into the KV cache, plain store.
//
// Each rounds where transformers' modules round: with bf16 after every operation that they do in
// bf16. A row's arithmetic is its own: rows are shared out between threads, lanes never are.
#include <algorithm>
#include <type_traits>

#include "lanes.h"
#include "pool.h"
#include "rows.h"

namespace quire {
namespace {

// Elements from which on it is worth to share the rows out, and about how many a unit has.
constexpr int64_t kSharedFrom = 1 << 15, kElementsOfUnit = 1 << 13;

// Runs body(row) for all rows; on several threads when there is enough to do.
template <class Body>
void for_rows(int64_t rows, int64_t elements_a_row, const Body& body) {
  if (rows * elements_a_row < kSharedFrom) {
    for (int64_t row = 0; row < rows; row++) body(row);
    return;
  }
  const int64_t together = std::max<int64_t>(1, kElementsOfUnit / elements_a_row);
  for_units((rows + together - 1) / together, [&](int64_t unit) {
    const int64_t end = std::min(rows, (unit + 1) * together);
    for (int64_t row = unit * together; row < end; row++) body(row);
  });
}

// Lanes d .. of a row of `dim` elements; those past its end are zeros, and are not written.
template <class T>
inline Lanes load_at(const T* from, int64_t d, int64_t dim) {
  return d + kLanes <= dim ? load(from + d) : load_first(from + d, dim - d);
}
template <class T>
inline void store_at(T* to, Lanes x, int64_t d, int64_t dim) {
  if (d + kLanes <= dim) {
    store(to + d, x);
  } else {
    store_first(to + d, x, dim - d);
  }
}

// 1 / sqrt(mean of squares + epsilon)
template <class T>
float inverse_size(const T* x, int64_t dim, float epsilon) {
  Lanes squares = splat(0.0f);
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Lanes value = load_at(x, d, dim);
    squares = fma(value, value, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(dim) + epsilon);
}

// offset 0: weight * rounded(x * factor), as Llama does; 1: rounded(x * factor * (1 + weight)),
// as Gemma does.
template <class T>
void scale_row(const T* x, const T* weight, int64_t dim, float factor, bool offset, T* out) {
  const T* kind = nullptr;
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Lanes y = load_at(x, d, dim) * splat(factor), w = load_at(weight, d, dim);
    store_at(out, offset ? y * (splat(1.0f) + w) : rounded(y, kind) * w, d, dim);
  }
}

template <class T>
void rms_norm(T* out, T* x, const T* delta, const T* weight, int64_t rows, int64_t dim,
              int64_t out_row, int64_t x_row, int64_t delta_row, float epsilon, bool offset) {
  for_rows(rows, 4 * dim, [&](int64_t row) {
    T* in = x + row * x_row;
    if (delta != nullptr) {
      const T* more = delta + row * delta_row;
      for (int64_t d = 0; d < dim; d += kLanes) {
        store_at(in, load_at(in, d, dim) + load_at(more, d, dim), d, dim);
      }
    }
    const float factor = inverse_size(in, dim, epsilon);
    scale_row(in, weight, dim, factor, offset, out + row * out_row);
  });
}

inline Lanes silu(Lanes x) {
  return x / (splat(1.0f) + exp2(x * splat(-kLog2E)));
}

// x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline Lanes gelu_tanh(Lanes x) {
  const Lanes cube = x * x * x;
  const Lanes u = splat(0.79788456f) * fma(splat(0.044715f), cube, x);
  return x / (splat(1.0f) + exp2(u * splat(-2.0f * kLog2E)));
}

template <class T>
void gate(T* out, const T* both, int64_t rows, int64_t dim, int64_t out_row, int64_t both_row,
          bool gelu) {
  const T* kind = nullptr;
  for_rows(rows, 8 * dim, [&](int64_t row) {
    const T *left = both + row * both_row, *right = left + dim;
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Lanes x = load_at(left, d, dim);
      const Lanes y = rounded(gelu ? gelu_tanh(x) : silu(x), kind);
      store_at(out + row * out_row, y * load_at(right, d, dim), d, dim);
    }
  });
}

// x' = x cos - y sin, y' = y cos + x sin for the halves x, y of the first 2 * half elements.
template <class T>
void rotate(const T* in, T* out, const float* cosine, const float* sine, int64_t half,
            int64_t dim) {
  const T* kind = nullptr;
  for (int64_t d = 0; d < half; d += kLanes) {
    const int64_t count = std::min(kLanes, half - d);
    const Lanes x = load_at(in + d, 0, count), y = load_at(in + half + d, 0, count);
    const Lanes c = load_at(cosine + d, 0, count), s = load_at(sine + d, 0, count);
    store_at(out, rounded(x * c, kind) - rounded(y * s, kind), d, half);
    store_at(out + half, rounded(y * c, kind) + rounded(x * s, kind), d, half);
  }
  if (in != out) {
    for (int64_t d = 2 * half; d < dim; d++) out[d] = in[d];
  }
}

template <class T>
void rotate_and_store(const RotaryCall& call) {
  const int64_t dim = call.dim, heads = call.num_heads, kv_heads = call.num_kv_heads;
  for_rows(call.num_tokens, (heads + 2 * kv_heads) * dim, [&](int64_t token) {
    const float* cosine = call.cosine + call.positions[token] * call.half;
    const float* sine = call.sine + call.positions[token] * call.half;
    T* q = static_cast<T*>(call.qkv) + token * call.token;
    for (int64_t head = 0; head < heads; head++, q += dim) {
      if (call.q_weight != nullptr) {
        const float factor = inverse_size(q, dim, call.epsilon);
        scale_row(q, static_cast<const T*>(call.q_weight), dim, factor, call.offset != 0, q);
      }
      rotate(q, q, cosine, sine, call.half, dim);
    }
    const int64_t slot = call.slots[token];
    if (slot < 0) return;
    const int64_t place =
        slot / call.block_size * call.cache_block + slot % call.block_size * call.cache_slot;
    T* k = q;  // behind the last query head
    const T* v = k + kv_heads * dim;
    for (int64_t head = 0; head < kv_heads; head++, k += dim, v += dim) {
      T* k_to = static_cast<T*>(call.k_cache) + place + head * call.cache_head;
      T* v_to = static_cast<T*>(call.v_cache) + place + head * call.cache_head;
      if (call.k_weight != nullptr) {
        const float factor = inverse_size(k, dim, call.epsilon);
        scale_row(k, static_cast<const T*>(call.k_weight), dim, factor, call.offset != 0, k);
      }
      rotate(k, k_to, cosine, sine, call.half, dim);
      std::memcpy(v_to, v, dim * sizeof(T));
    }
  });
}

}  // namespace
}  // namespace quire

// All return the first token or row that was refused, plus 1, with nothing done; 0 when done.

QUIRE_EXPORT int64_t quire_rotary_store(const quire::RotaryCall* call) {
  for (int64_t token = 0; token < call->num_tokens; token++) {
    const int64_t slot = call->slots[token], position = call->positions[token];
    if (slot < -1 || slot >= call->num_slots) return token + 1;
    if (position < 0 || position >= call->num_positions) return token + 1;
  }
  if (call->is_bf16) {
    quire::rotate_and_store<quire::bf16>(*call);
  } else {
    quire::rotate_and_store<float>(*call);
  }
  return 0;
}

// Rows of `dim` elements of `size` bytes each; strides in elements.
QUIRE_EXPORT int64_t quire_store_kv(const char* k, const char* v, char* k_cache, char* v_cache,
                                    const int64_t* slots, int64_t num_tokens, int64_t num_heads,
                                    int64_t dim, int64_t size, int64_t num_slots,
                                    int64_t block_size, int64_t k_token, int64_t k_head,
                                    int64_t v_token, int64_t v_head, int64_t cache_block,
                                    int64_t cache_head, int64_t cache_slot) {
  for (int64_t token = 0; token < num_tokens; token++) {
    if (slots[token] < -1 || slots[token] >= num_slots) return token + 1;
  }
  quire::for_rows(num_tokens, num_heads * dim, [&](int64_t token) {
    const int64_t slot = slots[token];
    if (slot < 0) return;
    const int64_t place = slot / block_size * cache_block + slot % block_size * cache_slot;
    for (int64_t head = 0; head < num_heads; head++) {
      const int64_t to = (place + head * cache_head) * size;
      std::memcpy(k_cache + to, k + (token * k_token + head * k_head) * size, dim * size);
      std::memcpy(v_cache + to, v + (token * v_token + head * v_head) * size, dim * size);
    }
  });
  return 0;
}

QUIRE_EXPORT void quire_norm(const quire::NormCall* call) {
  const auto run = [call](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    quire::rms_norm(static_cast<T*>(call->out), static_cast<T*>(call->x),
                    static_cast<const T*>(call->delta), static_cast<const T*>(call->weight),
                    call->rows, call->dim, call->out_row, call->x_row, call->delta_row,
                    call->epsilon, call->offset != 0);
  };
  call->is_bf16 ? run(static_cast<quire::bf16*>(nullptr)) : run(static_cast<float*>(nullptr));
}

QUIRE_EXPORT void quire_gate(const quire::GateCall* call) {
  const auto run = [call](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    quire::gate(static_cast<T*>(call->out), static_cast<const T*>(call->both), call->rows,
                call->dim, call->out_row, call->both_row, call->gelu != 0);
  };
  call->is_bf16 ? run(static_cast<quire::bf16*>(nullptr)) : run(static_cast<float*>(nullptr));
}
