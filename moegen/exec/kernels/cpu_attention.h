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

// Where memory that will be wanted next is touched ahead, in the order in which it lies.
struct Ahead {
  const char* at = nullptr;
  const char* end = nullptr;
  int lines = 0;       // a step
  inline void step() {
    for (int i = 0; i < lines && at < end; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
  inline void span(const void* from, int64_t bytes, int64_t steps) {
    at = static_cast<const char*>(from);
    end = at + bytes;
    lines = static_cast<int>((bytes / 64 + steps) / (steps > 0 ? steps : 1));
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
