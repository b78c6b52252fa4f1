// Whole pages from place to place: between the slabs of two pools, or a pool and one run of bytes.
//
// Pages lie anywhere, so what a copy waits for are the first lines of each page, which no hardware prefetcher knows and
// whose addresses miss the TLB. So pages are copied in pieces, and while one is copied the lines of a piece some way
// ahead are asked for. What is larger than a core's cache goes past it (non-temporal stores): the lines written need
// not be read first, and what the cache held stays.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "guard.h"
#include "parallel.h"
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace testbed {

constexpr int64_t kLine = 64, kPiece = 4096, kAheadBytes = 6144, kItemBytes = 256 << 10;

// Filled by kernels/cpu/store.py. A null slot array stands for 0, 1, 2, ...
struct Side {
  const int64_t* slabs;
  int64_t slab_pages, pages;
  const int64_t* slot;
  uint8_t* at(int64_t i, int64_t bytes) const {
    const uint64_t n = slot ? slot[i] : i, each = slab_pages;
    return (uint8_t*)slabs[n / each] + n % each * bytes;
  }
  bool inside(int64_t count) const {
    for (int64_t i = 0; slot && i < count; ++i)
      if (slot[i] < 0 || slot[i] >= pages) return false;
    return slot || count <= pages;
  }
};

struct Copy {
  Side from, to;
  int64_t bytes, count, past_cache, threads;
};

// n bytes, a multiple of 64, while as many from `ahead` are asked for. They are used once: no second cache need hold
// them.
template <bool PAST>
inline void copy_piece(uint8_t* to, const uint8_t* from, const uint8_t* ahead, int64_t n) {
  for (int64_t i = 0; i < n; i += kLine) {
    __builtin_prefetch(ahead + i, 0, 0);
#if defined(__AVX512F__)
    const __m512i x = _mm512_loadu_si512(from + i);
    if (PAST) _mm512_stream_si512((__m512i*)(to + i), x);
    else _mm512_storeu_si512(to + i, x);
#elif defined(__AVX__)
    const __m256i x = _mm256_loadu_si256((const __m256i*)(from + i));
    const __m256i y = _mm256_loadu_si256((const __m256i*)(from + i + 32));
    if (PAST) _mm256_stream_si256((__m256i*)(to + i), x), _mm256_stream_si256((__m256i*)(to + i + 32), y);
    else _mm256_storeu_si256((__m256i*)(to + i), x), _mm256_storeu_si256((__m256i*)(to + i + 32), y);
#else
    std::memcpy(to + i, from + i, kLine);
#endif
  }
}

// Pages begin to end, in order.
template <bool PAST>
void copy_range(const Copy& c, int64_t begin, int64_t end) {
  const int64_t pieces = (c.bytes + kPiece - 1) / kPiece, piece = (c.bytes / pieces + kLine - 1) / kLine * kLine;
  const int64_t lead = std::max<int64_t>(1, (kAheadBytes + piece - 1) / piece);  // pieces
  int64_t ahead_page = begin + lead / pieces, ahead_piece = lead % pieces;
  for (int64_t i = begin; i < end; ++i) {
    const uint8_t* from = c.from.at(i, c.bytes);
    uint8_t* to = c.to.at(i, c.bytes);
    for (int64_t p = 0; p < pieces; ++p) {
      const int64_t start = p * piece, n = std::min(piece, c.bytes - start);
      const uint8_t* ahead = from;
      if (ahead_page < end) ahead = c.from.at(ahead_page, c.bytes) + ahead_piece * piece;
      if (++ahead_piece == pieces) ahead_piece = 0, ++ahead_page;
      copy_piece<PAST>(to + start, from + start, ahead, n);
    }
  }
#if defined(__AVX__)
  if (PAST) _mm_sfence();
#endif
}

bool aligned(const Side& side) {
  for (int64_t i = 0; i * side.slab_pages < side.pages; ++i)
    if (side.slabs[i] % kLine) return false;
  return true;
}

}  // namespace testbed

extern "C" {

// Nothing is copied unless all slots are there: returns 0, 1 for a source slot that isn't, 2 for a target slot, or a
// code of guard.h. Pages are a multiple of 64 bytes; with past_cache they are stored around the cache.
int64_t testbed_copy(const testbed::Copy* call) {
  using namespace testbed;
  const Copy& c = *call;
  if (!c.from.inside(c.count)) return 1;
  if (!c.to.inside(c.count)) return 2;
  if (!c.count) return 0;
  const bool past = c.past_cache && aligned(c.to);
  const int64_t each = std::max<int64_t>(1, kItemBytes / c.bytes), items = (c.count + each - 1) / each;
  const int64_t threads = std::max<int64_t>(1, std::min(c.threads, items));
  // One thread goes through all of it, so that what is asked for ahead never stops at an item's end.
  const int64_t run_pages = threads == 1 ? c.count : each;
  auto work = [&](int64_t item) {
    const int64_t begin = item * run_pages, end = std::min(begin + run_pages, c.count);
    if (past) copy_range<true>(c, begin, end);
    else copy_range<false>(c, begin, end);
  };
  return guarded([&] { return run((c.count + run_pages - 1) / run_pages, threads, work), 0; });
}

}  // extern "C"
