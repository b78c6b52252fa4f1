// Prototypes: entries of one or a few mean keys and values [C, D] in bf16, each with log2 of the tokens it stands for.
// Those of a whole block of entries are worked on together, several dot products at once.
#pragma once
#include "pages.h"

namespace testbed {

struct Proto {
  const uint16_t *k, *v;
  float log2_count;
  int column;  // of its score
};

constexpr int kProtoRun = 24;  // prototypes whose values stay in L1 while all channels are added

// Even and odd places of each sixteen, the order in which bf16 numbers are loaded.
inline void pair_order(const float* x, int D, float* out) {
  for (int d = 0; d < D; d += 16)
    for (int i = 0; i < 8; ++i) {
      out[d + i] = x[d + 2 * i];
      out[d + 8 + i] = x[d + 2 * i + 1];
    }
}

// scores[r][column] = q[r] . k + log2_count, q in pair order; D a multiple of 16. Two prototypes at a time, so that the
// 2 R sums hide each other's latency; the last one is its own partner.
template <int R>
__attribute__((noinline)) void score_protos(const Proto* protos, int n, const float* q, int D, float* scores, int ld) {
  for (int m = 0; m < n; m += 2) {
    const Proto &one = protos[m], &two = protos[m + 1 < n ? m + 1 : m];
    vf sums[16] = {};
    for (int d = 0; d < D; d += 16) {
      const Pair x = load_bf16_pair(one.k + d), y = load_bf16_pair(two.k + d);
      for (int r = 0; r < R; ++r) {
        const vf even = load(q + r * D + d), odd = load(q + r * D + d + 8);
        sums[r] += even * x.a, sums[8 + r] += even * y.a;
        sums[r] += odd * x.b, sums[8 + r] += odd * y.b;
      }
    }
    const vf a = sum_each(sums), b = sum_each(sums + 8);
    for (int r = 0; r < R; ++r) {
      scores[r * ld + two.column] = b[r] + two.log2_count;
      scores[r * ld + one.column] = a[r] + one.log2_count;
    }
  }
}

// acc[r] += sum p[r][column] v, in pair order; D a multiple of 16.
template <int R>
__attribute__((noinline)) void add_protos(const Proto* protos, int n, const float* p, int ld, int D, float* acc) {
  for (int from = 0; from < n; from += kProtoRun) {
    const int end = from + kProtoRun < n ? from + kProtoRun : n;
    for (int d = 0; d < D; d += 16) {
      vf a[R], b[R];
      for (int r = 0; r < R; ++r) a[r] = load(acc + r * D + d), b[r] = load(acc + r * D + d + 8);
      for (int m = from; m < end; ++m) {
        const Pair v = load_bf16_pair(protos[m].v + d);
        const float* x = p + protos[m].column;
        for (int r = 0; r < R; ++r) {
          a[r] += splat(x[r * ld]) * v.a;
          b[r] += splat(x[r * ld]) * v.b;
        }
      }
      for (int r = 0; r < R; ++r) store(acc + r * D + d, a[r]), store(acc + r * D + d + 8, b[r]);
    }
  }
}

// Any head size, eight channels at a time, in natural order; acc rows are Dp apart.
template <int R>
void score_protos_by_eight(const Proto* protos, int n, const float* q, int D, float* scores, int ld) {
  for (int m = 0; m < n; ++m) {
    vf sums[R] = {};
    for (int d = 0; d < D; d += W) {
      const vf x = load_bf16(protos[m].k + d);
      for (int r = 0; r < R; ++r) sums[r] += load(q + r * D + d) * x;
    }
    for (int r = 0; r < R; ++r) scores[r * ld + protos[m].column] = sum(sums[r]) + protos[m].log2_count;
  }
}

template <int R>
void add_protos_by_eight(const Proto* protos, int n, const float* p, int ld, int D, int Dp, float* acc) {
  for (int m = 0; m < n; ++m)
    for (int d = 0; d < D; d += W) {
      const vf x = load_bf16(protos[m].v + d);
      for (int r = 0; r < R; ++r) {
        float* to = acc + r * Dp + d;
        store(to, load(to) + splat(p[r * ld + protos[m].column]) * x);
      }
    }
}

}  // namespace testbed
