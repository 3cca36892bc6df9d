// Decode attention over the host KV store, and a streaming read to hold it against.
//
// Every row has one query token. Its history is read in order, with an online softmax in float32;
// the new token's KV is written to the store before it is read. Rows are cut into stretches of
// tokens by their length alone, and what these give is added up in the order of the tokens. The
// last units are cut by heads, of which none knows of another. So results depend neither on
// timing nor on the number of threads.
//
// Plain functions without torch: built once, called through ctypes without Python's lock.

#include <algorithm>
#include <atomic>
#include <climits>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
// Compilers before GCC 10 do not know these instructions.
#if defined(__clang__) || __GNUC__ >= 10
#define WITH_BF16
#endif
// What assembles for compilers before GCC 11 need not know these.
#if defined(__linux__) && defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 11)
#define WITH_TILES
#endif
#endif

#include "cpu_attention.h"

namespace moegen {

namespace portable {
#define LANES 4
#define VARIANT_NAME "portable"
#define IN_REGISTER(v)
#include "cpu_attention_kernel.h"
#undef LANES
#undef VARIANT_NAME
#undef IN_REGISTER
}  // namespace portable

#if defined(MOEGEN_WIDE_ANYWHERE)
// The logic of 16 lanes, and of tiles, on any machine, for tests.
struct Tiles {
  struct Shapes {
    uint8_t head[16];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shapes;
  uint8_t tile[8][16][64];

