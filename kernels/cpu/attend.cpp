// Attention over ragged paged streams, append and encode: see kernels/api.py and kernels/pages.py for the contract.
//
// A work item is (stream, split of kSplitTokens keys, block of up to kRows rows). Splits depend on the stream alone,
// so a row's result depends neither on the other streams nor on the number of threads. Within a split, keys go by
// blocks of kBlockTokens: scores, one softmax rescale, values (the block's pages are still in L2 for the second pass).
#include <type_traits>
#include <vector>

#include "pages.h"
#include "parallel.h"

namespace testbed {

constexpr int kRows = 6, kSplitTokens = 1024, kBlockTokens = 256, kMaxDim = 1024, kAhead = 4;
const float kInf = __builtin_inff();

struct PoolArg {
  int64_t format, rows, slab_pages, slabs, bytes;
};

struct Args {
  const float* q;  // [S, G, T, D]
  int64_t S, G, T, D, N, P;
  const int8_t* pool;
  const int32_t *slot, *page;
  int64_t pool_stride, slot_stride, page_stride;
  const int32_t *count, *first, *windows;
  const PoolArg* pools;
  float scale;
  int64_t sinks;
  const float* slopes;  // [S, G] or null
  float *out, *lse, *mass;
  int64_t threads;
};

struct Scratch {
  std::vector<float> out, top, total;       // [S, splits, rows, Dp], [S, splits, rows] twice
  std::vector<float> entry_sum, block_top;  // [S, rows, N], [S, rows, blocks], for the mass
  std::vector<float> row_top, row_total;    // [S, rows]
};

// Pages are too short for the hardware to see a stream in them, so the next half page is asked for bit by bit.
struct Ahead {
  const uint8_t* at;
  int step;
  void go() {
    __builtin_prefetch(at, 0, 2);
    at += step;
  }
};

// scores[r][j] = q[r] . key[j]; rows are ld apart.
template <class F, int R>
__attribute__((noinline)) void score_page(const F& page, const float* q, int D, int P, float* scores, int ld, Ahead ahead) {
  float folded[R * kMaxDim];
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
  for (int j = 0; j < P / 2; j += W) {
    vf a[R], b[R];
    for (int r = 0; r < R; ++r) a[r] = b[r] = splat(low[r]);
    for (int d = 0; d < D; ++d) {
      if (j == 0) ahead.go();
      Pair k = page.keys(d, j);
      for (int r = 0; r < R; ++r) {
        vf x = splat(q[r * D + d]);
        a[r] += x * k.a;
        b[r] += x * k.b;
      }
    }
    for (int r = 0; r < R; ++r) {
      store(scores + r * ld + j, a[r]);
      store(scores + r * ld + j + P / 2, b[r]);
    }
  }
}

// acc[r] += sum_j p[r][j] value[j]; Dp is a multiple of 16.
template <class F, int R>
__attribute__((noinline)) void add_page(const F& page, const float* p, int ld, int Dp, int P, float* acc, Ahead ahead) {
  float folded[R * 64];
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
  for (int d = 0; d < Dp / 2; d += W) {
    vf a[R], b[R];
    for (int r = 0; r < R; ++r) {
      a[r] = load(acc + r * Dp + d) + splat(low[r]);
      b[r] = load(acc + r * Dp + d + Dp / 2) + splat(low[r]);
    }
    for (int j = 0; j < P; ++j) {
      ahead.go();
      Pair v = page.values(j, d);
      for (int r = 0; r < R; ++r) {
        vf x = splat(p[r * ld + j]);
        a[r] += x * v.a;
        b[r] += x * v.b;
      }
    }
    for (int r = 0; r < R; ++r) {
      store(acc + r * Dp + d, a[r]);
      store(acc + r * Dp + d + Dp / 2, b[r]);
    }
  }
}

// Prototypes: few rows, so keys lie [C, D] and each score is one dot product.
template <int R>
void score_proto(const uint8_t* blob, int C, const float* q, int D, int P, float* scores, int ld) {
  const uint16_t* k = (const uint16_t*)blob;
  const float* log2_count = (const float*)(blob + 4ll * C * D);
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < P; ++j) scores[r * ld + j] = -kInf;
  for (int c = 0; c < C; ++c) {
    if (!(log2_count[c] > -kInf)) continue;
    vf sums[R] = {};
    for (int d = 0; d < D; d += W) {
      vf x = load_bf16(k + c * D + d);
      for (int r = 0; r < R; ++r) sums[r] += load(q + r * D + d) * x;
    }
    for (int r = 0; r < R; ++r) scores[r * ld + c] = sum(sums[r]) + log2_count[c];
  }
}

