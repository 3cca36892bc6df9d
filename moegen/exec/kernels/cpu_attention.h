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

  // Query heads are taken four at a time: so many tiles share a key, and so many are there.
  int group_tiles() const { return (n_heads / n_kv + 3) / 4; }
  int tiles() const { return group_tiles() * n_kv; }
};

// Tokens [lo, hi) of the store, all of one row, for some of its query heads.
struct Unit {
  int64_t row, lo, hi;
  bool last;               // ends with the row's new token, which it writes
  int64_t partial;         // its place among the partial results, or -1: the row is one stretch
  int first_tile, end_tile;  // of query heads; but one key head's are of one unit
};

// Memory that will be wanted, touched ahead in the order in which it will be read, a little at
// each step of the work.
class Ahead {
 public:
  // `n` pieces of so many bytes each, `stride` bytes apart.
  struct Pieces {
    const char* at;
    int64_t bytes, stride, n;
  };

  inline void step() {
    if (at_ >= end_ && !turn()) return;
    const char* p = at_;
    at_ = p + bytes_;
    do {
      __builtin_prefetch(p, 0, 2);  // into the second cache: the first holds the block
      p += LINE;
    } while (p < at_);
  }

  // So much a step that `steps` touch all of `total`. What is left of before is given up.
  // Pieces end within a step: a line more makes up for it.
  inline void each(int64_t total, int64_t steps, bool in_pieces) {
    bytes_ = ((total + steps - 1) / steps + LINE - 1) / LINE * LINE + (in_pieces ? LINE : 0);
    at_ = end_ = nullptr;
    have_ = now_ = 0;
  }

  inline void add(const Pieces& pieces) { pieces_[have_++] = pieces; }

 private:
  static constexpr int64_t LINE = 64;

  bool turn() {
    for (; now_ < have_; ++now_) {
      Pieces& p = pieces_[now_];
      if (p.n == 0) continue;
      p.n -= 1;
      at_ = p.at;
      end_ = at_ + p.bytes;
      p.at += p.stride;
      return true;
    }
    return false;
  }

  const char* at_ = nullptr;
  const char* end_ = nullptr;
  int64_t bytes_ = 0;  // a step
  Pieces pieces_[4];   // keys and values, of this unit and of the next
  int have_ = 0, now_ = 0;
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
