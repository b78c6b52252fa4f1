// Sixteen lanes for dot products of pairs: int16 x int16 into int32, and bf16 x bf16 into float32. With AVX-512 (VNNI,
// BF16) one instruction each; with AVX2 the integers are two multiply-adds, the same result bit for bit. The bf16 path
// on a machine without the instruction is an emulation for tests (-DTESTBED_EMULATE_BF16): converting to float32 is
// faster there.
#pragma once
#include "lanes.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define TESTBED_VNNI 1
#else
#define TESTBED_VNNI 0
#endif
#if defined(__AVX512BF16__) && TESTBED_VNNI && !defined(TESTBED_EMULATE_BF16)
#define TESTBED_BF16 1
#else
#define TESTBED_BF16 0
#endif

namespace testbed {

#if defined(__AVX2__)

#if defined(TESTBED_EMULATE_BF16)
constexpr bool kBf16Dots = true;
#else
constexpr bool kBf16Dots = TESTBED_BF16;
#endif

inline __m128i load16(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
inline __m256i load32(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline __m128i load8(const void* p) { return _mm_loadl_epi64((const __m128i*)p); }

// Thirty-two 16-bit numbers: sixteen lanes of pairs.
#if TESTBED_VNNI
typedef __m512i Pairs;
typedef __m512i Splat;
inline Pairs join(__m256i a, __m256i b) { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); }
inline Splat splat_pair(const void* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}
#else
struct Pairs {
  __m256i a, b;
};
typedef __m256i Splat;
inline Pairs join(__m256i a, __m256i b) { return {a, b}; }
inline Splat splat_pair(const void* p) { return _mm256_castps_si256(_mm256_broadcast_ss((const float*)p)); }
#endif

// Sums of int16 products in sixteen int32 lanes, kept in memory as two runs of eight.
struct IntSums {
  typedef int32_t Cell;
#if TESTBED_VNNI
  __m512i x;
  static IntSums zero() { return {_mm512_setzero_si512()}; }
  static IntSums from(const Cell* a, const Cell* b) { return {join(load32(a), load32(b))}; }
  void to(Cell* a, Cell* b) const {
    _mm256_storeu_si256((__m256i*)a, _mm512_castsi512_si256(x));
    _mm256_storeu_si256((__m256i*)b, _mm512_extracti64x4_epi64(x, 1));
  }
  void dot(const Pairs& p, Splat w) { x = _mm512_dpwssd_epi32(x, p, w); }
  vf first() const { return (vf)_mm256_cvtepi32_ps(_mm512_castsi512_si256(x)); }
  vf second() const { return (vf)_mm256_cvtepi32_ps(_mm512_extracti64x4_epi64(x, 1)); }
#else
  __m256i x, y;
  static IntSums zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static IntSums from(const Cell* a, const Cell* b) { return {load32(a), load32(b)}; }
  void to(Cell* a, Cell* b) const {
    _mm256_storeu_si256((__m256i*)a, x);
    _mm256_storeu_si256((__m256i*)b, y);
  }
  void dot(const Pairs& p, Splat w) {
    x = _mm256_add_epi32(x, _mm256_madd_epi16(p.a, w));
    y = _mm256_add_epi32(y, _mm256_madd_epi16(p.b, w));
    asm("" : "+x"(x), "+x"(y));  // else sums of several steps are formed first, and spilled
  }
  vf first() const { return (vf)_mm256_cvtepi32_ps(x); }
  vf second() const { return (vf)_mm256_cvtepi32_ps(y); }
#endif
};

// The same for bf16 products in float32.
struct FloatSums {
  typedef float Cell;
#if TESTBED_BF16
  __m512 x;
  static FloatSums zero() { return {_mm512_setzero_ps()}; }
  static FloatSums from(const Cell* a, const Cell* b) {
    return {_mm512_castsi512_ps(join(load32(a), load32(b)))};
  }
  void to(Cell* a, Cell* b) const {
    store(a, first());
    store(b, second());
  }
  void dot(const Pairs& p, Splat w) { x = _mm512_dpbf16_ps(x, (__m512bh)p, (__m512bh)w); }
  vf first() const { return (vf)_mm512_castps512_ps256(x); }
  vf second() const { return (vf)_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)); }
#else
  vf x, y;
  static FloatSums zero() { return {splat(0.0f), splat(0.0f)}; }
  static FloatSums from(const Cell* a, const Cell* b) { return {load(a), load(b)}; }
  void to(Cell* a, Cell* b) const {
    store(a, x);
    store(b, y);
  }
  static vf even(__m256i p) { return (vf)_mm256_slli_epi32(p, 16); }
  static vf odd(__m256i p) { return (vf)_mm256_and_si256(p, _mm256_set1_epi32((int)0xffff0000)); }
#if TESTBED_VNNI
  void dot(const Pairs& p, Splat w) {
    const __m256i v = _mm512_castsi512_si256(w), a = _mm512_castsi512_si256(p), b = _mm512_extracti64x4_epi64(p, 1);
    x += odd(a) * odd(v), x += even(a) * even(v);
    y += odd(b) * odd(v), y += even(b) * even(v);
  }
#else
  void dot(const Pairs& p, Splat w) {
    x += odd(p.a) * odd(w), x += even(p.a) * even(w);
    y += odd(p.b) * odd(w), y += even(p.b) * even(w);
  }
#endif
  vf first() const { return x; }
  vf second() const { return y; }
#endif
};