template <int R>
void add_proto(const uint8_t* blob, int C, const float* p, int ld, int D, int Dp, float* acc) {
  const uint16_t* v = (const uint16_t*)blob + (int64_t)C * D;
  const float* log2_count = (const float*)(blob + 4ll * C * D);
  for (int c = 0; c < C; ++c) {
    if (!(log2_count[c] > -kInf)) continue;
    for (int d = 0; d < D; d += W) {
      vf x = load_bf16(v + c * D + d);
      for (int r = 0; r < R; ++r) store(acc + r * Dp + d, load(acc + r * Dp + d) + splat(p[r * ld + c]) * x);
    }
  }
}

enum Sight { kHidden, kPartly, kWhole };

// The rows of one work item over one split.
template <int R>
struct Item {
  const Args& a;
  int64_t s, row, window;  // first row, g * T + t
  int P, D, Dp;
  float q[R * kMaxDim], acc[R * kMaxDim];
  float top[R], total[R], slope[R];
  int64_t own[R], lowest, highest_own;

  Item(const Args& args, int64_t stream, int64_t first_row) : a(args), s(stream), row(first_row), window(args.windows[stream]) {
    P = (int)a.P, D = (int)a.D, Dp = (D + 15) / 16 * 16;
    const float factor = a.scale * 1.4426950408889634f;
    lowest = INT64_MAX, highest_own = INT64_MIN;
    for (int r = 0; r < R; ++r) {
      const float* from = a.q + (s * a.G * a.T + row + r) * D;
      for (int d = 0; d < D; ++d) q[r * D + d] = from[d] * factor;
      own[r] = a.first[s] + (row + r) % a.T;
      lowest = own[r] < lowest ? own[r] : lowest;
      highest_own = own[r] > highest_own ? own[r] : highest_own;
      slope[r] = a.slopes ? a.slopes[s * a.G + (row + r) / a.T] * 1.4426950408889634f : 0.0f;
      top[r] = -kInf, total[r] = 0.0f;
    }
    std::memset(acc, 0, sizeof(float) * R * Dp);
  }

  const PoolArg& pool(int64_t n) const { return a.pools[a.pool[s * a.pool_stride + n]]; }
  const uint8_t* blob(int64_t n) const {
    const PoolArg& p = pool(n);
    const uint32_t slot = a.slot[s * a.slot_stride + n], pages = (uint32_t)p.slab_pages;
    const uint8_t* const* slabs = (const uint8_t* const*)p.slabs;
    return slabs[slot / pages] + (int64_t)(slot % pages) * p.bytes;
  }
  // What to fetch while another page is worked on: half a page, spread over `steps` iterations.
  Ahead ahead(int64_t n, int64_t end, bool values, int steps) const {
    if (n >= end) return {blob(end - 1), 0};
    const int64_t half = pool(n).bytes / 2;
    return {blob(n) + (values ? half : 0), (int)((half + steps - 1) / steps)};
  }
  int64_t start(int64_t n) const { return (int64_t)a.page[s * a.page_stride + n] * P; }

  Sight sight(int64_t n) const {
    if (pool(n).format == kProto) return kWhole;
    int64_t first = start(n), last = first + P - 1;
    if (first > highest_own || (window && last <= lowest - window && first >= a.sinks)) return kHidden;
    return last <= lowest && (!window || first > highest_own - window || last < a.sinks) ? kWhole : kPartly;
  }
  bool sees(int r, int64_t position) const {
    return position <= own[r] && (!window || position > own[r] - window || position < a.sinks);
  }

