// Attention over one page by dot products of 16-bit pairs: quantised pages in integers, bf16 pages in bf16 where the
// CPU has the instruction. For queries in half precision only.
//
// Keys: the query is rounded once to int16 (of its largest channel) and folded, page by page, with the key steps' 8-bit
// codes, so that a score is sum(int16 * code) of a unit plus what the rows' lowest values give. The error of a base-2
// logit is about 5e-6 sqrt(D) of the widest range that a channel's keys span in it; where that may exceed kMostError
// (loud channels meeting loud queries) the fold is made to the measure of the page, and if that isn't enough the row is
// computed in float32. The choice is made for each row alone, so that rows don't depend on each other.
//
// Values: the probabilities of a block of keys, folded with the tokens' steps, are rounded to int16 of the largest of
// the row; 256 tokens * 32767 * 255 stays below 2^31.
#pragma once
#include "float_page.h"
#include "simd.h"

namespace testbed {

#if defined(__AVX2__)

constexpr float kMostError = 0.0075f, kErrorOfRange = 5.2e-6f;
constexpr int kBlockColumns = 256;

// Where sixteen columns of a page's rows lie.
struct Rows {
  const uint8_t* at;
  int64_t apart;
};

struct Int8Pairs {
  typedef IntSums Sums;
  static constexpr int kLevels = 255, kPairsPerLine = 2;
  const uint8_t *k, *v;
  int P, D;
  Scales scales;
  Int8Pairs(const uint8_t* blob, int P, int D) : k(blob), v(blob + P * D), P(P), D(D), scales(blob + 2 * P * D, P, D) {}
  Rows keys(int i) const { return {k + 16 * i, P}; }
  Rows values(int i) const { return {v + 16 * i, D}; }
  static Pairs pair(const uint8_t* a, const uint8_t* b) { return widen_pairs(a, b); }
  static int first(int, int i) { return 16 * i; }
  static int second(int, int i) { return 16 * i + 8; }
};

struct Int4Pairs {
  typedef IntSums Sums;
  static constexpr int kLevels = 15, kPairsPerLine = 4;
  const uint8_t *k, *v;
  int P, D;
  Scales scales;
  Int4Pairs(const uint8_t* blob, int P, int D)
      : k(blob), v(blob + P * D / 2), P(P), D(D), scales(blob + P * D, P, D) {}
  Rows keys(int i) const { return {k + 8 * i, P / 2}; }
  Rows values(int i) const { return {v + 8 * i, D / 2}; }
  static Pairs pair(const uint8_t* a, const uint8_t* b) {
    return split_pairs(widen_eight(a, b));
  }
  static int first(int, int i) { return 8 * i; }
  static int second(int n, int i) { return 8 * i + n / 2; }
};

struct Bf16Pairs {
  typedef FloatSums Sums;
  static constexpr int kPairsPerLine = 1;
  const uint16_t *k, *v;
  int P, D;
  Bf16Pairs(const uint8_t* blob, int P, int D) : k((const uint16_t*)blob), v(k + P * D), P(P), D(D) {}
  Rows keys(int i) const { return {(const uint8_t*)(k + 16 * i), 2 * P}; }
  Rows values(int i) const { return {(const uint8_t*)(v + 16 * i), 2 * D}; }
  static Pairs pair(const uint8_t* a, const uint8_t* b) { return zip_pairs(load32(a), load32(b)); }
  static int first(int, int i) { return 16 * i; }
  static int second(int, int i) { return 16 * i + 8; }
};

// sums[r] += sum_n x[r][n] row[n] over n rows, n a multiple of 8; rows of x are ld apart.
template <class F, int R>
inline __attribute__((always_inline)) void dot_rows(Rows rows, const uint16_t* x, int64_t ld, int n,
                                                    typename F::Sums* sums, Ahead& line) {
  constexpr int kStep = F::kPairsPerLine;
  const uint8_t* at = rows.at;
  for (const uint16_t* end = x + n; x < end; x += 2 * kStep) {
    line.go();
    for (int e = 0; e < kStep; ++e, at += 2 * rows.apart) {
      const Pairs pairs = F::pair(at, at + rows.apart);
      for (int r = 0; r < R; ++r) sums[r].dot(pairs, splat_pair(x + r * ld + 2 * e));
    }
  }
}

// scores[r][j] = unit[r] * sum_d q[r][d] key[j][d] + low[r].
template <class F, int R>
__attribute__((noinline)) void score_pairs(const F& page, const uint16_t* q, const float* unit, const float* low, int D,
                                           int P, float* scores, int ld, Ahead& ahead) {
  typedef typename F::Sums Sums;
  Ahead line = ahead;
  for (int i = 0; i < P / 16; ++i) {
    Sums sums[R];
    for (int r = 0; r < R; ++r) sums[r] = Sums::zero();
    dot_rows<F, R>(page.keys(i), q, D, D, sums, line);
    for (int r = 0; r < R; ++r) {
      store(scores + r * ld + F::first(P, i), sums[r].first() * splat(unit[r]) + splat(low[r]));
      store(scores + r * ld + F::second(P, i), sums[r].second() * splat(unit[r]) + splat(low[r]));
    }
  }
  ahead = line;
}

// acc[r] += sum_j p[r][j] value[j], in the units of p; D is a multiple of 16.
template <class F, int R>
__attribute__((noinline)) void add_pairs(const F& page, const uint16_t* p, int ld, int D, int P,
                                         typename F::Sums::Cell* acc, Ahead& ahead) {
  typedef typename F::Sums Sums;
  Ahead line = ahead;
  for (int i = 0; i < D / 16; ++i) {
    const int first = F::first(D, i), second = F::second(D, i);
    Sums sums[R];
    for (int r = 0; r < R; ++r) sums[r] = Sums::from(acc + r * D + first, acc + r * D + second);
    dot_rows<F, R>(page.values(i), p, ld, P, sums, line);
    for (int r = 0; r < R; ++r) sums[r].to(acc + r * D + first, acc + r * D + second);
  }
  ahead = line;
}

// The queries of a work item as int16: q[r] = unit[r] * x[r], most[r] = max |q[r]|, total[r] = sum of q[r].
template <int R>
struct IntQuery {
  int16_t x[R * kMaxDim];
  float unit[R], most[R], total[R];