// Bytes a[i], b[i] of sixteen columns as pairs of 16 bits. Crossing lanes costs twice a shuffle within them, so with
// AVX2 both lanes are loaded with the same bytes.
#if TESTBED_VNNI
inline Pairs widen_pairs(const uint8_t* a, const uint8_t* b) {
  const __m128i x = load16(a), y = load16(b);
  return _mm512_cvtepu8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(x, y), _mm_unpacklo_epi8(x, y)));
}
inline __m256i widen_eight(const uint8_t* a, const uint8_t* b) {
  return _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(load8(a), load8(b)));
}
#else
inline __m256i spread(__m256i pairs) {  // bytes 0-7 of the first lane, 8-15 of the second
  const __m256i places = _mm256_setr_epi8(0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1, 7, -1, 8, -1, 9, -1, 10, -1,
                                          11, -1, 12, -1, 13, -1, 14, -1, 15, -1);
  return _mm256_shuffle_epi8(pairs, places);
}
inline Pairs widen_pairs(const uint8_t* a, const uint8_t* b) {
  const __m256i x = _mm256_broadcastsi128_si256(load16(a)), y = _mm256_broadcastsi128_si256(load16(b));
  return {spread(_mm256_unpacklo_epi8(x, y)), spread(_mm256_unpackhi_epi8(x, y))};
}
inline __m256i widen_eight(const uint8_t* a, const uint8_t* b) {
  return spread(_mm256_unpacklo_epi8(_mm256_broadcastq_epi64(load8(a)), _mm256_broadcastq_epi64(load8(b))));
}
#endif

// 4-bit codes of eight columns: the low halves are the first eight lanes, the high halves the second.
inline Pairs split_pairs(__m256i bytes) {
  return join(_mm256_and_si256(bytes, _mm256_set1_epi16(15)), _mm256_srli_epi16(bytes, 4));
}

// 16-bit numbers a[i], b[i] of sixteen columns as pairs.
inline Pairs zip_pairs(__m256i a, __m256i b) {
  const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);  // columns 0-3, 8-11; 4-7, 12-15
  return join(_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31));
}

inline int32_t sum_int(__m256i x) {
  const __m128i a = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i b = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}

// Sixteen floats, rounded, as int16.
inline __m256i to_int16(vf a, vf b) {
  const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32((__m256)a), _mm256_cvtps_epi32((__m256)b));
  return _mm256_permute4x64_epi64(both, 0xd8);
}

#endif

}  // namespace testbed