  void load(int n, const void* from, int64_t stride) {
    const char* p = static_cast<const char*>(from);
    for (int r = 0; r < shapes.rows[n]; ++r, p += stride) {
      std::memcpy(tile[n][r], p, shapes.bytes[n]);
    }
  }
  void store(int n, void* to, int64_t stride) {
    char* p = static_cast<char*>(to);
    for (int r = 0; r < shapes.rows[n]; ++r, p += stride) {
      std::memcpy(p, tile[n][r], shapes.bytes[n]);
    }
  }
  void dot(int c, int a, int b) {
    for (int m = 0; m < shapes.rows[c]; ++m) {
      for (int n = 0; n < shapes.bytes[c] / 4; ++n) {
        float sum;
        std::memcpy(&sum, tile[c][m] + 4 * n, 4);
        for (int k = 0; k < shapes.bytes[a] / 2; ++k) {
          bf16 x, y;
          std::memcpy(&x, tile[a][m] + 2 * k, 2);
          std::memcpy(&y, tile[b][k / 2] + 4 * n + k % 2 * 2, 2);
          sum += portable::number(x) * portable::number(y);
        }
        std::memcpy(tile[c][m] + 4 * n, &sum, 4);
      }
    }
  }
};
static thread_local Tiles tiles;

namespace portable16 {
#define LANES 16
#define VARIANT_NAME "portable16"
#define TILE_VARIANT_NAME "portable tiles"
#define LANE_BY_LANE
#define IN_REGISTER(v)
#define TILE_CONFIG(p) std::memcpy(&moegen::tiles.shapes, p, sizeof moegen::tiles.shapes)
#define TILE_RELEASE()
#define TILE_ZERO(n) std::memset(moegen::tiles.tile[n], 0, sizeof moegen::tiles.tile[n])
#define TILE_LOAD(n, p, stride) moegen::tiles.load(n, p, stride)
#define TILE_STORE(n, p, stride) moegen::tiles.store(n, p, stride)
#define TILE_DOT(c, a, b) moegen::tiles.dot(c, a, b)
#include "cpu_attention_kernel.h"
#undef LANES
#undef VARIANT_NAME
#undef TILE_VARIANT_NAME
#undef LANE_BY_LANE
#undef IN_REGISTER
#undef TILE_CONFIG
#undef TILE_RELEASE
#undef TILE_ZERO
#undef TILE_LOAD
#undef TILE_STORE
#undef TILE_DOT
}  // namespace portable16
#endif

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2 {
#define LANES 8
#define VARIANT_NAME "AVX2"
#define IN_REGISTER(v) asm("" : "+x"(v))
#define LOAD_HALVES(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p)))
#define ANY_ABOVE(a, b) _mm256_movemask_ps((__m256)((a) > (b)))
#include "cpu_attention_kernel.h"
#undef LANES
#undef VARIANT_NAME
#undef IN_REGISTER
#undef LOAD_HALVES
#undef ANY_ABOVE
#undef BLEND
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#endif
namespace avx512 {
#define LANES 16
#define VARIANT_NAME "AVX-512"
#define IN_REGISTER(v) asm("" : "+v"(v))
#define LOAD_HALVES(p) _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)(p)))
#define ANY_ABOVE(a, b) _mm512_cmp_ps_mask((__m512)(a), (__m512)(b), _CMP_GT_OQ)
#define BLEND(mask, a, b) (vf)_mm512_mask_blend_ps(mask, (__m512)(a), (__m512)(b))
#include "cpu_attention_kernel.h"
#undef LANES
#undef VARIANT_NAME
#undef IN_REGISTER
#undef LOAD_HALVES
#undef ANY_ABOVE
#undef BLEND
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#if defined(WITH_BF16)
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c")
#endif
namespace avx512bf16 {
#define LANES 16
#define VARIANT_NAME "AVX-512 BF16"
#if defined(WITH_TILES)
#define TILE_VARIANT_NAME "AMX"
// As instructions: compilers' own functions do not say that they read and write memory.
#define TILE_CONFIG(p) asm volatile("ldtilecfg %0" ::"m"(*(p)))
#define TILE_RELEASE() asm volatile("tilerelease" ::)
#define TILE_ZERO(n) asm volatile("tilezero %%tmm" #n ::)
#define TILE_LOAD(n, p, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #n ::"r"(p), "r"(int64_t(stride)) : "memory")
#define TILE_STORE(n, p, stride) \
  asm volatile("tilestored %%tmm" #n ", (%0,%1,1)" ::"r"(p), "r"(int64_t(stride)) : "memory")
#define TILE_DOT(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#endif
#define IN_REGISTER(v) asm("" : "+v"(v))
#define LOAD_HALVES(p) _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)(p)))
#define ANY_ABOVE(a, b) _mm512_cmp_ps_mask((__m512)(a), (__m512)(b), _CMP_GT_OQ)
#define BLEND(mask, a, b) (vf)_mm512_mask_blend_ps(mask, (__m512)(a), (__m512)(b))
#define DOT(sum, a, b) (vf)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b))
#include "cpu_attention_kernel.h"
#undef LANES
#undef VARIANT_NAME
#undef IN_REGISTER
#undef LOAD_HALVES
#undef ANY_ABOVE
#undef BLEND
#undef DOT
#undef TILE_VARIANT_NAME
}  // namespace avx512bf16
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
#endif

namespace {

const Variant* variants[] = {
#if defined(WITH_TILES)
    &avx512bf16::tile_variant,
#endif
#if defined(WITH_BF16)
    &avx512bf16::variant,
#endif
#if defined(__x86_64__)
    &avx512::variant, &avx2::variant,
#endif
    &portable::variant,
#if defined(MOEGEN_WIDE_ANYWHERE)
    &portable16::variant,
    &portable16::tile_variant,
#endif
};

#if defined(WITH_TILES)
// Whether there are tiles for bfloat16 and the system lets this process use them, which it has to
// be asked for.
bool may_use_tiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned bf16_tiles = 1u << 22, tiles = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & bf16_tiles) || !(d & tiles)) return false;
  constexpr unsigned saved = 3u << 17;
  asm("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  if ((a & saved) != saved) return false;
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}
#endif

bool runs_here(const Variant* v) {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  __builtin_cpu_init();
  // What not every compiler's __builtin_cpu_supports knows. That the system saves the registers
  // is what it checks.
  const bool with_avx2 = __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) &&
                         (c & bit_FMA) && (c & bit_F16C);
  const bool with_avx512 =
      with_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (v == &avx2::variant) return with_avx2;
  if (v == &avx512::variant) return with_avx512;
#if defined(WITH_BF16)
  constexpr unsigned bf16_products = 1u << 5;
  const bool with_bf16 =
      with_avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & bf16_products);
  if (v == &avx512bf16::variant) return with_bf16;
#if defined(WITH_TILES)
  if (v == &avx512bf16::tile_variant) return with_bf16 && may_use_tiles();
#endif
#endif
#endif
  return true;
}

// Floats that are not set to anything, kept from call to call.
class Buffer {
 public:
  float* take(int64_t floats) {
    if (floats > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(new float[floats]);
      size_ = floats;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<float[]> memory_;
  int64_t size_ = 0;
};

// What threads work on together: `total` pieces, handed out in order.
struct Task {
  int64_t total = 0;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  virtual void begin(Buffer&) {}  // before any work: memory that lasts as long as the task
  virtual void work(Workspace& space) = 0;
  virtual ~Task() = default;

  // Works until no piece is left to take.
  void drain(Workspace& space) {
    try {
      work(space);
    } catch (...) {
      failed = true;
      next = total;
    }
  }
};

// A number that threads wait on until it changes.
class Word {
 public:
  uint32_t now() const { return value_.load(); }

#if defined(__linux__)
  void wait(uint32_t seen) {
    while (now() == seen) {
      syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
  }
  // Wakes n of those that wait at once: none has to take a lock from another.
  void change(int n) {
    value_.fetch_add(1);
    syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, n, nullptr, nullptr, 0);
  }
#else
  void wait(uint32_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return now() != seen; });
  }
  void change(int) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      value_.fetch_add(1);
    }
    changed_.notify_all();
  }
#endif

