// A work item: up to kRows rows (query heads and tokens) of one stream, over one split after another.
#pragma once
#include <type_traits>

#include "block.h"
#include "half_page.h"

namespace testbed {

constexpr int kRows = 4, kAhead = 4;  // rows: their sums stay in registers

// 16-bit forms of queries and probabilities.
#if defined(__AVX2__)
template <int R>
struct Halves {
  IntQuery<R> query;
  Folded<R> folded;
  IntValues<R> values;
  uint16_t bf16_q[R * kMaxDim], bf16_p[R * kColumns];
  float bf16_unit[R], none[R];
};
#else
constexpr bool kBf16Dots = false;
template <int R>
struct Halves {};
#endif

template <int R>
struct Item {
  const Args& a;
  const int64_t s, row, window;  // first row, g * T + t
  const int P, D, Dp;
  bool ints, dots;  // whether quantised pages are worked on in integers, bf16 pages in bf16
  alignas(64) float scores[R * kColumns];
  float q[R * kMaxDim], paired_q[R * kMaxDim], acc[R * kMaxDim], paired_acc[R * kMaxDim];
  float top[R], total[R], slope[R];
  int64_t own[R], origin[R], lowest, highest_own;
  bool paired;  // whether paired_acc holds anything
  Halves<R> half;

  Item(const Args& args, int64_t stream, int64_t first_row)
      : a(args), s(stream), row(first_row), window(args.windows ? args.windows[stream] : args.window), P((int)args.P),
        D((int)args.D), Dp((D + 15) / 16 * 16) {
    const float factor = a.scale * 1.4426950408889634f;
    const float* from = a.q + (s * a.G * a.T + row) * D;
    lowest = INT64_MAX, highest_own = INT64_MIN;
    for (int i = 0; i < R * D; ++i) q[i] = from[i] * factor;
    for (int r = 0; r < R; ++r) {
      own[r] = a.first[s] + (row + r) % a.T;
      origin[r] = a.slopes ? a.origin[s * a.T + (row + r) % a.T] : 0;
      lowest = own[r] < lowest ? own[r] : lowest;
      highest_own = own[r] > highest_own ? own[r] : highest_own;
      slope[r] = a.slopes ? a.slopes[s * a.G + (row + r) / a.T] * 1.4426950408889634f : 0.0f;
      if (D % 16 == 0) pair_order(q + r * D, D, paired_q + r * D);
    }
    ints = dots = false;
#if defined(__AVX2__)
    ints = a.half && D % 16 == 0;
    dots = kBf16Dots && ints && a.bf16;
    if (ints) half.query.set(q, D);
    if (dots) to_bf16(from, half.bf16_q, R * D);
    for (int r = 0; r < R; ++r) half.bf16_unit[r] = factor, half.none[r] = 0.0f;
#endif
  }

  int64_t start(int64_t n) const { return (int64_t)a.page[s * a.page_stride + n] * P; }

  Sight sight(int format, int64_t first) const {
    if (format == kProto) return kWhole;
    const int64_t last = first + P - 1;
    if (first > highest_own || (window && last <= lowest - window && first >= a.sinks)) return kHidden;
    return last <= lowest && (!window || first > highest_own - window || last < a.sinks) ? kWhole : kPartly;
  }
  bool sees(int r, int64_t position) const {
    return position <= own[r] && (!window || position > own[r] - window || position < a.sinks);
  }

  // The scores a block of these entries takes if all blocks are to be alike: a small one would leave too little work to
  // hide the next one's memory accesses behind.
  int fair_columns(int64_t n, int64_t end) const {
    int64_t columns = 0;
    for (; n < end; ++n) {
      const PoolArg& pool = a.pools[a.pool[s * a.pool_stride + n]];
      if (pool.format == kProto) columns += pool.rows;
      else if (sight((int)pool.format, start(n)) != kHidden) columns += P;
    }
    const int64_t blocks = (columns + kColumns - 1) / kColumns;
    return blocks ? (int)((columns + blocks - 1) / blocks) : kColumns;
  }