  void set(const float* q, int D) {
    const float overflow = 2147483647.0f / (255.0f * D), top = overflow < 32767.0f ? overflow : 32767.0f;
    for (int r = 0; r < R; ++r) {
      vf high = {}, poison = {};
      for (int d = 0; d < D; d += W) {
        const vf y = load(q + r * D + d);
        high = vmax(high, y < splat(0.0f) ? -y : y);
        poison += y * splat(0.0f);  // NaN for NaN and infinity
      }
      most[r] = highest(high) + sum(poison);
      const float inverse = most[r] > 0.0f ? top / most[r] : 0.0f;
      unit[r] = most[r] > 0.0f ? most[r] / top : 0.0f;
      __m256i sums = _mm256_setzero_si256();
      for (int d = 0; d < D; d += 16) {
        const __m256i y = to_int16(load(q + r * D + d) * splat(inverse), load(q + r * D + d + W) * splat(inverse));
        _mm256_storeu_si256((__m256i*)(x + r * D + d), y);
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(y, _mm256_set1_epi16(1)));
      }
      // A row that isn't finite has x = 0 and total NaN, which makes its scores NaN.
      total[r] = most[r] == most[r] ? unit[r] * (float)sum_int(sums) : most[r];
    }
  }
};

// A page's folded queries: score = unit * sum(x * code) + low.
template <int R>
struct Folded {
  int16_t x[R * kMaxDim];
  float unit[R], low[R];
  bool rough[R];  // rows that have to be computed in float32 instead