 private:
  std::atomic<uint32_t> value_{0};
#if !defined(__linux__)
  std::mutex mutex_;
  std::condition_variable changed_;
#endif
};

// Cores that this process may use; none where the system does not say.
std::vector<int> allowed_cores() {
  std::vector<int> cores;
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return cores;
  for (int c = 0; c < CPU_SETSIZE; ++c) {
    if (CPU_ISSET(c, &allowed)) cores.push_back(c);
  }
#endif
  return cores;
}

// Threads that sleep between tasks. One task at a time.
class Pool {
 public:
  explicit Pool(int n) : owner_(getpid()) {
    const std::vector<int> cores = allowed_cores();
    const bool a_core_each = n + 1 == static_cast<int>(cores.size());
    caller_works_ = !a_core_each;
    try {
      for (int i = 0; i < n - caller_works_; ++i) threads_.emplace_back([this] { serve(); });
    } catch (...) {
      stop();
      throw;
    }
    if (a_core_each) pin(cores, true);
    else if (n < static_cast<int>(cores.size())) pin(cores, false);
  }

  pid_t owner() const { return owner_; }

  void run(Task& task, Workspace& callers) {
    std::lock_guard<std::mutex> turn(one_at_a_time_);
    task.begin(buffer_);
    task_ = &task;
    inside_ = 0;
    const int64_t helpers = std::min<int64_t>(threads_.size(), task.total - caller_works_);
    round_.change(static_cast<int>(helpers));
    if (caller_works_) task.drain(callers);
    bool closed = false;
    for (;;) {
      const uint32_t seen = left_.now();
      if (task.next.load() >= task.total) {
        if (!closed) inside_ += CLOSED;
        closed = true;
        if (inside_.load() == CLOSED) break;
      }
      left_.wait(seen);
    }
  }

  void stop() {
    std::lock_guard<std::mutex> turn(one_at_a_time_);
    stopping_ = true;
    round_.change(INT_MAX);
    for (auto& t : threads_) t.join();
  }

 private:
  static constexpr int CLOSED = INT_MIN / 2;  // added to `inside_`: no one may enter

  void serve() {
    Workspace space;
    for (uint32_t seen = 0;;) {
      round_.wait(seen);
      seen = round_.now();
      if (stopping_) return;
      int n = inside_.load();
      while (n >= 0 && !inside_.compare_exchange_weak(n, n + 1)) {
      }
      if (n < 0) continue;
      task_->drain(space);
      // The task may be gone as soon as this thread is counted out.
      n = inside_.fetch_sub(1) - 1;
      if (n == 0 || n == CLOSED) left_.change(1);
    }
  }

  // Off the first core, which whoever issues work to a GPU keeps. With a thread for each of the
  // others it is one core a thread; with fewer the system places them, as it knows what else
  // runs there.
  void pin(const std::vector<int>& cores, bool a_core_each) {
#if defined(__linux__)
    for (size_t i = 0; i < threads_.size(); ++i) {
      cpu_set_t own;
      CPU_ZERO(&own);
      for (size_t c = 1; c < cores.size(); ++c) {
        if (!a_core_each || c == i + 1) CPU_SET(cores[c], &own);
      }
      pthread_setaffinity_np(threads_[i].native_handle(), sizeof own, &own);
    }
#else
    (void)cores, (void)a_core_each;
#endif
  }

  const pid_t owner_;
  // Not where each core is taken by a thread that cannot move out of the caller's way.
  bool caller_works_ = true;
  std::vector<std::thread> threads_;
  std::mutex one_at_a_time_;
  Buffer buffer_;
  Task* task_ = nullptr;
  Word round_, left_;
  std::atomic<int> inside_{CLOSED};  // threads that work on the task
  std::atomic<bool> stopping_{false};
};

struct Attention {
  const Variant* variant;
  int threads;
  std::atomic<Pool*> pool{nullptr};