  // Fills a block from entry n on and returns the entry after it.
  int64_t gather(int64_t n, int64_t end, int fair, Block& b) const {
    b.page_count = b.proto_count = b.row_count = b.columns = 0;
    b.ints = b.halves = false;
    for (; n < end; ++n) {
      const PoolArg& pool = a.pools[a.pool[s * a.pool_stride + n]];
      const int width = pool.format == kProto ? (int)pool.rows : P;
      if (b.columns >= fair || b.columns + width > kColumns) break;
      const uint32_t slot = a.slot[s * a.slot_stride + n], pages = (uint32_t)pool.slab_pages;
      const uint8_t* const* slabs = (const uint8_t* const*)pool.slabs;
      const uint8_t* blob = slabs[slot / pages] + (int64_t)(slot % pages) * pool.bytes;
      const Entry e{blob, n, start(n), b.columns, width, (uint8_t)pool.format, sight((int)pool.format, start(n))};
      if (e.sight == kHidden) continue;
      if (pool.format == kProto) b.protos[b.proto_count++] = e;
      else b.pages[b.page_count++] = e;
      b.ints |= pool.format == kInt8 || pool.format == kInt4;
      b.halves |= pool.format == kBf16;
      b.columns += width;
    }
    return n;
  }

  // The prototypes of a block: their bytes are read here for the first time.
  void list_protos(Block& b) {
    for (int i = 0; i < b.proto_count; ++i) {
      const Entry& e = b.protos[i];
      const uint16_t* k = (const uint16_t*)e.blob;
      const float* log2_count = (const float*)(e.blob + 4ll * e.rows * D);
      for (int c = 0; c < e.rows; ++c) {
        const int column = e.column + c;
        if (log2_count[c] > -kInf) b.rows[b.row_count++] = {k + c * D, k + (e.rows + c) * D, log2_count[c], column};
        else
          for (int r = 0; r < R; ++r) scores[r * kColumns + column] = -kInf;
      }
    }
  }

  void score_block(Block& b, bool warm) {
    list_protos(b);
    for (int i = 0; i < b.page_count; ++i) {
      if (!warm && i + kAhead < b.page_count) b.pages[i + kAhead].keys(P, D).rest();
      Ahead ahead = b.pages[i].values(P, D);
      score(b.pages[i], ahead);
      ahead.rest();
    }
    if (D % 16) score_protos_by_eight<R>(b.rows, b.row_count, q, D, scores, kColumns);
    else score_protos<R>(b.rows, b.row_count, paired_q, D, scores, kColumns);
    for (int i = 0; a.slopes && i < b.proto_count; ++i)
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < b.protos[i].rows; ++c)
          scores[r * kColumns + b.protos[i].column + c] += slope[r] * (b.protos[i].start - origin[r] + (P - 1) * 0.5f);
    for (int r = 0; r < R; ++r)
      for (int j = b.columns; j % 16; ++j) scores[r * kColumns + j] = -kInf;
  }

