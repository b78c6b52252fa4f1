// Readers of a page, one per format, with the layout of kernels/pages.py.
//
// A reader offers vectors in pairs: sixteen tokens of key channel d, sixteen channels of value token j, the two vectors
// belonging at `first` and `second` of a row of n; with kPaired they are those at even and those at odd places. Scales
// are folded into queries and probabilities, never into the elements.
#pragma once
#include "lanes.h"

namespace testbed {

enum Format { kFp32 = 0, kBf16 = 1, kFp16 = 2, kInt8 = 3, kInt4 = 4, kProto = 5 };

struct Fp32Page {
  static constexpr bool kQuantised = false, kPaired = false;
  static constexpr int kLines = 2;
  const float *k, *v;
  int P, D;
  Fp32Page(const uint8_t* blob, int P, int D) : k((const float*)blob), v((const float*)blob + P * D), P(P), D(D) {}
  Pair keys(int d, int i) const { return two(k + d * P + 16 * i); }
  Pair values(int j, int i) const { return two(v + j * D + 16 * i); }
  static Pair two(const float* p) { return {load(p), load(p + W)}; }
  static int first(int, int i) { return 16 * i; }
  static int second(int, int i) { return 16 * i + 8; }
};

struct Fp16Page {
  static constexpr bool kQuantised = false, kPaired = false;
  static constexpr int kLines = 1;
  const uint16_t *k, *v;
  int P, D;
  Fp16Page(const uint8_t* blob, int P, int D) : k((const uint16_t*)blob), v(k + P * D), P(P), D(D) {}
  Pair keys(int d, int i) const { return two(k + d * P + 16 * i); }
  Pair values(int j, int i) const { return two(v + j * D + 16 * i); }
  static Pair two(const uint16_t* p) { return {load_fp16(p), load_fp16(p + W)}; }
  static int first(int, int i) { return 16 * i; }
  static int second(int, int i) { return 16 * i + 8; }
};

// Two neighbours are one 32-bit word, either half of it a float once the other is cleared.
struct Bf16Page {
  static constexpr bool kQuantised = false, kPaired = true;
  static constexpr int kLines = 1;
  const uint16_t *k, *v;
  int P, D;
  Bf16Page(const uint8_t* blob, int P, int D) : k((const uint16_t*)blob), v(k + P * D), P(P), D(D) {}
  Pair keys(int d, int i) const { return load_bf16_pair(k + d * P + 16 * i); }
  Pair values(int j, int i) const { return load_bf16_pair(v + j * D + 16 * i); }
  static int first(int, int i) { return 16 * i; }
  static int second(int, int i) { return 16 * i + 8; }
};

// header: key step unit, key base, key zero unit, then the same for values.
struct Scales {
  const uint8_t *k_scale, *k_zero, *v_scale, *v_zero;
  float header[6];
  Scales(const uint8_t* header_at, int P, int D)
      : k_scale(header_at + 24), k_zero(k_scale + D), v_scale(k_zero + D), v_zero(v_scale + P) {
    std::memcpy(header, header_at, 24);
  }
  vf k_step(int d) const { return to_float(load_u8(k_scale + d)) * splat(header[0]); }
  vf k_low(int d) const { return to_float(load_u8(k_zero + d)) * splat(header[2]) + splat(header[1]); }
  vf v_step(int j) const { return to_float(load_u8(v_scale + j)) * splat(header[3]); }
  vf v_low(int j) const { return to_float(load_u8(v_zero + j)) * splat(header[5]) + splat(header[4]); }
};

struct Int8Page {
  static constexpr bool kQuantised = true, kPaired = false;
  static constexpr int kLines = 1, kLevels = 255;
  const uint8_t *k, *v;
  int P, D;
  Scales scales;
  Int8Page(const uint8_t* blob, int P, int D) : k(blob), v(blob + P * D), P(P), D(D), scales(blob + 2 * P * D, P, D) {}
  Pair keys(int d, int i) const { return two(k + d * P + 16 * i); }
  Pair values(int j, int i) const { return two(v + j * D + 16 * i); }
  static Pair two(const uint8_t* p) { return {to_float(load_u8(p)), to_float(load_u8(p + W))}; }
  static int first(int, int i) { return 16 * i; }
  static int second(int, int i) { return 16 * i + 8; }
};

struct Int4Page {
  static constexpr bool kQuantised = true, kPaired = false;
  static constexpr int kLines = 1, kLevels = 15;
  const uint8_t *k, *v;
  int P, D;
  Scales scales;
  Int4Page(const uint8_t* blob, int P, int D) : k(blob), v(blob + P * D / 2), P(P), D(D), scales(blob + P * D, P, D) {}
  Pair keys(int d, int i) const { return split(k + d * (P / 2) + 8 * i); }
  Pair values(int j, int i) const { return split(v + j * (D / 2) + 8 * i); }
  static Pair split(const uint8_t* p) {
    vi both = load_u8(p);
    return {to_float(both & 15), to_float(both >> 4)};
  }
  static int first(int, int i) { return 8 * i; }
  static int second(int n, int i) { return 8 * i + n / 2; }
};

// Any format and any head size, one element at a time: keys [D, P], values [P, Dp] with zeros beyond D.
inline void unpack(int format, const uint8_t* blob, int P, int D, int Dp, float* k, float* v) {
  auto each = [&](auto key, auto value) {
    for (int d = 0; d < D; ++d)
      for (int j = 0; j < P; ++j) k[d * P + j] = key(d, j);
    for (int j = 0; j < P; ++j)
      for (int d = 0; d < Dp; ++d) v[j * Dp + d] = d < D ? value(j, d) : 0.0f;
  };
  if (format == kFp32) {
    const float* x = (const float*)blob;
    each([&](int d, int j) { return x[d * P + j]; }, [&](int j, int d) { return x[P * D + j * D + d]; });
  } else if (format == kBf16) {
    const uint16_t* x = (const uint16_t*)blob;
    each([&](int d, int j) { return bf16_to_float(x[d * P + j]); },
         [&](int j, int d) { return bf16_to_float(x[P * D + j * D + d]); });
  } else if (format == kFp16) {
    const uint16_t* x = (const uint16_t*)blob;
    each([&](int d, int j) { return fp16_to_float(x[d * P + j]); },
         [&](int j, int d) { return fp16_to_float(x[P * D + j * D + d]); });
  } else {
    bool eight = format == kInt8;
    const uint8_t *kc = blob, *vc = blob + (eight ? P * D : P * D / 2);
    Scales s(blob + (eight ? 2 * P * D : P * D), P, D);
    auto code = [&](const uint8_t* row, int i, int n) {
      return eight ? row[i] : i < n / 2 ? row[i] & 15 : row[i - n / 2] >> 4;
    };
    each(
        [&](int d, int j) {
          return s.header[1] + s.k_zero[d] * s.header[2] + code(kc + d * (eight ? P : P / 2), j, P) * (s.k_scale[d] * s.header[0]);
        },
        [&](int j, int d) {
          return s.header[4] + s.v_zero[j] * s.header[5] + code(vc + j * (eight ? D : D / 2), d, D) * (s.v_scale[j] * s.header[3]);
        });
  }
}

}  // namespace testbed