  void run(Task& task) {
    static thread_local Workspace space;
    if (threads > 1 && task.total > 1) return here()->run(task, space);
    static thread_local Buffer buffer;
    task.begin(buffer);
    task.drain(space);
  }

  // The pool of this process: a fork has none of its parent's threads, and starts its own.
  Pool* here() {
    Pool* p = pool.load();
    while (p == nullptr || p->owner() != getpid()) {
      Pool* made = new Pool(threads);
      if (pool.compare_exchange_strong(p, made)) return made;
      made->stop();
      delete made;
    }
    return p;
  }
};

// Stretches that a row is cut into: a function of its length alone. moegen/graph/memory.py
// counts what is kept of them.
constexpr int64_t STRETCH = 1024;  // tokens, at most
constexpr int64_t MOST_STRETCHES = 64;

int64_t stretch_tokens(int64_t tokens) {
  const int64_t n = std::min(MOST_STRETCHES, (tokens + STRETCH - 1) / STRETCH);
  return ((tokens + n - 1) / n + 31) / 32 * 32;
}

// Pieces that the last units are cut into, and the least KV of one.
constexpr int64_t MOST_PIECES = 4;
constexpr int64_t PIECE_BYTES = 64 << 10;

struct Decode : Task {
  const Variant* variant;
  int dtype;
  Job job;
  std::vector<Unit> units;      // the long ones first
  std::vector<Unit> parts;      // those of split rows, by row, in order
  struct Split { int64_t first; int n; };
  std::vector<Split> splits;
  std::vector<int> split_of;    // by part
  std::unique_ptr<std::atomic<int>[]> left;  // units of each split row still to be done

  void cut(int64_t rows, const int64_t* start, const int64_t* length, int64_t window,
           int threads) {
    const int tiles = job.tiles();
    std::vector<Unit> all;
    all.reserve(rows);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t hi = start[r] + length[r];
      const int64_t lo = window > 0 && window < length[r] ? hi - window : start[r];
      const int64_t each = stretch_tokens(hi - lo);
      if (hi - lo <= each) {
        all.push_back({r, lo, hi, true, -1, 0, tiles});
        continue;
      }
      splits.push_back({static_cast<int64_t>(parts.size()), 0});
      for (int64_t at = lo; at < hi; at += each) {
        const int64_t end = std::min(hi, at + each), place = parts.size();
        parts.push_back({r, at, end, end == hi, place, 0, tiles});
        split_of.push_back(static_cast<int>(splits.size()) - 1);
        splits.back().n += 1;
      }
    }
    all.insert(all.end(), parts.begin(), parts.end());
    // Longest first, in steps of 32 tokens, the order kept among equals.
    constexpr int64_t STEPS = 4096;
    auto bucket = [](const Unit& u) { return STEPS - 1 - std::min(STEPS - 1, (u.hi - u.lo) / 32); };
    std::vector<int64_t> at(STEPS + 1, 0);
    for (const Unit& u : all) ++at[bucket(u) + 1];
    for (int64_t i = 0; i < STEPS; ++i) at[i + 1] += at[i];
    units.resize(all.size());
    for (const Unit& u : all) units[at[bucket(u)]++] = u;
    if (threads > 1) cut_last(std::min<int64_t>(threads, units.size()));
    total = static_cast<int64_t>(units.size());
    left.reset(new std::atomic<int>[splits.size()]);
    for (size_t i = 0; i < splits.size(); ++i) left[i].store(0);
    for (const Unit& u : units) {
      if (u.partial >= 0) left[split_of[u.partial]].fetch_add(1, std::memory_order_relaxed);
    }
    job.partial_size = int64_t(job.n_heads) * (job.dv + 2);
  }

  // Cuts the last n units by heads: threads that are done fill up the time until the others are.
  void cut_last(int64_t n) {
    const int64_t size = dtype == 0 ? 4 : 2;
    const std::vector<Unit> whole(units.end() - n, units.end());
    units.resize(units.size() - n);
    // Where heads share a key each piece reads it all, which takes several tiles to be worth it.
    const bool shared = job.n_kv == 1;
    const int64_t ends = shared ? job.tiles() / 4 : job.n_kv;
    for (Unit u : whole) {
      const int64_t nbytes = (u.hi - u.lo) * job.width * size;
      const int64_t pieces = std::min({MOST_PIECES, nbytes / PIECE_BYTES, ends});
      if (pieces < 2) {
        units.push_back(u);
        continue;
      }
      if (shared && u.last) {
        // All of its pieces read the new token: it is there before any begins.
        const char* from = static_cast<const char*>(job.new_kv) + u.row * job.new_stride * size;
        char* to = static_cast<char*>(job.store) + (u.hi - 1) * job.width * size;
        std::memcpy(to, from, job.width * size);
        u.last = false;
      }
      const int64_t each = shared ? 1 : job.group_tiles(), count = job.tiles() / each;
      for (int64_t i = 0; i < pieces; ++i) {
        u.first_tile = static_cast<int>(count * i / pieces * each);
        u.end_tile = static_cast<int>(count * (i + 1) / pieces * each);
        units.push_back(u);
      }
    }
  }

  void begin(Buffer& buffer) override {
    job.partials = buffer.take(static_cast<int64_t>(parts.size()) * job.partial_size);
  }

  struct Claim : Next {
    Decode& all;
    const Unit* claimed = nullptr;
    bool asked = false;
    explicit Claim(Decode& d) : all(d) {}
    const Unit* operator()() override {
      const int64_t i = all.next.fetch_add(1);
      asked = true;
      return claimed = i < all.total ? &all.units[i] : nullptr;
    }
  };

  void work(Workspace& space) override {
    Claim claim(*this);
    while (const Unit* u = claim.asked ? claim.claimed : claim()) {
      claim.asked = false;
      variant->unit[dtype](job, *u, space, claim);
      if (u->partial < 0) continue;
      const int s = split_of[u->partial];
      if (left[s].fetch_sub(1) == 1) variant->merge[dtype](job, &parts[splits[s].first], splits[s].n);
    }
  }
};