  // q: the queries in float32; returns whether a row is rough.
  bool set(const Scales& s, int levels, const IntQuery<R>& query, const float* q, int D) {
    const float step_unit = s.header[0], base = s.header[1], zero_unit = s.header[2];
    __m256i zeros[R];
    for (int r = 0; r < R; ++r) zeros[r] = _mm256_setzero_si256();
    for (int d = 0; d < D; d += 16) {
      const __m256i step = _mm256_slli_epi16(_mm256_cvtepu8_epi16(load16(s.k_scale + d)), 7);
      const __m256i zero = _mm256_cvtepu8_epi16(load16(s.k_zero + d));
      for (int r = 0; r < R; ++r) {
        const __m256i y = load32(query.x + r * D + d);
        _mm256_storeu_si256((__m256i*)(x + r * D + d), _mm256_mulhrs_epi16(y, step));
        zeros[r] = _mm256_add_epi32(zeros[r], _mm256_madd_epi16(y, zero));
      }
    }
    const float allowed = kMostError / (kErrorOfRange * std::sqrt((float)D) * levels);
    bool any = false;
    for (int r = 0; r < R; ++r) {
      unit[r] = query.unit[r] * step_unit * 256.0f;
      low[r] = base * query.total[r] + zero_unit * query.unit[r] * (float)sum_int(zeros[r]);
      rough[r] = false;
      if (query.most[r] * step_unit * 255.0f > allowed) any |= rough[r] = !measure(s, r, q + r * D, D, allowed);
    }
    return any;
  }

  // Folds row r to the measure of this page; false if that is too coarse as well.
  __attribute__((noinline)) bool measure(const Scales& s, int r, const float* q, int D, float allowed) {
    vf high = {}, sums = {};
    for (int d = 0; d < D; d += W) {
      const vf y = load(q + d), f = y * s.k_step(d);
      high = vmax(high, f < splat(0.0f) ? -f : f);
      sums += y * s.k_low(d);
    }
    const float overflow = 2147483647.0f / (255.0f * D), top = overflow < 32767.0f ? overflow : 32767.0f;
    const float most = highest(high), inverse = most > 0.0f ? top / most : 0.0f;
    for (int d = 0; d < D; d += 16) {
      const vf a = load(q + d) * s.k_step(d), b = load(q + d + W) * s.k_step(d + W);
      _mm256_storeu_si256((__m256i*)(x + r * D + d), to_int16(a * splat(inverse), b * splat(inverse)));
    }
    unit[r] = most / top, low[r] = sum(sums);
    return most <= allowed;
  }
};

// A block's probabilities for integer values, and the sums they give.
template <int R>
struct IntValues {
  float folded[R * kBlockColumns];
  uint16_t p[R * kBlockColumns];
  int32_t sums[R * kMaxDim];
  float unit[R], low[R];
  vf high[R], lows[R];

  void begin(int D) {
    std::memset(sums, 0, sizeof(int32_t) * R * D);
    for (int r = 0; r < R; ++r) high[r] = lows[r] = splat(0.0f);
  }

  // Folds a page's steps into its probabilities.
  void fold(const Scales& s, const float* p, int ld, int column, int P) {
    for (int j = 0; j < P; j += W) {
      const vf step = s.v_step(j), zero = s.v_low(j);
      for (int r = 0; r < R; ++r) {
        const vf y = load(p + r * ld + column + j), f = y * step;
        store(folded + r * kBlockColumns + column + j, f);
        high[r] = vmax(high[r], f);
        lows[r] += y * zero;
      }
    }
  }

  // To int16 of the row's largest; step is never negative.
  void round(int columns) {
    for (int r = 0; r < R; ++r) {
      const float most = highest(high[r]), inverse = most > 0.0f ? 32767.0f / most : 0.0f;
      unit[r] = most / 32767.0f, low[r] = sum(lows[r]);
      for (int j = 0; j < columns; j += 16) {
        const float* f = folded + r * kBlockColumns + j;
        _mm256_storeu_si256((__m256i*)(p + r * kBlockColumns + j),
                            to_int16(load(f) * splat(inverse), load(f + W) * splat(inverse)));
      }
    }
  }

  void end(float* acc, int D) const {
    for (int r = 0; r < R; ++r)
      for (int d = 0; d < D; d += W) {
        const vf y = (vf)_mm256_cvtepi32_ps(load32(sums + r * D + d));
        store(acc + r * D + d, load(acc + r * D + d) + (y * splat(unit[r]) + splat(low[r])));
      }
  }
};

// Sixteen-bit halves of a float: bf16, rounded to even; NaN stays NaN.
inline void to_bf16(const float* from, uint16_t* to, int n) {
  for (int i = 0; i < n; ++i) to[i] = float_to_bf16(from[i]);
}

#endif

}  // namespace testbed
