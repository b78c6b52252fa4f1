// Eight float lanes and the loads every page format needs. GCC vector extensions, so that it compiles for any CPU;
// intrinsics only where the compiler can't find the widening instruction by itself.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace testbed {

constexpr int W = 8;
typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
typedef float vfu __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint8_t vb8 __attribute__((vector_size(8)));
typedef uint16_t vh8 __attribute__((vector_size(16)));

inline vf splat(float x) { return vf{x, x, x, x, x, x, x, x}; }
inline vf load(const float* p) { return *reinterpret_cast<const vfu*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vfu*>(p) = x; }
inline vf vmax(vf a, vf b) { return a > b ? a : b; }

inline float sum(vf x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

inline float highest(vf x) {
  float m = x[0];
  for (int i = 1; i < W; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

inline float bf16_to_float(uint16_t h) {
  uint32_t bits = static_cast<uint32_t>(h) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float fp16_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 1023u, bits;
  if (exponent == 31) bits = sign | 0x7f800000u | (fraction << 13);
  else if (exponent) bits = sign | ((exponent + 112) << 23) | (fraction << 13);
  else {
    float x = std::ldexp(static_cast<float>(fraction), -24);
    return sign ? -x : x;
  }
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
#endif
}

inline uint16_t float_to_fp16(float x) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(x, 0));
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  float a = std::fabs(x);
  if (a != a) return sign | 0x7e00;
  if (a >= 65520.0f) return sign | 0x7c00;
  if (a < 6.103515625e-05f) return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(a, 24)));
  bits &= 0x7fffffffu;
  bits += 0xfffu + ((bits >> 13) & 1u);
  return sign | static_cast<uint16_t>((bits - 0x38000000u) >> 13);
#endif
}

// 32-bit words of two bf16 numbers each: those at even places, then those at odd ones, as floats.
struct Pair {
  vf a, b;
};

inline Pair load_bf16_pair(const uint16_t* p) {
  typedef uint32_t vu __attribute__((vector_size(32)));
  typedef uint32_t vuu __attribute__((vector_size(32), aligned(2), may_alias));
  const vu x = *reinterpret_cast<const vuu*>(p);
  return {(vf)(x << 16), (vf)(x & 0xffff0000u)};
}

// Even and odd places to their natural order.
inline Pair interleave(Pair x) {
#if defined(__AVX2__)
  const __m256 low = _mm256_unpacklo_ps((__m256)x.a, (__m256)x.b), high = _mm256_unpackhi_ps((__m256)x.a, (__m256)x.b);
  return {(vf)_mm256_permute2f128_ps(low, high, 0x20), (vf)_mm256_permute2f128_ps(low, high, 0x31)};
#else
  return {vf{x.a[0], x.b[0], x.a[1], x.b[1], x.a[2], x.b[2], x.a[3], x.b[3]},
          vf{x.a[4], x.b[4], x.a[5], x.b[5], x.a[6], x.b[6], x.a[7], x.b[7]}};
#endif
}

// The sums of eight vectors, each in the same order.
inline vf sum_each(const vf* x) {
#if defined(__AVX2__)
  auto add = [](vf a, vf b) { return (vf)_mm256_hadd_ps((__m256)a, (__m256)b); };
  const vf low = add(add(x[0], x[1]), add(x[2], x[3])), high = add(add(x[4], x[5]), add(x[6], x[7]));
  return (vf)_mm256_permute2f128_ps((__m256)low, (__m256)high, 0x20) +
         (vf)_mm256_permute2f128_ps((__m256)low, (__m256)high, 0x31);
#else
  vf y;
  for (int i = 0; i < W; ++i) y[i] = sum(x[i]);
  return y;
#endif
}

inline vf load_bf16(const uint16_t* p) {
#if defined(__AVX2__)
  __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return (vf)_mm256_slli_epi32(x, 16);
#else
  vf x;
  for (int i = 0; i < W; ++i) x[i] = bf16_to_float(p[i]);
  return x;
#endif
}

inline vf load_fp16(const uint16_t* p) {
#if defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vf x;
  for (int i = 0; i < W; ++i) x[i] = fp16_to_float(p[i]);
  return x;
#endif
}

inline vi load_u8(const uint8_t* p) {
#if defined(__AVX2__)
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  vb8 x;
  std::memcpy(&x, p, 8);
  return __builtin_convertvector(x, vi);
#endif
}

inline vf to_float(vi x) {
#if defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps((__m256i)x);
#else
  return __builtin_convertvector(x, vf);
#endif
}

// 2^x, relative error below 2e-7; 0 below 2^-126; NaN stays NaN. Polynomial: Cephes, exp2f.
inline vf exp2v(vf x) {
  vf c = x < splat(-126.0f) ? splat(-126.0f) : x;
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  vf shifted = c + magic;
  vf f = c - (shifted - magic);
  vi i = (vi)shifted - (vi)magic;
  vf y = splat(1.535336188319500e-4f);
  y = y * f + splat(1.339887440266574e-3f);
  y = y * f + splat(9.618437357674640e-3f);
  y = y * f + splat(5.550332471162809e-2f);
  y = y * f + splat(2.402264791363012e-1f);
  y = y * f + splat(6.931472028550421e-1f);
  y = y * f + splat(1.0f);
  vf r = (vf)((vi)y + (i << 23));
  return x < splat(-126.0f) ? splat(0.0f) : r;
}

}  // namespace testbed