  void score(int64_t n, Sight seen, float* scores, int ld, Ahead ahead) {
    const PoolArg& p = pool(n);
    const uint8_t* b = blob(n);
    if (p.format == kProto) {
      score_proto<R>(b, (int)p.rows, q, D, P, scores, ld);
      if (a.slopes)
        for (int r = 0; r < R; ++r)
          for (int j = 0; j < p.rows; ++j) scores[r * ld + j] += slope[r] * (start(n) - own[r] + (P - 1) * 0.5f);
      return;
    }
    dispatch(p.format, b, [&](const auto& page) {
      score_page<std::decay_t<decltype(page)>, R>(page, q, D, P, scores, ld, ahead);
    });
    if (a.slopes)
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < P; ++j) scores[r * ld + j] += slope[r] * (float)(start(n) + j - own[r]);
    if (seen == kPartly)
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < P; ++j)
          if (!sees(r, start(n) + j)) scores[r * ld + j] = -kInf;
  }

  void add(int64_t n, Sight seen, const float* p, int ld, Ahead ahead) {
    const PoolArg& from = pool(n);
    const uint8_t* b = blob(n);
    if (from.format == kProto) return add_proto<R>(b, (int)from.rows, p, ld, D, Dp, acc);
    if (seen == kPartly) return add_partly(from.format, b, n, p, ld);
    dispatch(from.format, b, [&](const auto& page) {
      add_page<std::decay_t<decltype(page)>, R>(page, p, ld, Dp, P, acc, ahead);
    });
  }

  // What nobody sees may be NaN, and 0 * NaN is NaN: those values are zeroed in a copy.
  void add_partly(int64_t format, const uint8_t* b, int64_t n, const float* p, int ld) {
    std::vector<float>& tile = copy(format, b);
    for (int j = 0; j < P; ++j) {
      bool seen = false;
      for (int r = 0; r < R; ++r) seen = seen || sees(r, start(n) + j);
      if (!seen) std::memset(tile.data() + P * Dp + j * Dp, 0, sizeof(float) * Dp);
    }
    add_page<Fp32Page, R>(Fp32Page((const uint8_t*)tile.data(), P, Dp), p, ld, Dp, P, acc, {b, 0});
  }

  std::vector<float>& copy(int64_t format, const uint8_t* b) const {
    static thread_local std::vector<float> tile;
    tile.resize(2 * P * Dp);
    unpack((int)format, b, P, D, Dp, tile.data(), tile.data() + P * Dp);
    return tile;
  }

  template <class Body>
  void dispatch(int64_t format, const uint8_t* b, Body body) {
    if (D % 16) return body(Fp32Page((const uint8_t*)copy(format, b).data(), P, Dp));
    switch (format) {
      case kFp32: return body(Fp32Page(b, P, D));
      case kBf16: return body(Bf16Page(b, P, D));
      case kFp16: return body(Fp16Page(b, P, D));
      case kInt8: return body(Int8Page(b, P, D));
      default: return body(Int4Page(b, P, D));
    }
  }

  void split(int64_t begin, int64_t end, Scratch& scratch) {
    const int64_t reach = a.threads == 1 ? a.count[s] : end;  // alone, the next split is this thread's too
    alignas(64) float scores[R * kBlockTokens];
    Sight seen[kBlockTokens / 16];
    const int64_t step = kBlockTokens / P, blocks = (a.N + step - 1) / step, rows = a.G * a.T;
    for (int64_t n0 = begin; n0 < end; n0 += step) {
      const int64_t n1 = n0 + step < end ? n0 + step : end;
      const int width = (int)(n1 - n0) * P;
      for (int64_t n = n0; n < n1; ++n) {
        float* to = scores + (n - n0) * P;
        seen[n - n0] = sight(n);
        if (n0 == begin && n + kAhead < n1)  // later blocks' keys come in while the block before is added
          for (int64_t i = 0; i < pool(n + kAhead).bytes / 2; i += 64) __builtin_prefetch(blob(n + kAhead) + i, 0, 2);
        if (seen[n - n0] != kHidden) score(n, seen[n - n0], to, kBlockTokens, ahead(n, reach, true, D));
        else
          for (int r = 0; r < R; ++r)
            for (int j = 0; j < P; ++j) to[r * kBlockTokens + j] = -kInf;
      }
      bool any = false;
      for (int r = 0; r < R; ++r) any |= soften(scores + r * kBlockTokens, width, r);
      if (a.mass)
        for (int r = 0; r < R; ++r) {
          const int64_t at = s * rows + row + r;
          scratch.block_top[at * blocks + n0 / step] = top[r];
          for (int64_t n = n0; n < n1; ++n) {
            vf x = {};
            for (int j = 0; j < P; j += W) x += load(scores + r * kBlockTokens + (n - n0) * P + j);
            scratch.entry_sum[at * a.N + n] = sum(x);
          }
        }
      if (!any) continue;
      for (int64_t n = n0; n < n1; ++n)
        if (seen[n - n0] != kHidden) add(n, seen[n - n0], scores + (n - n0) * P, kBlockTokens, ahead(n + step, reach, false, Dp * P / 16));
    }
  }

  // Scores to probabilities relative to the running maximum; false if the row sees nothing so far.
  bool soften(float* x, int width, int r) {
    vf m = splat(top[r]);
    for (int j = 0; j < width; j += W) m = vmax(m, load(x + j));
    const float now = highest(m);
    if (now == -kInf) {
      for (int j = 0; j < width; ++j) x[j] = x[j] == x[j] ? 0.0f : x[j];
      return false;
    }
    if (now > top[r]) {
      const float shrink = std::exp2(top[r] - now);
      total[r] *= shrink;
      for (int d = 0; d < Dp; ++d) acc[r * Dp + d] *= shrink;
      top[r] = now;
    }
    vf t = {};
    for (int j = 0; j < width; j += W) {
      vf p = exp2v(load(x + j) - splat(now));
      store(x + j, p);
      t += p;
    }
    total[r] += sum(t);
    return true;
  }
};

