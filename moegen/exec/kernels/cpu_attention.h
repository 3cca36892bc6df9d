// What the variants of the decode attention share: the work's description, and number formats.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace moegen {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

// One call: R rows of one query token each. Strides are in elements of the row's dtype.
struct Job {
  int n_heads, n_kv, dk, dv;
  bool latent;         // one key for all heads, whose first dv columns are the value
  int64_t width;       // of a token in the store
  float scale;
  const float* sinks;  // [n_heads] or null: a logit that takes part in the softmax only
  const void* q;
  const void* new_kv;
  void* store;
  void* out;
  int64_t q_stride, new_stride, out_stride;
  float* partials;     // of rows that are split into several units
  int64_t partial_size;
};

// Tokens [lo, hi) of the store, all of one row.
struct Unit {
  int64_t row, lo, hi;
  bool last;           // holds the row's new token
  int64_t partial;     // its place among the partial results, or -1: the row is one unit
};

#ifndef TUNE_BLOCK_BYTES
#define TUNE_BLOCK_BYTES 32768
#endif
#ifndef TUNE_AHEAD_BYTES
#define TUNE_AHEAD_BYTES 65536
#endif
#ifndef TUNE_HINT
#define TUNE_HINT 2
#endif
#ifndef TUNE_LINES
#define TUNE_LINES 1
#endif
#ifndef TUNE_SLACK
#define TUNE_SLACK 8
#endif

// Where memory that will be wanted is touched ahead, in the order in which it lies: up to two
// stretches a block, a little at each step of the work.
struct Ahead {
  const char* at = nullptr;
  const char* end = nullptr;
  const char* then = nullptr;
  const char* then_end = nullptr;
  int64_t bytes = 0;   // a step
  inline void step() {
#if TUNE_HINT >= 0
    if (at >= end) {
      if (then == nullptr) return;
      at = then;
      end = then_end;
      then = nullptr;
    }
    const char* p = at;
    at = p + bytes;
    do {
      __builtin_prefetch(p, 0, TUNE_HINT);
      p += 64 * TUNE_LINES;
    } while (p < at);
#endif
  }
  // So much a step that `steps` touch all of `total`. What is left of before is given up.
  inline void each(int64_t total, int64_t steps) {
    constexpr int64_t each = 64 * TUNE_LINES;
    bytes = ((total + steps - 1) / steps + each - 1) / each * each;
    at = end = then = nullptr;
  }
  inline void add(const void* from, const void* to) {
    if (from >= to) return;
    const bool first = at == end;
    (first ? at : then) = static_cast<const char*>(from);
    (first ? end : then_end) = static_cast<const char*>(to);
  }
};

// Memory of one thread, kept from call to call.
struct Workspace {
  std::vector<float> memory;
  float* take(int64_t floats) {
    if (static_cast<int64_t>(memory.size()) < floats + 16) memory.resize(floats + 16);
    auto p = reinterpret_cast<uintptr_t>(memory.data());
    return reinterpret_cast<float*>((p + 63) / 64 * 64);
  }
};

// Says which unit comes after this one; asked once, near the end.
struct Next {
  virtual const Unit* operator()() = 0;
};

struct Variant {
  const char* name;
  // By dtype: float32, bfloat16, float16.
  void (*unit[3])(const Job&, const Unit&, Workspace&, Next&);
  void (*merge[3])(const Job&, const Unit* units, int n);
  uint64_t (*read)(const char*, int64_t);
};

}  // namespace moegen
