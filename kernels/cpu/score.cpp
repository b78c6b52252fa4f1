// Scores of pages from a few vectors a page, the k best pages of each stream, and the table of those.
#include <limits>
#include <vector>

#include "guard.h"
#include "pages.h"
#include "parallel.h"

namespace testbed {

constexpr int64_t kItemPages = 512;  // large enough to pay for handing out, small enough to share ragged streams
constexpr int kRows = 4;             // query rows scored at once: with two pages eight sums, which hides the latency

inline vf load_as(const float* p) { return load(p); }
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};
inline vf load_as(const Bf16* p) { return load_bf16(&p->bits); }
inline vf load_as(const Fp16* p) { return load_fp16(&p->bits); }
inline float value(float x) { return x; }
inline float value(Bf16 x) { return bf16_to_float(x.bits); }
inline float value(Fp16 x) { return fp16_to_float(x.bits); }

// The sums over the lanes of each of four vectors.
inline void lane_sums(const vf x[4], float out[4]) {
#if defined(__AVX__)
  if constexpr (sizeof(vf) == 32) {
    const __m256 a = _mm256_hadd_ps((__m256)x[0], (__m256)x[1]), b = _mm256_hadd_ps((__m256)x[2], (__m256)x[3]);
    const __m256 both = _mm256_hadd_ps(a, b);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1)));
    return;
  }
#endif
  for (int i = 0; i < 4; ++i) out[i] = sum(x[i]);
}

// Sums of kRows rows with pages a and b: row i of page j in out[j][i]. q: [2, rows, D], positive and negative parts,
// or with BOUND = false [1, rows, D].
template <bool BOUND, class T>
inline void dot_rows(const float* q, int64_t minus, int64_t D, const T* const high[2], const T* const low[2],
                     float out[2][kRows]) {
  const int64_t whole = D / W * W;
  vf sums[2][kRows];
  for (auto& page : sums)
    for (auto& x : page) x = splat(0.0f);
  for (int64_t d = 0; d < whole; d += W) {
    const vf h[2] = {load_as(high[0] + d), load_as(high[1] + d)};
    for (int i = 0; i < kRows; ++i) {
      const vf plus = load(q + i * D + d);
      for (int j = 0; j < 2; ++j) sums[j][i] += h[j] * plus;
    }
    if (!BOUND) continue;
    const vf l[2] = {load_as(low[0] + d), load_as(low[1] + d)};
    for (int i = 0; i < kRows; ++i) {
      const vf negative = load(q + minus + i * D + d);
      for (int j = 0; j < 2; ++j) sums[j][i] += l[j] * negative;
    }
  }
  for (int j = 0; j < 2; ++j) {
    lane_sums(sums[j], out[j]);
    for (int64_t d = whole; d < D; ++d)
      for (int i = 0; i < kRows; ++i) {
        out[j][i] += value(high[j][d]) * q[i * D + d];
        if (BOUND) out[j][i] += value(low[j][d]) * q[minus + i * D + d];
      }
  }
}

// What `query_bound` or, without low, `mean_key_score` is given; strides in elements. Filled by kernels/cpu/store.py.
struct Scores {
  const float* q;  // [S, R, D]
  const void *high, *low;
  int64_t high_stream, high_page, low_stream, low_page, format, S, R, D, N;
  const int32_t* count;  // or null
  float* out;            // [S, N], or [S, R, N] if each
  int64_t threads;
  int64_t each;  // every row's score instead of the best row's
};

template <bool BOUND, class T>
void score_pages(const Scores& c, int64_t s, const float* q, int64_t rows, int64_t from, int64_t to) {
  const T* high = (const T*)c.high + s * c.high_stream;
  const T* low = (const T*)c.low + s * c.low_stream;
  for (int64_t n = from; n < to; n += 2) {
    const int64_t second = n + 1 < to ? n + 1 : n;
    const T* const h[2] = {high + n * c.high_page, high + second * c.high_page};
    const T* const l[2] = {low + n * c.low_page, low + second * c.low_page};
    float best[2] = {-INFINITY, -INFINITY}, part[2][kRows];
    const auto write = [&](int64_t row, const float x[2]) {
      float* out = c.out + row * c.N;
      out[n] = x[0];
      if (second > n) out[second] = x[1];
    };
    for (int64_t r = 0; r < rows; r += kRows) {
      dot_rows<BOUND>(q + r * c.D, rows * c.D, c.D, h, l, part);
      for (int j = 0; j < 2; ++j)
        for (const float x : part[j]) best[j] = x > best[j] ? x : best[j];  // NaN is never greater
      for (int64_t i = 0; c.each && i < kRows && r + i < c.R; ++i) {
        float both[2];
        for (int j = 0; j < 2; ++j) both[j] = part[j][i] == part[j][i] ? part[j][i] : -INFINITY;  // a NaN row is out
        write(s * c.R + r + i, both);
      }
    }
    if (!c.each) write(s, best);
  }
}

// Rows of a stream padded to a multiple of kRows by repeating the last, which changes no maximum.
void split_signs(const Scores& c, int64_t s, int64_t rows, bool bound, float* to) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = c.q + (s * c.R + (r < c.R ? r : c.R - 1)) * c.D;
    for (int64_t d = 0; d < c.D; ++d) {
      const float x = row[d];
      to[r * c.D + d] = bound && x < 0 ? 0.0f : x;
      if (bound) to[(rows + r) * c.D + d] = x > 0 ? 0.0f : x;
    }
  }
}

