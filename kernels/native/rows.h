// Calls of the operators over rows, as Python hands them over; the fields stand in library.py once
// more.
#pragma once
#include <cstdint>

namespace quire {

// The queries, keys and values of a step's tokens, and where the keys and values go.
struct RotaryCall {
  void* qkv;  // [tokens, (heads + 2 kv heads) dim]; queries are rotated in place
  void* k_cache;
  void* v_cache;
  const int64_t* slots;      // [tokens], -1: not stored
  const int64_t* positions;  // [tokens]
  const float* cosine;       // [positions, half]
  const float* sine;
  const void* q_weight;  // of a norm over each head, or null
  const void* k_weight;
  int64_t num_tokens, num_heads, num_kv_heads, dim, half, num_positions;
  int64_t num_slots, block_size;
  int64_t token;  // strides in elements
  int64_t cache_block, cache_head, cache_slot;
  int64_t is_bf16, offset;
  float epsilon;
};

// RMSNorm of x, to which delta is added in place first where there is one.
struct NormCall {
  void* out;  // [rows, dim]
  void* x;
  const void* delta;  // or null
  const void* weight;
  int64_t rows, dim, out_row, x_row, delta_row;  // strides in elements
  int64_t offset, is_bf16;
  float epsilon;
};

// act(left) * right of rows with both side by side.
struct GateCall {
  void* out;         // [rows, dim]
  const void* both;  // [rows, 2 dim]
  int64_t rows, dim, out_row, both_row;
  int64_t gelu, is_bf16;
};

}  // namespace quire
