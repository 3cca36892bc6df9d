// The decode attention of one unit with matrix tiles (AMX), for bfloat16.
//
// Included by cpu_attention_kernel.h, whose 16 lanes it needs, with
//   TILE_VARIANT_NAME
//   TILE_CONFIG(p), TILE_RELEASE()
//   TILE_ZERO(n), TILE_LOAD(n, p, stride), TILE_STORE(n, p, stride)
//   TILE_DOT(c, a, b)  c [m][n] += a [m][k] b [k][n], k in pairs of bfloat16
// A tile holds 16 rows of 64 bytes. Keys are loaded from where they lie: 16 tokens by 32 numbers
// are a factor as they are, and queries, which are used again and again, are laid out to suit.
// Values need tokens in pairs: two tokens' numbers are interleaved on the way. Weights are split
// into two bfloat16 numbers each, whose sum is the weight to 2**-17, so that they cost what
// values are rounded to no accuracy.

constexpr int PAIRED = 32;  // tokens that a tile of values holds
constexpr int PAIRS = PAIRED / 2;
// Tokens between two looks at the maximum. Of more pages at a time the processor loses track; but
// many heads that share a key are worth a longer block.
constexpr int TILE_BLOCK = 32, LATENT_BLOCK = 64;
// Between what is touched ahead and what is read, and a block at least.
constexpr int64_t TILE_AHEAD_BYTES = 64 << 10;

typedef uint16_t vw __attribute__((vector_size(64)));  // 32 bfloat16 numbers

// HEADS share a tile's columns: as many as a group has, made up to 4, 8 or 16.
template <int HEADS>
struct Tiled {
  static constexpr int TOKENS = 16 / HEADS;  // of a vector of scores [token][head]
  // Rows of weights and of outputs: both halves of the weights lie in one tile where they can.
  static constexpr int ROWS = HEADS == 16 ? 16 : 2 * HEADS;
  static constexpr int HALVES = HEADS == 16 ? 2 : 1;  // tiles of weights for PAIRED tokens

  struct State {
    float max[16];  // what weights are relative to; lane i is of head i % HEADS
    float sum[16];  // of weights, by lane
    float* o;       // [dv / 16][ROWS][16]
    uint32_t* q;    // [dk / 32][16 pairs][HEADS]
    uint32_t* p;    // [LATENT_BLOCK / PAIRED][HALVES][ROWS][PAIRS]
    int first, n;   // heads
  };

  static constexpr int64_t p_size = LATENT_BLOCK / PAIRED * HALVES * ROWS * PAIRS;

  // The shapes of tiles: 0 scores, 1 keys, 2 queries, 3 weights, 4 and 5 values, 6 and 7 outputs.
  static void configure() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {4 * HEADS, 64, 4 * HEADS, 4 * PAIRS, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, ROWS, PAIRS, PAIRS, ROWS, ROWS};
    } shapes;
    TILE_CONFIG(&shapes);
  }

  // Blocks of D numbers of a row and their fellows of the row D / TOKENS further on change places:
  // a matrix of 16 / TOKENS rows and columns of blocks is turned by all D in turn.
#define SWAP(D, X, Y)                              \
  UNROLL for (int i = 0; i < HEADS; ++i) {         \
    if ((i * TOKENS) & D) continue;                \
    const vf x = row[i], y = row[i + D / TOKENS];  \
    row[i] = SHUFFLE(x, y, X);                     \
    row[i + D / TOKENS] = SHUFFLE(x, y, Y);        \
  }
#define X1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define Y1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define X2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define Y2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define X4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define Y4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define X8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define Y8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define OF4 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15
#define OF8 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15

  // Pairs of weights [PAIRS][HEADS], to [HEADS][PAIRS].
  INLINE void turn(vf (&row)[HEADS], uint32_t* to) {
    UNROLL for (int i = 0; i < HEADS; ++i) {
      if constexpr (HEADS == 4) row[i] = SHUFFLE(row[i], row[i], OF4);
      if constexpr (HEADS == 8) row[i] = SHUFFLE(row[i], row[i], OF8);
    }
    if constexpr (TOKENS <= 1) { SWAP(1, X1, Y1) }
    if constexpr (TOKENS <= 2) { SWAP(2, X2, Y2) }
    SWAP(4, X4, Y4)
    SWAP(8, X8, Y8)
    UNROLL for (int i = 0; i < HEADS; ++i) std::memcpy(to + PAIRS * i, &row[i], 64);
  }
