// Readers of a page, one per format, with the layout of kernels/pages.py.
//
// A reader offers vectors in pairs: keys of channel d at tokens (j, j + P/2), values of token j at channels
// (d, d + D/2). Two 4-bit codes in a byte are such a pair, so one load serves both. prepare() folds a quantised
// page's scales into the queries (`fold_q`), finish_p() into the probabilities, never into the elements.
#pragma once
#include "lanes.h"

namespace testbed {

enum Format { kFp32 = 0, kBf16 = 1, kFp16 = 2, kInt8 = 3, kInt4 = 4, kProto = 5 };

struct Pair {
  vf a, b;
};

struct Fp32Page {
  static constexpr bool kQuantised = false;
  const float *k, *v;
  int P, D;
  Fp32Page(const uint8_t* blob, int P, int D) : k((const float*)blob), v((const float*)blob + P * D), P(P), D(D) {}
  Pair keys(int d, int j) const { return {load(k + d * P + j), load(k + d * P + j + P / 2)}; }
  Pair values(int j, int d) const { return {load(v + j * D + d), load(v + j * D + d + D / 2)}; }
};

template <vf (*LOAD)(const uint16_t*)>
struct HalfPage {
  static constexpr bool kQuantised = false;
  const uint16_t *k, *v;
  int P, D;
  HalfPage(const uint8_t* blob, int P, int D)
      : k((const uint16_t*)blob), v((const uint16_t*)blob + P * D), P(P), D(D) {}
  Pair keys(int d, int j) const { return {LOAD(k + d * P + j), LOAD(k + d * P + j + P / 2)}; }
  Pair values(int j, int d) const { return {LOAD(v + j * D + d), LOAD(v + j * D + d + D / 2)}; }
};
using Bf16Page = HalfPage<load_bf16>;
using Fp16Page = HalfPage<load_fp16>;

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
  static constexpr bool kQuantised = true;
  const uint8_t *k, *v;
  int P, D;
  Scales scales;
  Int8Page(const uint8_t* blob, int P, int D) : k(blob), v(blob + P * D), P(P), D(D), scales(blob + 2 * P * D, P, D) {}
  Pair keys(int d, int j) const {
    return {to_float(load_u8(k + d * P + j)), to_float(load_u8(k + d * P + j + P / 2))};
  }
  Pair values(int j, int d) const {
    return {to_float(load_u8(v + j * D + d)), to_float(load_u8(v + j * D + d + D / 2))};
  }
};

struct Int4Page {
  static constexpr bool kQuantised = true;
  const uint8_t *k, *v;
  int P, D;
  Scales scales;
  Int4Page(const uint8_t* blob, int P, int D) : k(blob), v(blob + P * D / 2), P(P), D(D), scales(blob + P * D, P, D) {}
  static Pair split(const uint8_t* p) {
    vi both = load_u8(p);
    return {to_float(both & 15), to_float(both >> 4)};
  }
  Pair keys(int d, int j) const { return split(k + d * (P / 2) + j); }
  Pair values(int j, int d) const { return split(v + j * (D / 2) + d); }
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
