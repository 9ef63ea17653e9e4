// One call of paged attention, as Python hands it over; the fields stand in library.py once more.
#pragma once
#include <cstdint>

namespace quire {

struct AttentionCall {
  void* out;                       // [tokens, heads, dim], dense in its last dimension
  const void* q;                   // [tokens, heads, dim], likewise
  const void* k_cache;             // [blocks, kv heads, block size, dim]
  const void* v_cache;             // strides as k_cache
  const int32_t* tables;           // [rows, table_width]
  const int32_t* lens;             // [rows]
  const int32_t* starts;           // [rows + 1]
  const float* sinks;              // [heads] or null
  int64_t num_rows, num_tokens, num_heads, num_kv_heads, dim;
  int64_t num_blocks, block_size, table_stride, table_width;
  int64_t q_token, q_head, out_token, out_head;          // strides, in elements
  int64_t cache_block, cache_head, cache_slot;           // strides of both caches
  int64_t window;                  // 0: all keys
  int64_t is_bf16;
  float scale, softcap;            // softcap 0: none
};

// Why a call was refused; the row goes with it.
enum Refusal : int64_t { kNone = 0, kLengths = 1, kTableTooShort = 2, kBlockOutside = 3 };

}  // namespace quire
