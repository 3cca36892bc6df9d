// The decode attention of one unit: a row's query over a stretch of that row's tokens.
//
// Included once a variant, within a namespace of its own and under its target, with
//   LANES   floats in a vector
//   LOAD_HALVES(p)  LANES float16 numbers at p as float32, where the target can
//   IN_REGISTER(v)  keeps a vector that is used several times from being loaded each time
//   DOT(sum, a, b)  adds the products of 2 LANES bfloat16 numbers, pair by pair, where the
//                   target can: scores of bfloat16 are made by it
//   ANY_ABOVE(a, b) whether a lane of a is above its fellow in b, where the target can
// Four query heads of a group and TILE_TOKENS tokens are taken together, so that what is read
// of K and of q is used several times while it is in registers. Scores lie [token][4 heads]:
// the maximum, the exponential and the sum over tokens are then plain vector operations.
//
// A block of tokens is read in the order in which it lies, as far as it can be: the keys of all
// heads, then the values of all heads.

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));

#define INLINE static inline __attribute__((always_inline))
#if defined(LANE_BY_LANE)
// Quick to compile, where no instruction shuffles.
template <class V, int N>
__attribute__((noinline)) V shuffled(const V& a, const V& b, const int (&of)[N]) {
  V v;
  for (int i = 0; i < N; ++i) v[i] = of[i] < N ? a[of[i]] : b[of[i] - N];
  return v;
}
#define SHUFFLE(a, b, ...) shuffled<vf>(a, b, {__VA_ARGS__})
#define SHUFFLE16(a, b, ...) shuffled<vw>(a, b, {__VA_ARGS__})
#define UNROLL
#elif defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define SHUFFLE16(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define UNROLL _Pragma("unroll")
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#define SHUFFLE16(a, b, ...) __builtin_shuffle(a, b, vw{__VA_ARGS__})
#define UNROLL _Pragma("GCC unroll 16")
#endif

constexpr int W = LANES;
constexpr int TILE_TOKENS = LANES == 16 ? 4 : 2;
constexpr int VALUE_VECTORS = LANES == 16 ? 4 : 2;
constexpr int BLOCK = 32;  // tokens between two looks at the maximum, at most
// Of a block: what lies in the first cache while all heads' keys and then values are read.
constexpr int64_t BLOCK_BYTES = 32 << 10;
constexpr int64_t AHEAD_BYTES = 32 << 10;  // between what is touched ahead and what is read
// A maximum is raised when it has grown by this factor of 2**: weights and sums are relative to it.
constexpr float SLACK = 8;

INLINE int64_t padded(int64_t n) { return (n + 2 * W - 1) / (2 * W) * (2 * W); }
INLINE vf all(float x) { return x - vf{}; }
INLINE vf load(const float* p) { vf v; std::memcpy(&v, p, sizeof v); return v; }
INLINE void keep(float* p, vf v) { std::memcpy(p, &v, sizeof v); }

// 2 W numbers at p as float32. Of bfloat16 the first vector gets the even and the second the
// odd ones, which takes an instruction each: sums over a head do not mind, and `store` undoes it.
INLINE void load(const float* p, vf& a, vf& b) {
  a = load(p);
  b = load(p + W);
}
INLINE void load(const bf16* p, vf& a, vf& b) {
  vu both;
  std::memcpy(&both, p, sizeof both);
  a = (vf)(both << 16);
  b = (vf)(both & 0xffff0000);
}
INLINE vf load_halves(const f16* p) {
#ifdef LOAD_HALVES
  return (vf)LOAD_HALVES(p);
#else
  vh half;
  std::memcpy(&half, p, sizeof half);
  const vu bits = __builtin_convertvector(half, vu);
  // The exponent is rebased by a product, which makes subnormal numbers right too.
  const vf rebased = (vf)((bits & 0x7fff) << 13) * all(0x1p112f);
  const vu special = (vu)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
  return (vf)((vu)rebased | special | (bits & 0x8000) << 16);
#endif
}
INLINE void load(const f16* p, vf& a, vf& b) {
  a = load_halves(p);
  b = load_halves(p + W);
}