struct Read : Task {
  static constexpr int64_t PIECE = 1 << 20;
  const Variant* variant;
  const char* from;
  int64_t nbytes;
  std::atomic<uint64_t> check{0};

  void work(Workspace&) override {
    for (int64_t i; (i = next.fetch_add(1)) < total;) {
      const int64_t at = i * PIECE;
      check += variant->read(from + at, std::min(PIECE, nbytes - at));
    }
  }
};

}  // namespace
}  // namespace moegen

using namespace moegen;

extern "C" {

// The i-th variant's name, the best first; null after the last. `works` says if it runs here.
const char* moegen_variant(int i, int* works) {
  if (i < 0 || i >= static_cast<int>(sizeof variants / sizeof *variants)) return nullptr;
  *works = runs_here(variants[i]);
  return variants[i]->name;
}

void* moegen_open(int variant, int threads) {
  auto* a = new Attention;
  a->variant = variants[variant];
  a->threads = threads;
  return a;
}

void moegen_close(void* handle) {
  auto* a = static_cast<Attention*>(handle);
  Pool* p = a->pool.load();
  if (p && p->owner() == getpid()) {
    p->stop();
    delete p;
  }
  delete a;
}

// Gives 0, or 1 where memory or threads ran out.
int moegen_decode(void* handle, int dtype, int64_t rows, const int64_t* start,
                  const int64_t* length, const void* q, int64_t q_stride, const void* new_kv,
                  int64_t new_stride, void* store, int64_t width, void* out, int64_t out_stride,
                  int n_heads, int n_kv, int dk, int dv, int latent, float scale, int64_t window,
                  const float* sinks) {
  auto* a = static_cast<Attention*>(handle);
  try {
    Decode d;
    d.variant = a->variant;
    d.dtype = dtype;
    d.job = {n_heads, n_kv, dk, dv, latent != 0, width, scale, sinks, q, new_kv, store, out,
             q_stride, new_stride, out_stride, nullptr, 0};
    d.cut(rows, start, length, window, a->threads);
    a->run(d);
    return d.failed;
  } catch (...) {
    return 1;
  }
}

// The stretches that a row of so many tokens is cut into.
int64_t moegen_stretches(int64_t tokens) {
  const int64_t each = stretch_tokens(tokens);
  return (tokens + each - 1) / each;
}

// All threads reading memory in order: what the attention is held against. `check` only keeps
// the reads from being left out.
int moegen_read(void* handle, const void* from, int64_t nbytes, uint64_t* check) {
  auto* a = static_cast<Attention*>(handle);
  try {
    Read r;
    r.variant = a->variant;
    r.from = static_cast<const char*>(from);
    r.nbytes = nbytes;
    r.total = (nbytes + Read::PIECE - 1) / Read::PIECE;
    a->run(r);
    *check = r.check;
    return r.failed;
  } catch (...) {
    return 1;
  }
}

}  // extern "C"