  void score(const Entry& e, Ahead& ahead) {
    float* to = scores + e.column;
    if (!score_half(e, to, ahead))
      dispatch(e, [&](const auto& page) {
        score_page<std::decay_t<decltype(page)>, R>(page, q, D, P, to, kColumns, ahead);
      });
    if (a.slopes)
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < P; ++j) to[r * kColumns + j] += slope[r] * (float)(e.start + j - origin[r]);
    if (e.sight == kPartly)
      for (int r = 0; r < R; ++r)
        for (int j = 0; j < P; ++j)
          if (!sees(r, e.start + j)) to[r * kColumns + j] = -kInf;
  }

  void add_block(const Block& b, const Block& next) {
#if defined(__AVX2__)
    if (ints && b.ints) {
      half.values.begin(D);
      for (int i = 0; i < b.page_count; ++i) fold_values(b.pages[i]);
      half.values.round(b.columns);
    }
    if (dots && b.halves)
      for (int r = 0; r < R; ++r) to_bf16(scores + r * kColumns, half.bf16_p + r * kColumns, b.columns);
#endif
    const int steps = b.page_count + 1;
    for (int i = 0, proto = 0; i < steps; ++i) {
      Ahead ahead = i < next.page_count ? next.pages[i].keys(P, D) : Ahead{nullptr, nullptr};
      if (i < b.page_count) add(b.pages[i], ahead);
      ahead.rest();
      for (; proto < next.proto_count * (i + 1) / steps; ++proto) {
        const Entry& e = next.protos[proto];
        Ahead{e.blob, e.blob + (4ll * D + 4) * e.rows}.rest();
      }
    }
    for (int i = steps; i < next.page_count; ++i) next.pages[i].keys(P, D).rest();
    if (b.row_count && D % 16) add_protos_by_eight<R>(b.rows, b.row_count, scores, kColumns, D, Dp, acc);
    else if (b.row_count) add_protos<R>(b.rows, b.row_count, scores, kColumns, D, paired_acc), paired = true;
#if defined(__AVX2__)
    if (ints && b.ints) half.values.end(acc, D);
#endif
  }

  void add(const Entry& e, Ahead& ahead) {
    const float* p = scores + e.column;
    if (e.sight == kPartly) return add_partly(e, p, ahead);
    if (add_half(e, ahead)) return;
    dispatch(e, [&](const auto& page) {
      typedef std::decay_t<decltype(page)> F;
      paired |= F::kPaired;
      add_page<F, R>(page, p, kColumns, Dp, P, F::kPaired ? paired_acc : acc, ahead);
    });
  }

  // What nobody sees may be NaN, and 0 * NaN is NaN: those values are zeroed in a copy.
  void add_partly(const Entry& e, const float* p, Ahead& ahead) {
    std::vector<float>& tile = copy(e);
    for (int j = 0; j < P; ++j) {
      bool seen = false;
      for (int r = 0; r < R; ++r) seen = seen || sees(r, e.start + j);
      if (!seen) std::memset(tile.data() + P * Dp + j * Dp, 0, sizeof(float) * Dp);
    }
    add_page<Fp32Page, R>(Fp32Page((const uint8_t*)tile.data(), P, Dp), p, kColumns, Dp, P, acc, ahead);
  }

  std::vector<float>& copy(const Entry& e) const {
    static thread_local std::vector<float> tile;
    tile.resize(2 * P * Dp);
    unpack((int)e.format, e.blob, P, D, Dp, tile.data(), tile.data() + P * Dp);
    return tile;
  }

  template <class Body>
  void dispatch(const Entry& e, Body body) {
    if (D % 16) return body(Fp32Page((const uint8_t*)copy(e).data(), P, Dp));
    switch (e.format) {
      case kFp32: return body(Fp32Page(e.blob, P, D));
      case kBf16: return body(Bf16Page(e.blob, P, D));
      case kFp16: return body(Fp16Page(e.blob, P, D));
      case kInt8: return body(Int8Page(e.blob, P, D));
      default: return body(Int4Page(e.blob, P, D));
    }
  }

#if defined(__AVX2__)
  // Each of these is false where the page has to be worked on in float32.
  bool score_half(const Entry& e, float* to, Ahead& ahead) {
    if (e.format == kInt8 && ints) return score_ints(Int8Pairs(e.blob, P, D), Int8Page(e.blob, P, D), to, ahead);
    if (e.format == kInt4 && ints) return score_ints(Int4Pairs(e.blob, P, D), Int4Page(e.blob, P, D), to, ahead);
    if (e.format != kBf16 || !dots) return false;
    const Bf16Pairs page(e.blob, P, D);
    score_pairs<Bf16Pairs, R>(page, half.bf16_q, half.bf16_unit, half.none, D, P, to, kColumns, ahead);
    return true;
  }

  template <class F, class Precise>
  bool score_ints(const F& page, const Precise& precise, float* to, Ahead& ahead) {
    Folded<R>& f = half.folded;
    const bool rough = f.set(page.scales, F::kLevels, half.query, q, D);
    score_pairs<F, R>(page, (const uint16_t*)f.x, f.unit, f.low, D, P, to, kColumns, ahead);
    if (!rough) return true;
    float exact[R * kMaxPage];
    score_page<Precise, R>(precise, q, D, P, exact, P, ahead);
    for (int r = 0; r < R; ++r)
      if (f.rough[r]) std::memcpy(to + r * kColumns, exact + r * P, sizeof(float) * P);
    return true;
  }

  void fold_values(const Entry& e) {
    if (e.sight == kPartly) return;
    if (e.format == kInt8) half.values.fold(Int8Pairs(e.blob, P, D).scales, scores, kColumns, e.column, P);
    if (e.format == kInt4) half.values.fold(Int4Pairs(e.blob, P, D).scales, scores, kColumns, e.column, P);
  }

  bool add_half(const Entry& e, Ahead& ahead) {
    IntValues<R>& v = half.values;
    if (e.format == kInt8 && ints) {
      add_pairs<Int8Pairs, R>(Int8Pairs(e.blob, P, D), v.p + e.column, kColumns, D, P, v.sums, ahead);
    } else if (e.format == kInt4 && ints) {
      add_pairs<Int4Pairs, R>(Int4Pairs(e.blob, P, D), v.p + e.column, kColumns, D, P, v.sums, ahead);
    } else if (e.format == kBf16 && dots) {
      add_pairs<Bf16Pairs, R>(Bf16Pairs(e.blob, P, D), half.bf16_p + e.column, kColumns, D, P, acc, ahead);
    } else {
      return false;
    }
    return true;
  }