INLINE float number(float x) { return x; }
INLINE float number(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
INLINE float number(f16 x) {
  const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
  float y;
  std::memcpy(&y, &magnitude, 4);
  y *= 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &y, 4);
  bits |= ((x.bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u) | uint32_t(x.bits & 0x8000) << 16;
  std::memcpy(&y, &bits, 4);
  return y;
}

INLINE void rounded(float x, float* to) { *to = x; }
INLINE void rounded(float x, bf16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  to->bits = (bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 | 0x40) : even;
}
INLINE void rounded(float x, f16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  // Below 2**-14 float16 numbers are 2**-24 apart, as float32 numbers above 0.5 are 2**-24
  // apart: adding 0.5 rounds to them.
  float small;
  std::memcpy(&small, &magnitude, 4);
  small += 0.5f;
  uint32_t tiny;
  std::memcpy(&tiny, &small, 4);
  const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  uint32_t half = magnitude < 113u << 23 ? tiny - 0x3f000000u : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? 0x7e00u : half;
  to->bits = half | sign;
}

// The inverse of `load`, rounding to nearest even.
INLINE void store(float* p, vf a, vf b) {
  keep(p, a);
  keep(p + W, b);
}
INLINE vu rounded_up(vf x) {
  const vu bits = (vu)x, even = bits + (0x7fff + (bits >> 16 & 1));
  const vu nan = (vu)((bits & 0x7fffffff) > 0x7f800000);
  return (nan & (bits | 0x400000)) | (~nan & even);
}
INLINE void store(bf16* p, vf a, vf b) {
  const vu both = rounded_up(a) >> 16 | (rounded_up(b) & 0xffff0000);
  std::memcpy(p, &both, sizeof both);
}
INLINE void store(f16* p, vf a, vf b) {
  float x[2 * W];
  keep(x, a);
  keep(x + W, b);
  for (int i = 0; i < 2 * W; ++i) rounded(x[i], p + i);
}

// 2**x for x <= 0; 0 below -126.5; NaN of NaN. Relative error below 1e-7.
INLINE vf exp2_of(vf x) {
  const vf magic = all(12582912.0f);  // 1.5 * 2**23: adding it rounds to whole numbers
  x = x < all(-127.0f) ? all(-127.0f) : x;
  const vf t = x + magic;
  const vf f = x - (t - magic);
  vf p = all(0.00015345810970757157f);
  p = p * f + all(0.0013399930903688073f);
  p = p * f + all(0.009618489071726799f);
  p = p * f + all(0.05550328642129898f);
  p = p * f + all(0.24022646248340607f);
  p = p * f + all(0.6931471824645996f);
  p = p * f + all(1.0f);
  return p * (vf)(((vi)t - (0x4b400000 - 127)) << 23);
}
INLINE float exp2_of(float x) { return exp2_of(all(x))[0]; }

// Sums of 4 vectors, four lanes at a time: in each 128 bits the sums of a, b, c and d there.
INLINE vf quads(vf a, vf b, vf c, vf d) {
#if LANES == 16
#define LOW 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31
#define HIGH 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29
#define LOW2 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30
#define HIGH2 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31
#elif LANES == 8
#define LOW 0, 1, 10, 11, 4, 5, 14, 15
#define HIGH 2, 3, 8, 9, 6, 7, 12, 13
#define LOW2 0, 2, 8, 10, 4, 6, 12, 14
#define HIGH2 1, 3, 9, 11, 5, 7, 13, 15
#else
#define LOW 0, 1, 6, 7
#define HIGH 2, 3, 4, 5
#define LOW2 0, 2, 4, 6
#define HIGH2 1, 3, 5, 7
#endif
#ifdef BLEND
  const vf ab = BLEND(0xcccc, a, b) + SHUFFLE(a, b, HIGH);
  const vf cd = BLEND(0xcccc, c, d) + SHUFFLE(c, d, HIGH);
#else
  const vf ab = SHUFFLE(a, b, LOW) + SHUFFLE(a, b, HIGH);
  const vf cd = SHUFFLE(c, d, LOW) + SHUFFLE(c, d, HIGH);
#endif
  return SHUFFLE(ab, cd, LOW2) + SHUFFLE(ab, cd, HIGH2);
#undef LOW
#undef HIGH
#undef LOW2
#undef HIGH2
}

// What 4 heads and TILE_TOKENS tokens sum up to, as [tokens][4].
INLINE void reduce(const vf (&sum)[4][TILE_TOKENS], float by, float* s) {
  constexpr int T = TILE_TOKENS;
  vf r[T];
  UNROLL for (int t = 0; t < T; ++t) r[t] = quads(sum[0][t], sum[1][t], sum[2][t], sum[3][t]);
#if LANES == 16
#ifdef BLEND
#define TWO(a, b) BLEND(0xff00, a, b)
#else
#define TWO(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31)
#endif
#define SECOND 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23
#define EVEN 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define ODD 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
  const vf x = TWO(r[0], r[1]) + SHUFFLE(r[0], r[1], SECOND);
  const vf y = TWO(r[2], r[3]) + SHUFFLE(r[2], r[3], SECOND);
  keep(s, (SHUFFLE(x, y, EVEN) + SHUFFLE(x, y, ODD)) * all(by));
#undef TWO
#undef SECOND
#undef EVEN
#undef ODD
#elif LANES == 8
  keep(s, (SHUFFLE(r[0], r[1], 0, 1, 2, 3, 8, 9, 10, 11) +
           SHUFFLE(r[0], r[1], 4, 5, 6, 7, 12, 13, 14, 15)) * all(by));
#else
  UNROLL for (int t = 0; t < T; ++t) keep(s + 4 * t, r[t] * all(by));
#endif
}

// Scores of H heads (q [4][dk], what is beyond H unread) and the tokens at k, to s [tokens][4].
template <int H, class E, class A>
INLINE void scores(const float* q, int64_t dk, const E* const* k, float by, float* s, A& ahead) {
  constexpr int T = TILE_TOKENS;
  vf sum[4][T] = {};
  for (int64_t d = 0; d < dk; d += 2 * W) {
    ahead.step();
    vf key[2][T];
    UNROLL for (int t = 0; t < T; ++t) load(k[t] + d, key[0][t], key[1][t]);
    UNROLL for (int half = 0; half < 2; ++half) {
      UNROLL for (int h = 0; h < H; ++h) {
        vf query = load(q + h * dk + d + half * W);
        IN_REGISTER(query);
        UNROLL for (int t = 0; t < T; ++t) sum[h][t] += query * key[half][t];
      }
    }
  }
  reduce(sum, by, s);
}
#ifdef DOT
template <int H, class A>
INLINE void scores(const bf16* q, int64_t dk, const bf16* const* k, float by, float* s,
                   A& ahead) {
  constexpr int T = TILE_TOKENS;
  vf sum[4][T] = {};
  for (int64_t d = 0; d < dk; d += 2 * W) {
    ahead.step();
    vu key[T];
    UNROLL for (int t = 0; t < T; ++t) std::memcpy(&key[t], k[t] + d, sizeof key[t]);
    UNROLL for (int h = 0; h < H; ++h) {
      vu query;
      std::memcpy(&query, q + h * dk + d, sizeof query);
      IN_REGISTER(query);
      UNROLL for (int t = 0; t < T; ++t) sum[h][t] = DOT(sum[h][t], query, key[t]);
    }
  }
  reduce(sum, by, s);
}
#endif

// o [4][dv] += p [n][4] times the n values at v, N vectors of columns from d on.
template <int H, int N, class E, class A>
INLINE void add_values(const float* p, const E* v, int64_t stride, int n, float* o, int64_t dv,
                       A& ahead) {
  if (n <= 0) __builtin_unreachable();
  vf sum[H][N];
  UNROLL for (int h = 0; h < H; ++h) {
    UNROLL for (int i = 0; i < N; ++i) sum[h][i] = load(o + h * dv + i * W);
  }
  for (int t = 0; t < n; ++t) {
    ahead.step();
    vf value[N];
    UNROLL for (int i = 0; i < N; i += 2) {
      load(v + t * stride + i * W, value[i], value[i + 1]);
    }
    UNROLL for (int h = 0; h < H; ++h) {
      const vf weight = all(p[4 * t + h]);
      UNROLL for (int i = 0; i < N; ++i) sum[h][i] += weight * value[i];
    }
  }
  UNROLL for (int h = 0; h < H; ++h) {
    UNROLL for (int i = 0; i < N; ++i) keep(o + h * dv + i * W, sum[h][i]);
  }
}

// The state of up to four query heads that share a key. Lane i is of head i % 4.
struct Heads {
  void* q;       // [4][dk], as keys are multiplied: float32 or bfloat16
  float* o;      // [4][dv]
  float* s;      // [BLOCK + TILE_TOKENS][4]: scores, then weights
  float max[W];  // what the weights are relative to, the same in all lanes of a head
  float sum[W];  // of weights, by lane
};

INLINE bool any_above(vf a, vf b) {
#ifdef ANY_ABOVE
  return ANY_ABOVE(a, b);
#else
  const vi above = a > b;
  int any = 0;
  for (int i = 0; i < W; ++i) any |= above[i];
  return any != 0;
#endif
}

// Weights and values so far, relative to new maxima.
__attribute__((noinline)) void raise(Heads& state, vf top, int64_t dv) {
  const vf old = load(state.max);
  const vf now = top > old + all(SLACK) ? top : old;
  // What had no maximum has no weights either.
  const vf less = exp2_of(old < now ? old - now : vf{});
  keep(state.max, now);
  keep(state.sum, load(state.sum) * less);
  for (int h = 0; h < 4; ++h) {
    if (less[h] == 1.0f) continue;
    float* o = state.o + h * dv;
    for (int64_t d = 0; d < dv; d += W) keep(o + d, load(o + d) * all(less[h]));
  }
}

// Scores of n tokens to weights.
INLINE void soften(Heads& state, int n, int64_t dv) {
  float* s = state.s;
  const int end = (4 * n + W - 1) / W * W;
  for (int i = 4 * n; i < end; ++i) s[i] = -__builtin_inff();
  vf top = load(s);
  for (int i = W; i < end; i += W) {
    const vf x = load(s + i);
    top = x > top ? x : top;
  }
#if LANES == 16
  const vf far = SHUFFLE(top, top, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  top = far > top ? far : top;
  const vf near = SHUFFLE(top, top, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  top = near > top ? near : top;
#elif LANES == 8
  const vf near = SHUFFLE(top, top, 4, 5, 6, 7, 0, 1, 2, 3);
  top = near > top ? near : top;
#endif
  if (any_above(top, load(state.max) + all(SLACK))) raise(state, top, dv);
  const vf level = load(state.max);
  vf sum = load(state.sum);
  for (int i = 0; i < end; i += W) {
    vf p = exp2_of(load(s + i) - level);
    sum += p;
    keep(s + i, p);
  }
  keep(state.sum, sum);
}

// The weights of the next n <= BLOCK tokens, whose keys are at k.
template <int H, class Q, class E, class A>
__attribute__((noinline)) void attend_keys(Heads& state, int64_t dk, int64_t dv, const E* k,
                                           int64_t stride, float by, int n, A& ahead) {
  const Q* q = static_cast<const Q*>(state.q);
  for (int t = 0; t < n; t += TILE_TOKENS) {
    // Beyond the end the last token stands in: what lies there is no one's.
    const E* at[TILE_TOKENS];
    UNROLL for (int i = 0; i < TILE_TOKENS; ++i) {
      at[i] = k + (t + i < n ? t + i : n - 1) * stride;
    }
    scores<H>(q, dk, at, by, state.s + 4 * t, ahead);
  }
  soften(state, n, dv);
}

// Adds their values, which are at v.
template <int H, class E, class A>
__attribute__((noinline)) void attend_values(Heads& state, int64_t dv, const E* v, int64_t stride,
                                             int n, A& ahead) {
  int64_t d = 0;
  for (; d + VALUE_VECTORS * W <= dv; d += VALUE_VECTORS * W) {
    add_values<H, VALUE_VECTORS>(state.s, v + d, stride, n, state.o + d, dv, ahead);
  }
  for (; d < dv; d += 2 * W) add_values<H, 2>(state.s, v + d, stride, n, state.o + d, dv, ahead);
}

// Whether heads fill vectors: then numbers lie in scratch as `load` leaves them, else in order.
INLINE bool fills(const Job& job) { return job.dk % (2 * W) == 0 && job.dv % (2 * W) == 0; }

// n numbers times `by`, as float32, zeros behind them up to whole vectors.
template <class E>
INLINE void widen(bool fill, const E* from, int64_t n, float by, float* to) {
  if (fill) {
    for (int64_t i = 0; i < n; i += 2 * W) {
      vf a, b;
      load(from + i, a, b);
      store(to + i, a * all(by), b * all(by));
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) to[i] = number(from[i]) * by;
  for (int64_t i = n, end = padded(n); i < end; ++i) to[i] = 0.0f;
}

// What a head's maximum, sum and weighted values come to.
template <class E>
INLINE void finish(const Job& job, int head, float max, float sum, const float* o, E* to) {
  float by = 1.0f;
  if (job.sinks) {
    const float sink = job.sinks[head] * 1.44269504088896341f;
    const float top = sink > max ? sink : max;
    by = exp2_of(max - top);
    sum = sum * by + exp2_of(sink - top);
  }
  by /= sum;
  if (fills(job)) {
    for (int i = 0; i < job.dv; i += 2 * W) {
      store(to + i, load(o + i) * all(by), load(o + i + W) * all(by));
    }
  } else {
    for (int i = 0; i < job.dv; ++i) rounded(o[i] * by, to + i);
  }
}

// What queries are multiplied as.
template <class E>
struct QueryOf { using type = float; };
#ifdef DOT
template <>
struct QueryOf<bf16> { using type = bf16; };
#endif

// The key heads [first, end) that a unit reads.
struct KeyHeads {
  int first, end;
  KeyHeads(const Job& job, const Unit& u)
      : first(u.first_tile / job.group_tiles()), end((u.end_tile - 1) / job.group_tiles() + 1) {}
};

// Tokens [from, to) of a unit, as far as its heads go.
template <class E>
INLINE void touch(const Job& job, const Unit& u, int64_t from, int64_t to, Ahead& ahead) {
  if (from >= to) return;
  constexpr int64_t size = sizeof(E);
  const int64_t token_bytes = job.width * size;
  const char* at = static_cast<const char*>(job.store) + from * token_bytes;
  const KeyHeads own(job, u);
  const int n = own.end - own.first;
  if (n == job.n_kv) {
    ahead.add({at, (to - from) * token_bytes, 0, 1});
    return;
  }
  const int64_t k = own.first * job.dk, v = job.n_kv * job.dk + own.first * job.dv;
  ahead.add({at + k * size, n * job.dk * size, token_bytes, to - from});
  ahead.add({at + v * size, n * job.dv * size, token_bytes, to - from});
}

// The tokens [from, to) that are touched ahead, as if the next unit's followed this one's.
template <class E>
INLINE void look_ahead(const Job& job, const Unit& u, int64_t from, int64_t to, Ahead& ahead,
                       Next& next, const Unit*& after, bool& asked) {
  touch<E>(job, u, from, to < u.hi ? to : u.hi, ahead);
  if (to <= u.hi) return;
  if (!asked) after = next();
  asked = true;
  if (!after) return;
  const int64_t skip = from < u.hi ? 0 : from - u.hi, end = after->lo + to - u.hi;
  touch<E>(job, *after, after->lo + skip, end < after->hi ? end : after->hi, ahead);
}

// Writes the new token where the unit ends with it: only what this unit reads of it, as others may
// be reading the rest.
template <class E>
INLINE void append_new_token(const Job& job, const Unit& u, const KeyHeads& own, E* store,
                             const E* fresh) {
  if (!u.last) return;
  fresh += u.row * job.new_stride;
  E* to = store + (u.hi - 1) * job.width;
  const int64_t n = own.end - own.first, k = own.first * job.dk;
  std::memcpy(static_cast<void*>(to + k), fresh + k, n * job.dk * sizeof(E));
  if (job.latent) return;
  const int64_t v = job.n_kv * job.dk + own.first * job.dv;
  std::memcpy(static_cast<void*>(to + v), fresh + v, n * job.dv * sizeof(E));
}

template <class E>
void unit(const Job& job, const Unit& u, Workspace& space, Next& next) {
  const int group = job.n_heads / job.n_kv, tiles = job.group_tiles();
  const int n_tiles = u.end_tile - u.first_tile;
  const KeyHeads own(job, u);
  const int64_t dk = padded(job.dk), dv = padded(job.dv), width = job.width;
  // Keys and values that many heads read, or that do not fill vectors, are made float32 once a
  // block.
  using Q = typename QueryOf<E>::type;
  const bool fill = fills(job), dots = fill && sizeof(Q) == 2;
  const bool direct_k = fill && (dots || sizeof(E) == 4 || tiles == 1);
  const bool direct_v = fill && (sizeof(E) == 4 || tiles <= 2);
  const bool wide_both = job.latent && !direct_k && !direct_v;  // the value is the key's beginning
  const int64_t heads_size = (int64_t(sizeof(Heads)) + 63) / 64 * 16;
  constexpr int64_t s_size = 4 * (BLOCK + TILE_TOKENS);
  float* at = space.take(n_tiles * (heads_size + 4 * (dk + dv) + s_size) + BLOCK * (dk + dv));
  auto heads = [=](int i) { return reinterpret_cast<Heads*>(at + i * heads_size); };
  float* ss = at + n_tiles * heads_size;
  float* qs = ss + n_tiles * s_size;
  float* os = qs + n_tiles * 4 * dk;
  float* wide_k = os + n_tiles * 4 * dv;
  float* wide_v = wide_k + BLOCK * dk;

  E* store = static_cast<E*>(job.store);
  append_new_token(job, u, own, store, static_cast<const E*>(job.new_kv));
  const E* q = static_cast<const E*>(job.q) + u.row * job.q_stride;
  const float scale = job.scale * 1.44269504088896341f;  // scores are exponents of 2
  std::memset(os, 0, n_tiles * 4 * dv * sizeof(float));
  std::memset(qs, 0, n_tiles * 4 * dk * sizeof(float));
  for (int i = 0; i < n_tiles; ++i) {
    Heads& state = *heads(i);
    state.q = qs + i * 4 * dk;
    state.o = os + i * 4 * dv;
    state.s = ss + i * s_size;
    const int tile = u.first_tile + i, first = tile % tiles * 4;
    const int n = group - first < 4 ? group - first : 4;
    const E* from = q + (tile / tiles * group + first) * job.dk;
    if (dots) std::memcpy(state.q, from, n * dk * sizeof(E));
    else {
      float* to = qs + i * 4 * dk;
      for (int h = 0; h < n; ++h) widen(fill, from + h * job.dk, job.dk, 1.0f, to + h * dk);
    }
    for (int w = 0; w < W; ++w) state.max[w] = -__builtin_inff();
    std::memset(state.sum, 0, sizeof state.sum);
  }

  const int64_t token_bytes = width * sizeof(E);
  int64_t block = BLOCK_BYTES / token_bytes / 4 * 4;
  block = block < 4 ? 4 : block > BLOCK ? BLOCK : block;
  const int64_t far = (AHEAD_BYTES + token_bytes - 1) / token_bytes;
  const int64_t columns = (dv / W + VALUE_VECTORS - 1) / VALUE_VECTORS;
  const Unit* after = nullptr;
  bool asked = false;
  Ahead ahead;
  NoAhead not_here;
  for (int64_t t = u.lo; t < u.hi; t += block) {
    const int n = static_cast<int>(u.hi - t < block ? u.hi - t : block);
    // A step at each few products, or at each token that is made float32.
    const int64_t wide_steps = n * (own.end - own.first);
    const int64_t key_steps = n_tiles * ((n + TILE_TOKENS - 1) / TILE_TOKENS * (dk / (2 * W)));
    const int64_t steps = (!direct_k ? wide_steps : direct_v ? key_steps : 0) +
                          (wide_both ? 0 : !direct_v ? wide_steps : n_tiles * columns * n);
    ahead.each(n * token_bytes * (own.end - own.first) / job.n_kv, steps,
               own.end - own.first < job.n_kv);
    look_ahead<E>(job, u, t + far, t + far + n, ahead, next, after, asked);
    const E* token = store + t * width;
    // The tiles of key head j, counted from the unit's first.
    auto tiles_of = [&](int j, int& i, int& end) {
      i = j * tiles - u.first_tile;
      end = i + tiles < n_tiles ? i + tiles : n_tiles;
      i = i > 0 ? i : 0;
    };
    for (int j = own.first, i, end; j < own.end; ++j) {
      const E* k = token + int64_t(j) * job.dk;
      if (!direct_k) {
        for (int i = 0; i < n; ++i) {
          ahead.step();
          widen(fill, k + i * width, job.dk, 1.0f, wide_k + i * dk);
        }
      }
      for (tiles_of(j, i, end); i < end; ++i) {
        Heads& state = *heads(i);
        const bool one = group - 4 * ((u.first_tile + i) % tiles) == 1;
        if (!direct_k) {
          (one ? attend_keys<1, float, float, NoAhead> : attend_keys<4, float, float, NoAhead>)(
              state, dk, dv, wide_k, dk, scale, n, not_here);
        } else if (!direct_v) {
          (one ? attend_keys<1, Q, E, NoAhead> : attend_keys<4, Q, E, NoAhead>)(
              state, dk, dv, k, width, scale, n, not_here);
        } else {
          (one ? attend_keys<1, Q, E, Ahead> : attend_keys<4, Q, E, Ahead>)(
              state, dk, dv, k, width, scale, n, ahead);
        }
      }
    }
    const E* values = job.latent ? token : token + int64_t(job.n_kv) * job.dk;
    for (int j = own.first, i, end; j < own.end; ++j) {
      const E* v = values + int64_t(j) * job.dv;
      if (!direct_v && !wide_both) {
        for (int i = 0; i < n; ++i) {
          ahead.step();
          widen(fill, v + i * width, job.dv, 1.0f, wide_v + i * dv);
        }
      }
      for (tiles_of(j, i, end); i < end; ++i) {
        Heads& state = *heads(i);
        const bool one = group - 4 * ((u.first_tile + i) % tiles) == 1;
        if (!direct_v) {
          (one ? attend_values<1, float, NoAhead> : attend_values<4, float, NoAhead>)(
              state, dv, wide_both ? wide_k : wide_v, wide_both ? dk : dv, n, not_here);
        } else {
          (one ? attend_values<1, E, Ahead> : attend_values<4, E, Ahead>)(state, dv, v, width, n,
                                                                          ahead);
        }
      }
    }
  }

  float* partial = u.partial < 0 ? nullptr : job.partials + u.partial * job.partial_size;
  E* out = static_cast<E*>(job.out) + u.row * job.out_stride;
  for (int i = 0; i < n_tiles; ++i) {
    const int tile = u.first_tile + i, first = tile % tiles * 4;
    const Heads& state = *heads(i);
    for (int h = 0; h < 4 && first + h < group; ++h) {
      const int head = tile / tiles * group + first + h;
      float sum = 0.0f;
      for (int w = h; w < W; w += 4) sum += state.sum[w];
      const float* o = state.o + h * dv;
      if (!partial) {
        finish(job, head, state.max[h], sum, o, out + int64_t(head) * job.dv);
      } else {
        partial[2 * head] = state.max[h];
        partial[2 * head + 1] = sum;
        std::memcpy(partial + 2 * job.n_heads + int64_t(head) * job.dv, o, job.dv * sizeof(float));
      }
    }
  }
}

// The partial results of one row's units, in the order of their tokens, to its output.
template <class E>
void merge(const Job& job, const Unit* units, int n) {
  std::vector<float> total(job.dv);
  E* out = static_cast<E*>(job.out) + units[0].row * job.out_stride;
  const float* first = job.partials + units[0].partial * job.partial_size;
  for (int head = 0; head < job.n_heads; ++head) {
    float max = -__builtin_inff(), sum = 0.0f;
    for (int i = 0; i < n; ++i) {
      const float x = first[i * job.partial_size + 2 * head];
      max = x > max ? x : max;
    }
    std::fill(total.begin(), total.end(), 0.0f);
    for (int i = 0; i < n; ++i) {
      const float* part = first + i * job.partial_size;
      const float by = exp2_of(part[2 * head] - max);
      const float* o = part + 2 * job.n_heads + int64_t(head) * job.dv;
      sum += part[2 * head + 1] * by;
      for (int d = 0; d < job.dv; ++d) total[d] += o[d] * by;
    }
    finish(job, head, max, sum, total.data(), out + int64_t(head) * job.dv);
  }
}

// Reads memory as fast as vectors can; what it gives only keeps the reads from being left out.
uint64_t read(const char* p, int64_t nbytes) {
  vi sum[8] = {};
  int64_t i = 0;
  for (; i + int64_t(sizeof sum) <= nbytes; i += sizeof sum) {
    UNROLL for (int j = 0; j < 8; ++j) {
      vi x;
      std::memcpy(&x, p + i + j * sizeof x, sizeof x);
      sum[j] ^= x;
    }
  }
  uint64_t check = 0;
  for (; i < nbytes; ++i) check += static_cast<unsigned char>(p[i]);
  for (int j = 0; j < 8; ++j) {
    for (int w = 0; w < W; ++w) check += static_cast<uint32_t>(sum[j][w]);
  }
  return check;
}

const Variant variant = {
    VARIANT_NAME, {unit<float>, unit<bf16>, unit<f16>}, {merge<float>, merge<bf16>, merge<f16>}, read};

#if defined(TILE_VARIANT_NAME)
#include "cpu_attention_tiles.h"
#endif

#undef INLINE
#undef SHUFFLE
#undef SHUFFLE16
#undef UNROLL
