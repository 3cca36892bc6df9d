// Decode attention over the host KV store, and a streaming read to hold it against.
//
// Every row has one query token. Its history is read once, in order, with an online softmax in
// float32; the new token's KV is written to the store first, by the thread that reads it. Rows
// are cut into units by their length alone, and the parts of a row are added up in the order of
// its tokens, so results depend neither on timing nor on the number of threads.
//
// Plain functions without torch: built once, called through ctypes without Python's lock.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <unistd.h>
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
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
// The logic of 16 lanes on any machine, for tests.
namespace portable16 {
#define LANES 16
#define VARIANT_NAME "portable16"
#define IN_REGISTER(v)
#include "cpu_attention_kernel.h"
#undef LANES
#undef VARIANT_NAME
#undef IN_REGISTER
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
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c")
#endif
namespace avx512bf16 {
#define LANES 16
#define VARIANT_NAME "AVX-512 BF16"
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
}  // namespace avx512bf16
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {

const Variant* variants[] = {
#if defined(__x86_64__)
    &avx512bf16::variant, &avx512::variant, &avx2::variant,
#endif
    &portable::variant,
#if defined(MOEGEN_WIDE_ANYWHERE)
    &portable16::variant,
#endif
};

bool runs_here(const Variant* v) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (v == &avx512bf16::variant || v == &avx512::variant) {
    if (v == &avx512bf16::variant && !__builtin_cpu_supports("avx512bf16")) return false;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  if (v == &avx2::variant) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return true;
}

// What threads work on together: `total` pieces, handed out in order.
struct Task {
  int64_t total = 0;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  virtual void work(Workspace& space) = 0;
  virtual ~Task() = default;
};

// Threads that sleep between tasks. One task at a time.
class Pool {
 public:
  explicit Pool(int n) : owner_(getpid()) {
    try {
      for (int i = 0; i < n; ++i) threads_.emplace_back([this] { serve(); });
    } catch (...) {
      stop();
      throw;
    }
    pin();
  }

  pid_t owner() const { return owner_; }

  void run(Task& task) {
    std::lock_guard<std::mutex> turn(one_at_a_time_);
    const int64_t wanted = std::min<int64_t>(threads_.size(), task.total);
    std::unique_lock<std::mutex> lock(mutex_);
    task_ = &task;
    lock.unlock();
    for (int64_t i = 0; i < wanted; ++i) wake_.notify_one();
    lock.lock();
    idle_.wait(lock, [&] { return busy_ == 0 && task.next.load() >= task.total; });
    task_ = nullptr;
  }

  void stop() {
    std::lock_guard<std::mutex> turn(one_at_a_time_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& t : threads_) t.join();
  }

 private:
  void serve() {
    Workspace space;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || (task_ && task_->next.load() < task_->total); });
      if (stopping_) return;
      Task& task = *task_;
      ++busy_;
      lock.unlock();
      try {
        task.work(space);
      } catch (...) {
        task.failed = true;
      }
      lock.lock();
      if (--busy_ == 0) idle_.notify_one();
    }
  }

  // One thread a core, on the last of those that the process may use: whoever issues work to a
  // GPU keeps the first. With as many threads as cores the system places them.
  void pin() {
#if defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    std::vector<int> cores;
    for (int c = 0; c < CPU_SETSIZE; ++c) {
      if (CPU_ISSET(c, &allowed)) cores.push_back(c);
    }
    if (threads_.size() >= cores.size()) return;
    const size_t first = cores.size() - threads_.size();
    for (size_t i = 0; i < threads_.size(); ++i) {
      cpu_set_t own;
      CPU_ZERO(&own);
      CPU_SET(cores[first + i], &own);
      pthread_setaffinity_np(threads_[i].native_handle(), sizeof own, &own);
    }
#endif
  }

  const pid_t owner_;
  std::vector<std::thread> threads_;
  std::mutex one_at_a_time_, mutex_;
  std::condition_variable wake_, idle_;
  Task* task_ = nullptr;
  int busy_ = 0;
  bool stopping_ = false;
};

struct Attention {
  const Variant* variant;
  int threads;
  std::atomic<Pool*> pool{nullptr};

  void run(Task& task) {
    if (threads > 1 && task.total > 1) return here()->run(task);
    static thread_local Workspace space;
    task.work(space);
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

constexpr int64_t SHORT = 1024;  // tokens that are one unit
constexpr int64_t MOST_PARTS = 64;

// Tokens of each part but the last: a function of the row's length alone.
int64_t part_tokens(int64_t tokens) {
  const int64_t even = (tokens + MOST_PARTS - 1) / MOST_PARTS;
  return std::max(SHORT, (even + 31) / 32 * 32);
}

struct Decode : Task {
  const Variant* variant;
  int dtype;
  Job job;
  std::vector<Unit> units;      // the long ones first
  std::vector<Unit> parts;      // those of split rows, by row, in order
  struct Split { int64_t first; int n; };
  std::vector<Split> splits;
  std::vector<int> split_of;    // by part
  std::unique_ptr<std::atomic<int>[]> left;  // parts of each split row still to be done
  std::vector<float> partials;

  void cut(int64_t rows, const int64_t* start, const int64_t* length, int64_t window) {
    std::vector<Unit> all;
    all.reserve(rows);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t hi = start[r] + length[r];
      const int64_t lo = window > 0 && window < length[r] ? hi - window : start[r];
      const int64_t each = part_tokens(hi - lo);
      if (hi - lo <= each) {
        all.push_back({r, lo, hi, true, -1});
        continue;
      }
      splits.push_back({static_cast<int64_t>(parts.size()), 0});
      for (int64_t at = lo; at < hi; at += each) {
        const int64_t end = std::min(hi, at + each);
        parts.push_back({r, at, end, end == hi, static_cast<int64_t>(parts.size())});
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
    total = static_cast<int64_t>(units.size());
    left.reset(new std::atomic<int>[splits.size()]);
    for (size_t i = 0; i < splits.size(); ++i) left[i].store(splits[i].n);
    job.partial_size = int64_t(job.n_heads) * (job.dv + 2);
    partials.resize(parts.size() * job.partial_size);
    job.partials = partials.data();
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
    d.cut(rows, start, length, window);
    a->run(d);
    return d.failed;
  } catch (const std::exception&) {
    return 1;
  }
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
  } catch (const std::exception&) {
    return 1;
  }
}

}  // extern "C"