template <int R>
void run_item(const Args& a, Scratch& scratch, int64_t s, int64_t split, int64_t splits, int64_t row) {
  Item<R> item(a, s, row);
  const int64_t step = kSplitTokens / a.P, begin = split * step, rows = a.G * a.T;
  const int64_t end = begin + step < a.count[s] ? begin + step : a.count[s];
  item.split(begin, end, scratch);
  const int64_t at = (s * splits + split) * rows + row;
  std::memcpy(scratch.out.data() + at * item.Dp, item.acc, sizeof(float) * R * item.Dp);
  std::memcpy(scratch.top.data() + at, item.top, sizeof(float) * R);
  std::memcpy(scratch.total.data() + at, item.total, sizeof(float) * R);
}

void run_item(const Args& a, Scratch& scratch, int64_t s, int64_t split, int64_t splits, int64_t row, int64_t left) {
  switch (left < kRows ? left : kRows) {
    case 1: return run_item<1>(a, scratch, s, split, splits, row);
    case 2: return run_item<2>(a, scratch, s, split, splits, row);
    case 3: return run_item<3>(a, scratch, s, split, splits, row);
    case 4: return run_item<4>(a, scratch, s, split, splits, row);
    case 5: return run_item<5>(a, scratch, s, split, splits, row);
    default: return run_item<6>(a, scratch, s, split, splits, row);
  }
}

// Joins the splits of one row by their maxima and writes out and lse.
void merge_row(const Args& a, Scratch& scratch, int64_t s, int64_t row, int64_t splits) {
  const int64_t rows = a.G * a.T, Dp = (a.D + 15) / 16 * 16, used = (a.count[s] * a.P + kSplitTokens - 1) / kSplitTokens;
  float* out = a.out + (s * rows + row) * a.D;
  float top = -kInf, total = 0.0f;
  for (int64_t i = 0; i < used; ++i) {
    float t = scratch.top[(s * splits + i) * rows + row];
    top = t > top ? t : top;
  }
  std::memset(out, 0, sizeof(float) * a.D);
  for (int64_t i = 0; i < used && top > -kInf; ++i) {
    const int64_t at = (s * splits + i) * rows + row;
    const float weight = std::exp2(scratch.top[at] - top);
    if (weight == 0.0f) continue;
    total += weight * scratch.total[at];
    for (int64_t d = 0; d < a.D; ++d) out[d] += weight * scratch.out[at * Dp + d];
  }
  const float inverse = top > -kInf ? 1.0f / total : 0.0f;
  for (int64_t d = 0; d < a.D; ++d) out[d] *= inverse;
  double lse = top > -kInf ? top + std::log2((double)total) : -kInf;
  if (a.slopes) {  // the logits were kept small by counting positions from the row's own
    const int64_t own = a.first[s] + row % a.T;
    lse += (double)a.slopes[s * a.G + row / a.T] * 1.4426950408889634 * (double)own;
  }
  a.lse[s * rows + row] = (float)lse;
  scratch.row_top[s * rows + row] = top;
  scratch.row_total[s * rows + row] = total;
}