template <class T>
void score(const Scores& c, bool bound) {
  const int64_t rows = (c.R + kRows - 1) / kRows * kRows, parts = (c.N + kItemPages - 1) / kItemPages;
  auto work = [&](int64_t item) {
    const int64_t s = item / parts, from = item % parts * kItemPages;
    const int64_t end = from + kItemPages < c.N ? from + kItemPages : c.N;
    const int64_t held = c.count ? c.count[s] : c.N, to = held < end ? held : end;
    const int64_t outs = c.each ? c.R : 1;
    for (int64_t row = s * outs; row < (s + 1) * outs; ++row)
      for (int64_t n = from > held ? from : held; n < end; ++n) c.out[row * c.N + n] = -INFINITY;
    if (from >= to) return;
    std::vector<float> q((bound ? 2 : 1) * rows * c.D);
    split_signs(c, s, rows, bound, q.data());
    if (bound) score_pages<true, T>(c, s, q.data(), rows, from, to);
    else score_pages<false, T>(c, s, q.data(), rows, from, to);
  };
  run(c.S * parts, c.threads, work);
}

// Whole numbers in the order of the floats; NaN is the lowest, both zeros are one.
inline int32_t ordered(float x) {
  x += 0.0f;
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  bits ^= (bits >> 31) & 0x7fffffff;
  return x == x ? bits : std::numeric_limits<int32_t>::min();
}

inline int64_t count_from(const int32_t* key, int64_t n, int32_t least) {
  int32_t found = 0;  // a stream has fewer than 2^31 pages
  for (int64_t i = 0; i < n; ++i) found += key[i] >= least;
  return found;
}

// The k highest of n, 0 < k < n, columns ascending. The threshold is found by halving its range: each look is one
// vector pass over keys that lie in cache, and about log2(range) of them cost less than one partial sort.
void select(const int32_t* key, int64_t n, int64_t k, int32_t* out) {
  int32_t least = key[0], most = key[0];
  for (int64_t i = 1; i < n; ++i) {
    least = key[i] < least ? key[i] : least;
    most = key[i] > most ? key[i] : most;
  }
  int64_t low = least, high = most;  // at least k are >= low, fewer than k are > high
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2, found = count_from(key, n, (int32_t)middle);
    if (found >= k) low = middle;
    else high = middle - 1;
    if (found == k) break;
  }
  // Those above the threshold are in, those on it as long as there is room.
  int64_t ties = k - (low < most ? count_from(key, n, (int32_t)(low + 1)) : 0);
  for (int64_t i = 0, j = 0; j < k; ++i) {
    const bool tie = key[i] == low, in = key[i] > low || (tie && ties > 0);
    out[j] = (int32_t)i;
    ties -= tie, j += in;
  }
}

}  // namespace testbed

extern "C" {

// Returns 1 for a count outside 0 to N, before anything is read.
int64_t testbed_score(const testbed::Scores* call) {
  using namespace testbed;
  for (int64_t s = 0; call->count && s < call->S; ++s)
    if (call->count[s] < 0 || call->count[s] > call->N) return 1;
  const bool bound = call->low != nullptr;
  return guarded([&] {
    if (call->format == kFp32) score<float>(*call, bound);
    else if (call->format == kBf16) score<Bf16>(*call, bound);
    else score<Fp16>(*call, bound);
    return 0;
  });
}

// score: rows of stride elements; columns: [S, width]. Returns 1 for a count outside 0 to N, 2 for a k outside
// 0 to width, before anything is written.
int64_t testbed_top_pages(const float* score, const int32_t* count, const int32_t* k, int32_t* columns, int32_t* number,
                          int64_t S, int64_t N, int64_t stride, int64_t width, int64_t threads) {
  using namespace testbed;
  for (int64_t s = 0; s < S; ++s) {
    if (count[s] < 0 || count[s] > N) return 1;
    if (k[s] < 0 || k[s] > width) return 2;
  }
  auto work = [&](int64_t s) {
    const int64_t n = count[s], wanted = k[s] < n ? k[s] : n;
    int32_t* out = columns + s * width;
    number[s] = (int32_t)wanted;
    if (wanted == n) {
      for (int64_t i = 0; i < n; ++i) out[i] = (int32_t)i;
    } else if (wanted) {
      std::vector<int32_t> key(n);
      for (int64_t i = 0; i < n; ++i) key[i] = ordered(score[s * stride + i]);
      select(key.data(), n, wanted, out);
    }
    for (int64_t i = wanted; i < width; ++i) out[i] = -1;
  };
  return guarded([&] { return run(S, threads, work), 0; });
}

// The chosen entries of a table: strides of pool, slot and page in elements. Returns 1 for a column outside 0 to
// N - 1, 2 for a number outside 0 to width.
int64_t testbed_narrow(const int8_t* pool, const int32_t* slot, const int32_t* page, const int64_t* strides,
                       const int32_t* columns, const int32_t* number, int64_t S, int64_t N, int64_t width,
                       int8_t* out_pool, int32_t* out_slot, int32_t* out_page) {
  for (int64_t s = 0; s < S; ++s) {
    if (number[s] < 0 || number[s] > width) return 2;
    for (int64_t i = 0; i < width; ++i) {
      const int64_t at = s * width + i, column = i < number[s] ? columns[at] : 0;
      const bool inside = column >= 0 && column < N;
      if (!inside && i < number[s]) return 1;
      out_pool[at] = inside ? pool[s * strides[0] + column] : 0;
      out_slot[at] = inside ? slot[s * strides[1] + column] : 0;
      out_page[at] = inside ? page[s * strides[2] + column] : 0;
    }
  }
  return 0;
}

}  // extern "C"