#undef SWAP
#undef X1
#undef Y1
#undef X2
#undef Y2
#undef X4
#undef Y4
#undef X8
#undef Y8
#undef OF4
#undef OF8

  // Which two tokens of PAIRED the i-th pair is of: `turn` needs no more of them.
  INLINE int first_of(int pair) { return pair / TOKENS * 2 * TOKENS + pair % TOKENS; }
  INLINE int second_of(int pair) { return first_of(pair) + TOKENS; }

  __attribute__((noinline)) static void raise(State& state, vf top, int64_t dv) {
    const vf old = load(state.max);
    const vf now = top > old + all(SLACK) ? top : old;
    const vf less = exp2_of(old < now ? old - now : vf{});
    keep(state.max, now);
    keep(state.sum, load(state.sum) * less);
    for (int h = 0; h < HEADS; ++h) {
      if (less[h] == 1.0f) continue;
      for (int r = h; r < ROWS; r += HEADS) {
        for (int64_t tile = 0; tile < dv / 16; ++tile) {
          float* o = state.o + (tile * ROWS + r) * 16;
          keep(o, load(o) * all(less[h]));
        }
      }
    }
  }

  // Scores [tokens][HEADS] of n tokens, to weights; those of PAIRED tokens at a time are made up
  // with zeros.
  template <class A>
  static void soften(State& state, float* s, int n, float by, int64_t dv, A& ahead) {
    const int tokens = (n + PAIRED - 1) / PAIRED * PAIRED;
    for (int i = 0; i < n * HEADS; i += 16) keep(s + i, load(s + i) * all(by));
    for (int i = n * HEADS; i < tokens * HEADS; ++i) s[i] = -__builtin_inff();
    vf top = load(s);
    for (int i = 16; i < n * HEADS; i += 16) {
      const vf x = load(s + i);
      top = x > top ? x : top;
    }
    if (TOKENS >= 2) {
      const vf far = SHUFFLE(top, top, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
      top = far > top ? far : top;
    }
    if (TOKENS >= 4) {
      const vf near = SHUFFLE(top, top, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
      top = near > top ? near : top;
    }
    if (any_above(top, load(state.max) + all(SLACK))) raise(state, top, dv);
    const vf level = load(state.max);
    vf sum = load(state.sum);
    for (int t = 0; t < tokens; t += PAIRED) {
      vf large[HEADS], small[HEADS];
      UNROLL for (int i = 0; i < HEADS; ++i) {
        ahead.step();
        const float* at = s + t * HEADS + 32 * i;
        const vf a = exp2_of(load(at) - level), b = exp2_of(load(at + 16) - level);
        sum += a;
        sum += b;
        const vu a1 = rounded_up(a) & 0xffff0000, b1 = rounded_up(b) & 0xffff0000;
        const vu a2 = rounded_up(a - (vf)a1), b2 = rounded_up(b - (vf)b1);
        large[i] = (vf)(a1 >> 16 | b1);
        small[i] = (vf)(a2 >> 16 | (b2 & 0xffff0000));
      }
      uint32_t* p = state.p + t / PAIRED * HALVES * ROWS * PAIRS;
      turn(large, p);
      turn(small, p + HEADS * PAIRS);
    }
    keep(state.sum, sum);
  }

  // Scores of n tokens at k, to s.
  template <class A>
  static void keys(const State& state, int64_t dk, const bf16* k, int64_t width, int n, bf16* rest,
                   float* s, A& ahead) {
    for (int t = 0; t < n; t += 16) {
      const bf16* token = k + t * width;
      int64_t stride = width * sizeof(bf16);
      if (n - t < 16) {
        // Beyond the end lies what is no one's: zeros stand in.
        for (int i = 0; i < 16; ++i) {
          void* to = rest + i * dk;
          if (t + i < n) std::memcpy(to, token + i * width, dk * sizeof(bf16));
          else std::memset(to, 0, dk * sizeof(bf16));
        }
        token = rest;
        stride = dk * sizeof(bf16);
      }
      TILE_ZERO(0);
      for (int64_t d = 0; d < dk; d += 32) {
        ahead.step();
        TILE_LOAD(1, token + d, stride);
        TILE_LOAD(2, state.q + d / 32 * 16 * HEADS, 4 * HEADS);
        ahead.step();
        TILE_DOT(0, 1, 2);
      }
      TILE_STORE(0, s + t * HEADS, 4 * HEADS);
    }
  }

  // PAIRED tokens' 32 values each at v, to two tiles: of each 8 columns the first and the last 4.
  template <class A>
  INLINE void pair_up(const bf16* v, int64_t width, int n, uint32_t* to, A& ahead) {
    for (int i = 0; i < PAIRS; ++i) {
      if (i % 4 == 0) ahead.step();
      const int first = first_of(i), second = second_of(i);
      vw a{}, b{};
      if (first < n) std::memcpy(&a, v + first * width, 64);
      if (second < n) std::memcpy(&b, v + second * width, 64);
#define LOW                                                                                     \
  0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17, 49, 18, 50, 19, 51, 24, \
      56, 25, 57, 26, 58, 27, 59
#define HIGH                                                                                     \
  4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52, 21, 53, 22, 54, 23, 55, 28, \
      60, 29, 61, 30, 62, 31, 63
      const vw low = SHUFFLE16(a, b, LOW), high = SHUFFLE16(a, b, HIGH);
#undef LOW
#undef HIGH
      std::memcpy(to + 16 * i, &low, 64);
      std::memcpy(to + 16 * (PAIRS + i), &high, 64);
    }
  }

  // Adds to two tiles of outputs the weights of n tokens times their values, which are paired up.
  template <class A>
  INLINE void values(const State& state, int64_t d, const uint32_t* v, int n, A& ahead) {
    ahead.step();
    float* o = state.o + d / 16 * ROWS * 16;
    TILE_LOAD(6, o, 64);
    TILE_LOAD(7, o + ROWS * 16, 64);
    const uint32_t* p = state.p;
    for (int t = 0; t < n; t += PAIRED, v += 32 * PAIRS) {
      TILE_LOAD(4, v, 64);
      TILE_LOAD(5, v + 16 * PAIRS, 64);
      for (int half = 0; half < HALVES; ++half, p += ROWS * PAIRS) {
        TILE_LOAD(3, p, 4 * PAIRS);
        TILE_DOT(6, 3, 4);
        TILE_DOT(7, 3, 5);
      }
    }
    TILE_STORE(6, o, 64);
    TILE_STORE(7, o + ROWS * 16, 64);
  }

  static void unit(const Job& job, const Unit& u, Workspace& space, Next& next) {
    const int group = job.n_heads / job.n_kv, tiles = job.group_tiles();
    const KeyHeads own(job, u);
    const int64_t dk = job.dk, dv = job.dv, width = job.width;
    auto first_head = [&](int j) { return 4 * std::max(0, u.first_tile - j * tiles); };
    auto end_head = [&](int j) { return std::min(group, 4 * (u.end_tile - j * tiles)); };
    int n_states = 0;
    for (int j = own.first; j < own.end; ++j) {
      n_states += (end_head(j) - first_head(j) + HEADS - 1) / HEADS;
    }
    // Each begins at a whole line of the cache.
    constexpr int64_t state_size = (int64_t(sizeof(State)) + 63) / 64 * 16;
    const int64_t o_size = dv * ROWS, q_size = dk / 2 * HEADS;
    const int64_t each = state_size + o_size + q_size + p_size;
    const int64_t s_size = LATENT_BLOCK * HEADS, v_size = LATENT_BLOCK * 16;
    float* at = space.take(n_states * each + s_size + v_size + 8 * dk);
    float* s = at + n_states * each;
    uint32_t* paired = reinterpret_cast<uint32_t*>(s + s_size);
    bf16* rest = reinterpret_cast<bf16*>(s + s_size + v_size);  // [16][dk]
    auto state_at = [=](int i) { return reinterpret_cast<State*>(at + i * each); };

    bf16* store = static_cast<bf16*>(job.store);
    append_new_token(job, u, own, store, static_cast<const bf16*>(job.new_kv));
    const bf16* q = static_cast<const bf16*>(job.q) + u.row * job.q_stride;
    const float scale = job.scale * 1.44269504088896341f;  // scores are exponents of 2
    for (int j = own.first, i = 0; j < own.end; ++j) {
      for (int h = first_head(j); h < end_head(j); h += HEADS, ++i) {
        float* memory = at + i * each;
        State& state = *state_at(i);
        for (int w = 0; w < 16; ++w) state.max[w] = -__builtin_inff();
        std::memset(state.sum, 0, sizeof state.sum);
        state.o = memory + state_size;
        state.q = reinterpret_cast<uint32_t*>(state.o + o_size);
        state.p = state.q + q_size;
        state.first = j * group + h;
        state.n = std::min(HEADS, end_head(j) - h);
        std::memset(state.o, 0, o_size * sizeof(float));
        std::memset(state.q, 0, q_size * sizeof(uint32_t));
        for (int x = 0; x < state.n; ++x) {
          const bf16* from = q + int64_t(state.first + x) * dk;
          for (int64_t pair = 0; pair < dk / 2; ++pair) {
            std::memcpy(state.q + pair * HEADS + x, from + 2 * pair, 4);
          }
        }
      }
    }

    configure();
    const int64_t token_bytes = width * sizeof(bf16);
    const int block = job.latent ? LATENT_BLOCK : TILE_BLOCK;
    const int64_t far = std::max<int64_t>(block, TILE_AHEAD_BYTES / token_bytes);
    const Unit* after = nullptr;
    bool asked = false;
    Ahead ahead;
    NoAhead not_here;
    for (int64_t t = u.lo; t < u.hi; t += block) {
      const int n = static_cast<int>(std::min<int64_t>(block, u.hi - t));
      // Memory answers as long as it is asked: a few lines at a time, all the time.
      const int64_t tiles_of_values = (n + PAIRED - 1) / PAIRED;
      const int64_t steps = (n + 15) / 16 * (dk / 32 * 2) + tiles_of_values * HEADS +
                            (job.latent ? 0 : dv / 32 * (tiles_of_values * PAIRS / 4 + 1));
      ahead.each(n * token_bytes * (own.end - own.first) / job.n_kv, (own.end - own.first) * steps,
                 own.end - own.first < job.n_kv);
      look_ahead<bf16>(job, u, t + far, t + far + n, ahead, next, after, asked);
      const bf16* token = store + t * width;
      for (int j = own.first, i = 0; j < own.end; ++j) {
        const bf16* k = token + int64_t(j) * dk;
        for (int h = first_head(j); h < end_head(j); h += HEADS, ++i) {
          State& state = *state_at(i);
          if (h == first_head(j)) {
            keys(state, dk, k, width, n, rest, s, ahead);
            soften(state, s, n, scale, dv, ahead);
          } else {
            keys(state, dk, k, width, n, rest, s, not_here);
            soften(state, s, n, scale, dv, not_here);
          }
        }
      }
      const bf16* of_token = job.latent ? token : token + int64_t(job.n_kv) * dk;
      for (int j = own.first, begin = 0; j < own.end; ++j) {
        const bf16* v = of_token + int64_t(j) * dv;
        const int end = begin + (end_head(j) - first_head(j) + HEADS - 1) / HEADS;
        for (int64_t d = 0; d < dv; d += 32) {
          for (int b = 0; b < n; b += PAIRED) {
            uint32_t* to = paired + b * 16;
            const bf16* from = v + b * width + d;
            if (job.latent) pair_up(from, width, n - b, to, not_here);
            else pair_up(from, width, n - b, to, ahead);
          }
          for (int i = begin; i < end; ++i) {
            if (job.latent || i > begin) values(*state_at(i), d, paired, n, not_here);
            else values(*state_at(i), d, paired, n, ahead);
          }
        }
        begin = end;
      }
    }
    TILE_RELEASE();

    float* partial = u.partial < 0 ? nullptr : job.partials + u.partial * job.partial_size;
    bf16* out = static_cast<bf16*>(job.out) + u.row * job.out_stride;
    for (int i = 0; i < n_states; ++i) {
      const State& state = *state_at(i);
      for (int h = 0; h < state.n; ++h) {
        const int head = state.first + h;
        float sum = 0.0f;
        for (int w = h; w < 16; w += HEADS) sum += state.sum[w];
        // A head's output in the order of `load`, where the last tokens were made up.
        float* o = reinterpret_cast<float*>(rest);
        if (partial) o = partial + 2 * job.n_heads + int64_t(head) * dv;
        for (int64_t d = 0; d < dv; d += 32) {
          const float* low = state.o + d / 16 * ROWS * 16 + h * 16;
          const float* high = low + ROWS * 16;
          vf a = load(low), b = load(high);
          if (ROWS > HEADS) {
            a += load(low + HEADS * 16);
            b += load(high + HEADS * 16);
          }
          const vf even = SHUFFLE(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30);
          const vf odd = SHUFFLE(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
          keep(o + d, even);
          keep(o + d + 16, odd);
        }
        if (!partial) {
          finish(job, head, state.max[h], sum, o, out + int64_t(head) * dv);
        } else {
          partial[2 * head] = state.max[h];
          partial[2 * head + 1] = sum;
        }
      }
    }
  }
};

// Tiles where heads fill them, else vectors.
void tile_unit(const Job& job, const Unit& u, Workspace& space, Next& next) {
  const int group = job.n_heads / job.n_kv;
  if (!fills(job)) return unit<bf16>(job, u, space, next);
  if (group <= 4) return Tiled<4>::unit(job, u, space, next);
  if (group <= 8) return Tiled<8>::unit(job, u, space, next);
  return Tiled<16>::unit(job, u, space, next);
}

const Variant tile_variant = {
    TILE_VARIANT_NAME,
    {unit<float>, tile_unit, unit<f16>},
    {merge<float>, merge<bf16>, merge<f16>},
    read};