// Mean over the rows of each entry's part of the softmax sum.
void stream_mass(const Args& a, const Scratch& scratch, int64_t s) {
  const int64_t rows = a.G * a.T, step = kBlockTokens / a.P, blocks = (a.N + step - 1) / step;
  float* mass = a.mass + s * a.N;
  std::memset(mass, 0, sizeof(float) * a.N);
  for (int64_t at = s * rows; at < (s + 1) * rows; ++at) {
    if (scratch.row_top[at] == -kInf) continue;
    for (int64_t block = 0; block * step < a.count[s]; ++block) {
      const float weight = std::exp2(scratch.block_top[at * blocks + block] - scratch.row_top[at]);
      const float scale = weight / (scratch.row_total[at] * rows);
      const int64_t end = (block + 1) * step < a.count[s] ? (block + 1) * step : a.count[s];
      for (int64_t n = block * step; n < end; ++n) mass[n] += scale * scratch.entry_sum[at * a.N + n];
    }
  }
}

void attend(const Args& a) {
  static thread_local Scratch scratch_here;
  Scratch& scratch = scratch_here;  // the caller's, whichever thread works on it
  const int64_t rows = a.G * a.T, Dp = (a.D + 15) / 16 * 16, row_blocks = (rows + kRows - 1) / kRows;
  const int64_t splits = (a.N * a.P + kSplitTokens - 1) / kSplitTokens, step = kBlockTokens / a.P;
  auto grow = [](std::vector<float>& x, int64_t n) {
    if ((int64_t)x.size() < n) x.resize(n);
  };
  grow(scratch.out, a.S * splits * rows * Dp);
  grow(scratch.top, a.S * splits * rows);
  grow(scratch.total, a.S * splits * rows);
  grow(scratch.row_top, a.S * rows);
  grow(scratch.row_total, a.S * rows);
  if (a.mass) {
    grow(scratch.entry_sum, a.S * rows * a.N);
    grow(scratch.block_top, a.S * rows * ((a.N + step - 1) / step));
  }
  auto work = [&](int64_t i) {
    const int64_t s = i / (splits * row_blocks), split = i / row_blocks % splits, row = i % row_blocks * kRows;
    if (split * kSplitTokens < a.count[s] * a.P) run_item(a, scratch, s, split, splits, row, rows - row);
  };
  run(a.S * splits * row_blocks, a.threads, work);
  auto join = [&](int64_t s) {
    for (int64_t row = 0; row < rows; ++row) merge_row(a, scratch, s, row, splits);
    if (a.mass) stream_mass(a, scratch, s);
  };
  // Waking threads costs more than a small merge.
  run(a.S, a.S * splits * rows * Dp > (1 << 16) ? a.threads : 1, join);
}

}  // namespace testbed

extern "C" {

void testbed_attend(const float* q, const int64_t* shape, const void* const* tables, const int64_t* strides,
                    const testbed::PoolArg* pools, const float* slopes, float* out, float* lse, float* mass, float scale) {
  testbed::Args a;
  a.q = q;
  a.S = shape[0], a.G = shape[1], a.T = shape[2], a.D = shape[3], a.N = shape[4], a.P = shape[5];
  a.sinks = shape[6], a.threads = shape[7];
  a.pool = (const int8_t*)tables[0];
  a.slot = (const int32_t*)tables[1], a.page = (const int32_t*)tables[2];
  a.count = (const int32_t*)tables[3], a.first = (const int32_t*)tables[4], a.windows = (const int32_t*)tables[5];
  a.pool_stride = strides[0], a.slot_stride = strides[1], a.page_stride = strides[2];
  a.pools = pools;
  a.slopes = slopes, a.out = out, a.lse = lse, a.mass = mass, a.scale = scale;
  testbed::attend(a);
}

}  // extern "C"
