// Attention over one page in float32: scores of its keys, and its values added up by probability.
#pragma once
#include "pages.h"

namespace testbed {

constexpr int kMaxDim = 1024, kMaxPage = 64;

// What to ask the memory for while something else is worked on, line by line: pages are too short for the hardware to
// see a stream in them.
struct Ahead {
  const uint8_t *at, *end;
  void go() {
    if (at < end) {
      __builtin_prefetch(at, 0, 2);
      at += 64;
    }
  }
  void rest() {
    for (; at < end; at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// scores[r][j] = q[r] . key[j]; score rows are ld apart.
template <class F, int R>
__attribute__((noinline)) void score_page(const F& page, const float* q, int D, int P, float* scores, int ld,
                                          Ahead& ahead) {
  float folded[F::kQuantised ? R * kMaxDim : 1];
  float low[R] = {};
  if constexpr (F::kQuantised) {
    vf sums[R] = {};
    for (int d = 0; d < D; d += W) {
      vf step = page.scales.k_step(d), zero = page.scales.k_low(d);
      for (int r = 0; r < R; ++r) {
        vf x = load(q + r * D + d);
        store(folded + r * D + d, x * step);
        sums[r] += x * zero;
      }
    }
    for (int r = 0; r < R; ++r) low[r] = sum(sums[r]);
    q = folded;
  }
  Ahead line = ahead;
  for (int i = 0; i < P / 16; ++i) {
    vf a[R], b[R];
    for (int r = 0; r < R; ++r) a[r] = b[r] = splat(low[r]);
    auto step = [&](int d) __attribute__((always_inline)) {
      Pair k = page.keys(d, i);
      for (int r = 0; r < R; ++r) {
        vf x = splat(q[r * D + d]);
        a[r] += x * k.a;
        b[r] += x * k.b;
      }
    };
    for (int d = 0; d < D; d += 2) {
      for (int n = 0; n < F::kLines; ++n) line.go();
      step(d);
      step(d + 1);
    }
    for (int r = 0; r < R; ++r) {
      const Pair s = F::kPaired ? interleave({a[r], b[r]}) : Pair{a[r], b[r]};
      store(scores + r * ld + F::first(P, i), s.a);
      store(scores + r * ld + F::second(P, i), s.b);
    }
  }
  ahead = line;
}

// acc[r] += sum_j p[r][j] value[j]; Dp is D up to a multiple of 16. Sums of a kPaired page keep its order.
template <class F, int R>
__attribute__((noinline)) void add_page(const F& page, const float* p, int ld, int Dp, int P, float* acc,
                                        Ahead& ahead) {
  float folded[F::kQuantised ? R * kMaxPage : 1];
  float low[R] = {};
  if constexpr (F::kQuantised) {
    vf sums[R] = {};
    for (int j = 0; j < P; j += W) {
      vf step = page.scales.v_step(j), zero = page.scales.v_low(j);
      for (int r = 0; r < R; ++r) {
        vf x = load(p + r * ld + j);
        store(folded + r * P + j, x * step);
        sums[r] += x * zero;
      }
    }
    for (int r = 0; r < R; ++r) low[r] = sum(sums[r]);
    p = folded;
    ld = P;
  }
  Ahead line = ahead;
  for (int i = 0; i < Dp / 16; ++i) {
    const int first = F::first(Dp, i), second = F::second(Dp, i);
    vf a[R], b[R];
    for (int r = 0; r < R; ++r) {
      a[r] = load(acc + r * Dp + first) + splat(low[r]);
      b[r] = load(acc + r * Dp + second) + splat(low[r]);
    }
    auto step = [&](int j) __attribute__((always_inline)) {
      Pair v = page.values(j, i);
      for (int r = 0; r < R; ++r) {
        vf x = splat(p[r * ld + j]);
        a[r] += x * v.a;
        b[r] += x * v.b;
      }
    };
    for (int j = 0; j < P; j += 2) {
      for (int n = 0; n < F::kLines; ++n) line.go();
      step(j);
      step(j + 1);
    }
    for (int r = 0; r < R; ++r) {
      store(acc + r * Dp + first, a[r]);
      store(acc + r * Dp + second, b[r]);
    }
  }
  ahead = line;
}

}  // namespace testbed