#else
  bool score_half(const Entry&, float*, Ahead&) { return false; }
  bool add_half(const Entry&, Ahead&) { return false; }
#endif

  // Scores to probabilities relative to the running maximum; false if the row sees nothing so far.
  bool soften(float* x, int width, int r) {
    vf m = splat(top[r]);
    for (int j = 0; j < width; j += W) m = vmax(m, load(x + j));
    float now = highest(m);
    if (now == -kInf) {
      for (int j = 0; j < width; ++j) x[j] = hide(x[j]);
      for (int j = 0; j < width; ++j) total[r] += x[j];
      if (total[r] != total[r]) top[r] = 0.0f;
      return total[r] != total[r];
    }
    if (now != now) now = top[r] > -kInf ? top[r] : 0.0f;  // the scores are NaN and will make the total so
    if (now > top[r]) {
      const float shrink = std::exp2(top[r] - now);
      total[r] *= shrink;
      for (int d = 0; d < Dp; ++d) acc[r * Dp + d] *= shrink, paired_acc[r * Dp + d] *= shrink;
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

  // Each entry's part of the block's sum, and the maximum it is relative to.
  void weigh(const Entry& e, float* entry_sum, float* entry_top) const {
    for (int r = 0; r < R; ++r) {
      const float* p = scores + r * kColumns + e.column;
      float x = 0.0f;
      if (e.format == kProto) {
        for (int j = 0; j < e.rows; ++j) x += p[j];
      } else {
        vf y = {};
        for (int j = 0; j < P; j += W) y += load(p + j);
        x = sum(y);
      }
      entry_sum[r * a.most_entries + e.n] = x;
      entry_top[r * a.most_entries + e.n] = top[r];
    }
  }

  void reset() {
    std::memset(acc, 0, sizeof(float) * R * Dp);
    std::memset(paired_acc, 0, sizeof(float) * R * Dp);
    for (int r = 0; r < R; ++r) top[r] = -kInf, total[r] = 0.0f;
    paired = false;
  }

  // paired_acc into acc.
  void settle() {
    if (!paired) return;
    for (int d = 0; d < R * Dp; d += 16) {
      const Pair x = interleave({load(paired_acc + d), load(paired_acc + d + 8)});
      store(acc + d, load(acc + d) + x.a);
      store(acc + d + 8, load(acc + d + 8) + x.b);
    }
  }

  // One block, and what is asked of the memory for the next.
  void work(Block& b, const Block& next, bool warm, float* entry_sum, float* entry_top) {
    if (!b.columns) return;
    score_block(b, warm);
    bool any = false;
    const int width = (b.columns + 15) / 16 * 16;
    for (int r = 0; r < R; ++r) any |= soften(scores + r * kColumns, width, r);
    if (entry_sum) {
      for (int i = 0; i < b.page_count; ++i) weigh(b.pages[i], entry_sum, entry_top);
      for (int i = 0; i < b.proto_count; ++i) weigh(b.protos[i], entry_sum, entry_top);
    }
    if (any) add_block(b, next);
  }
};

}  // namespace testbed
