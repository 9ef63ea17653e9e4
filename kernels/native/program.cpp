// A program: prepared calls of the other operators, one after the other in one call from Python.
//
// A layer is nine operators, and a model hundreds: what it costs to reach each of them from Python,
// and to get the interpreter's lock back after it, is an eighth of a decode step of one row. The
// arithmetic is that of the operators themselves.
#include "attention.h"
#include "lanes.h"
#include "rows.h"

namespace quire {

struct LinearCall;
struct QuantizedCall;

enum PartKind : int64_t { kNorm, kLinear, kQuantized, kRotary, kAttention, kGate };

// One operator. Calls of rotary store and attention are of a whole step: caches and weights of the
// heads' norms are put into them here.
struct Part {
  int64_t kind;
  const void* call;
  void* k_cache;
  void* v_cache;
  const void* q_weight;
  const void* k_weight;
};

}  // namespace quire

extern "C" {
int64_t quire_attention(const quire::AttentionCall* call);
int64_t quire_linear(const quire::LinearCall* call);
int64_t quire_quantized(const quire::QuantizedCall* call);
int64_t quire_rotary_store(const quire::RotaryCall* call);
void quire_norm(const quire::NormCall* call);
void quire_gate(const quire::GateCall* call);
}

namespace quire {
namespace {

int64_t run(const Part& part) {
  switch (part.kind) {
    case kNorm:
      quire_norm(static_cast<const NormCall*>(part.call));
      return 0;
    case kLinear:
      return quire_linear(static_cast<const LinearCall*>(part.call));
    case kQuantized:
      return quire_quantized(static_cast<const QuantizedCall*>(part.call));
    case kRotary: {
      RotaryCall call = *static_cast<const RotaryCall*>(part.call);
      call.k_cache = part.k_cache, call.v_cache = part.v_cache;
      call.q_weight = part.q_weight, call.k_weight = part.k_weight;
      return quire_rotary_store(&call);
    }
    case kAttention: {
      AttentionCall call = *static_cast<const AttentionCall*>(part.call);
      call.k_cache = part.k_cache, call.v_cache = part.v_cache;
      return quire_attention(&call);
    }
    default:
      quire_gate(static_cast<const GateCall*>(part.call));
      return 0;
  }
}

}  // namespace
}  // namespace quire

// How many of `count` parts were done: less where one was refused, whose answer is in `refusal`.
QUIRE_EXPORT int64_t quire_program(const quire::Part* parts, int64_t count, int64_t* refusal) {
  for (int64_t i = 0; i < count; i++) {
    *refusal = quire::run(parts[i]);
    if (*refusal != 0) return i;
  }
  return count;
}
