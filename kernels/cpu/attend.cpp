// Attention over ragged paged streams: see kernels/api.py and kernels/pages.py for the contract.
//
// Splits of split_tokens keys depend on the stream alone, and each is computed on its own and joined afterwards, so a
// row's result depends neither on the other streams nor on the threads. A work item is a few splits of one stream for a
// block of up to kRows rows. Within a split, keys go by blocks of up to kColumns scores: scores, one softmax rescale,
// values (the block's pages are still in L2 for the second pass).
#include <algorithm>

#include "guard.h"
#include "item.h"
#include "parallel.h"

namespace testbed {

struct Scratch {
  std::vector<float> out, top, total;       // [S, splits, rows, Dp], [S, splits, rows] twice
  std::vector<float> entry_sum, entry_top;  // [S, rows, most entries], for the mass
  std::vector<float> row_top, row_total;    // [S, rows]
  std::vector<int64_t> origin;              // [S, T]
  int spare_calls = 0;                      // calls in a row that left most of it unused

  int64_t bytes() const {
    int64_t floats = 2 * origin.capacity();
    for (auto* x : {&out, &top, &total, &entry_sum, &entry_top, &row_top, &row_total}) floats += x->capacity();
    return 4 * floats;
  }

  // Gives the memory back where the last calls needed far less; one small call among large ones is no reason.
  void fit(int64_t needed) {
    spare_calls = bytes() > kKeptBytes && bytes() > 4 * needed ? spare_calls + 1 : 0;
    if (spare_calls == kPatience) *this = Scratch();
  }

 private:
  static constexpr int64_t kKeptBytes = 64ll << 20;
  static constexpr int kPatience = 8;
};

// To at least n elements, the old ones forgotten.
template <class T>
void grow(std::vector<T>& x, int64_t n) {
  if ((int64_t)x.size() >= n) return;
  std::vector<T>().swap(x);
  x.resize(n);
}

struct Work {
  int64_t s, row, first, last;  // stream, first row, splits
};

int64_t entries_of_split(const Args& a) { return a.split_tokens / a.P; }
int64_t splits_of(const Args& a, int64_t entries) {
  return (entries + entries_of_split(a) - 1) / entries_of_split(a);
}

// The splits `w` names, one after another; each block's pages are asked for while the block before is worked on.
template <int R>
void run_item(const Args& a, Scratch& scratch, const Work& w, int64_t most_splits) {
  static thread_local std::vector<char> room;  // too large for a small thread's stack
  room.resize(sizeof(Item<R>) + 2 * sizeof(Block) + 64);
  Item<R>& item = *new ((void*)(((uintptr_t)room.data() + 63) / 64 * 64)) Item<R>(a, w.s, w.row);
  Block* blocks[2] = {(Block*)(&item + 1), (Block*)(&item + 1) + 1};
  const int64_t step = entries_of_split(a), rows = a.G * a.T, count = a.count[w.s], at = w.s * rows + w.row;
  const int64_t reach = std::min(w.last * step, count);
  float* entry_sum = a.mass ? scratch.entry_sum.data() + at * a.most_entries : nullptr;
  float* entry_top = a.mass ? scratch.entry_top.data() + at * a.most_entries : nullptr;
  int fair = 0;
  auto fill = [&](int64_t n, Block& b) {  // a block never crosses splits
    const int64_t end = n < reach ? std::min((n / step + 1) * step, reach) : n;
    if (n % step == 0) fair = item.fair_columns(n, end);
    return item.gather(n, end, fair, b);
  };
  int64_t n = w.first * step, next = fill(n, *blocks[0]);
  item.reset();
  for (bool warm = false; n < reach; warm = true) {
    const int64_t after = fill(next, *blocks[1]);
    item.work(*blocks[0], *blocks[1], warm, entry_sum, entry_top);
    if (next == reach || next % step == 0) {
      item.settle();
      const int64_t to = (w.s * most_splits + n / step) * rows + w.row;
      std::memcpy(scratch.out.data() + to * item.Dp, item.acc, sizeof(float) * R * item.Dp);
      std::memcpy(scratch.top.data() + to, item.top, sizeof(float) * R);
      std::memcpy(scratch.total.data() + to, item.total, sizeof(float) * R);
      item.reset();
    }
    n = next, next = after;
    std::swap(blocks[0], blocks[1]);
  }
}

void run_item(const Args& a, Scratch& scratch, const Work& w, int64_t most_splits) {
  switch (std::min<int64_t>(a.G * a.T - w.row, kRows)) {
    case 1: return run_item<1>(a, scratch, w, most_splits);
    case 2: return run_item<2>(a, scratch, w, most_splits);
    case 3: return run_item<3>(a, scratch, w, most_splits);
    default: return run_item<kRows>(a, scratch, w, most_splits);
  }
}

// Joins the splits of one row by their maxima and writes out and lse.
void merge_row(const Args& a, Scratch& scratch, int64_t s, int64_t row, int64_t most_splits) {
  const int64_t rows = a.G * a.T, Dp = (a.D + 15) / 16 * 16, used = splits_of(a, a.count[s]);
  float* out = a.out + (s * rows + row) * a.D;
  float top = -kInf, total = 0.0f;
  for (int64_t i = 0; i < used; ++i) top = std::max(top, scratch.top[(s * most_splits + i) * rows + row]);
  std::memset(out, 0, sizeof(float) * a.D);
  for (int64_t i = 0; i < used && top > -kInf; ++i) {
    const int64_t at = (s * most_splits + i) * rows + row;
    const float weight = std::exp2(scratch.top[at] - top);
    if (weight == 0.0f && scratch.total[at] == scratch.total[at]) continue;
    total += weight * scratch.total[at];
    for (int64_t d = 0; d < a.D; ++d) out[d] += weight * scratch.out[at * Dp + d];
  }
  const float inverse = top > -kInf ? 1.0f / total : 0.0f;
  for (int64_t d = 0; d < a.D; ++d) out[d] *= inverse;
  double lse = top > -kInf ? top + std::log2((double)total) : -kInf;
  if (a.slopes) {  // the logits were kept small by counting positions from the origin
    const double slope = (double)a.slopes[s * a.G + row / a.T] * 1.4426950408889634;
    lse += slope * (double)a.origin[s * a.T + row % a.T];
  }
  a.lse[s * rows + row] = (float)lse;
  scratch.row_top[s * rows + row] = top;
  scratch.row_total[s * rows + row] = total;
}

// Mean over the rows of each entry's part of the softmax sum.
void stream_mass(const Args& a, const Scratch& scratch, int64_t s) {
  const int64_t rows = a.G * a.T, count = a.count[s];
  float* mass = a.mass + s * a.N;
  std::memset(mass, 0, sizeof(float) * a.N);
  for (int64_t at = s * rows; at < (s + 1) * rows; ++at) {
    const float top = scratch.row_top[at], scale = 1.0f / (scratch.row_total[at] * rows);
    if (top == -kInf) continue;
    const float* sums = scratch.entry_sum.data() + at * a.most_entries;
    const float* tops = scratch.entry_top.data() + at * a.most_entries;
    int64_t n = 0;
    for (; n + W <= count; n += W)
      store(mass + n, load(mass + n) + splat(scale) * exp2v(load(tops + n) - splat(top)) * load(sums + n));
    if (n == count) continue;
    vf t = splat(-kInf);
    for (int64_t i = n; i < count; ++i) t[i - n] = tops[i];
    t = exp2v(t - splat(top));
    for (int64_t i = n; i < count; ++i) mass[i] += scale * t[i - n] * sums[i];
  }
}

// The items of a call, those with most work first, so that the last ones to end are small.
std::vector<Work> items_of(const Args& a, int64_t row_blocks) {
  std::vector<Work> items;
  for (int64_t s = 0; s < a.S; ++s) {
    const int64_t splits = splits_of(a, a.count[s]), run = a.threads == 1 ? splits : a.item_splits;
    for (int64_t first = 0; first < splits; first += run)
      for (int64_t i = 0; i < row_blocks; ++i) items.push_back({s, i * kRows, first, std::min(first + run, splits)});
  }
  const int64_t step = entries_of_split(a);
  auto entries = [&](const Work& w) { return std::min(w.last * step, (int64_t)a.count[w.s]) - w.first * step; };
  auto longer = [&](const Work& x, const Work& y) { return entries(x) > entries(y); };
  if (a.threads > 1) std::stable_sort(items.begin(), items.end(), longer);
  return items;
}

// Position of the newest listed key that row t sees, or its own if there is none: distances from it are small for the
// keys that matter, so that float32 holds them, however old they are.
int64_t origin_of(const Args& a, int64_t s, int64_t t) {
  const int64_t own = a.first[s] + t, window = a.windows ? a.windows[s] : a.window;
  int64_t newest = INT64_MIN;
  for (int64_t n = 0; n < a.count[s]; ++n) {
    const int64_t start = (int64_t)a.page[s * a.page_stride + n] * a.P, end = start + a.P - 1;
    if (end <= newest) continue;
    const bool proto = a.pools[a.pool[s * a.pool_stride + n]].format == kProto;
    int64_t last = proto ? end : std::min(end, own);
    if (!proto && window && last <= own - window) last = std::min(last, a.sinks - 1);
    if (last >= start) newest = std::max(newest, last);
  }
  return newest == INT64_MIN ? own : newest;
}

// Whether all that the table lists is there; native code would read anywhere. A nanosecond an entry.
bool well_listed(const Args& a) {
  for (int64_t s = 0; s < a.S; ++s) {
    if (a.count[s] < 0 || a.count[s] > a.N) return false;
    const int8_t* pool = a.pool + s * a.pool_stride;
    const int32_t* slot = a.slot + s * a.slot_stride;
    for (int64_t n = 0; n < a.count[s]; ++n)
      if (pool[n] < 0 || pool[n] >= a.pool_count || slot[n] < 0 || slot[n] >= a.pools[pool[n]].pages) return false;
  }
  return true;
}

// 0, or 1 for a table that points outside the pools; nothing is computed then.
int64_t attend(Args& a) {
  if (!well_listed(a)) return 1;
  static thread_local Scratch scratch_here;
  Scratch& scratch = scratch_here;  // the caller's, whichever thread works on it
  a.most_entries = 0;
  for (int64_t s = 0; s < a.S; ++s) a.most_entries = std::max<int64_t>(a.most_entries, a.count[s]);
  const int64_t rows = a.G * a.T, Dp = (a.D + 15) / 16 * 16, most_splits = splits_of(a, a.most_entries);
  wanted_bytes = 4 * a.S * rows * (most_splits * (Dp + 2) + 2 + (a.mass ? 2 * a.most_entries : 0));
  scratch.fit(wanted_bytes);
  grow(scratch.out, a.S * most_splits * rows * Dp);
  grow(scratch.top, a.S * most_splits * rows);
  grow(scratch.total, a.S * most_splits * rows);
  grow(scratch.row_top, a.S * rows);
  grow(scratch.row_total, a.S * rows);
  if (a.mass) {
    grow(scratch.entry_sum, a.S * rows * a.most_entries);
    grow(scratch.entry_top, a.S * rows * a.most_entries);
    std::fill_n(scratch.entry_sum.begin(), a.S * rows * a.most_entries, 0.0f);  // hidden entries are left out
    std::fill_n(scratch.entry_top.begin(), a.S * rows * a.most_entries, -kInf);
  }
  if (a.slopes) {
    grow(scratch.origin, a.S * a.T);
    a.origin = scratch.origin.data();
    auto find = [&](int64_t s) {
      for (int64_t t = 0; t < a.T; ++t) scratch.origin[s * a.T + t] = origin_of(a, s, t);
    };
    run(a.S, a.S * a.T * a.most_entries > (1 << 16) ? a.threads : 1, find);
  }
  const std::vector<Work> items = items_of(a, (rows + kRows - 1) / kRows);
  auto work = [&](int64_t i) { run_item(a, scratch, items[i], most_splits); };
  run((int64_t)items.size(), a.threads, work);
  auto join = [&](int64_t s) {
    for (int64_t row = 0; row < rows; ++row) merge_row(a, scratch, s, row, most_splits);
    if (a.mass) stream_mass(a, scratch, s);
  };
  // Waking threads costs more than a small merge.
  run(a.S, a.S * most_splits * rows * Dp > (1 << 16) ? a.threads : 1, join);
  return 0;
}

}  // namespace testbed

extern "C" {

// sizes: S, G, T, D, N, P, row strides of table's pool, slot, page, sinks, window, threads, split_tokens, item_splits,
// half, bf16, pools; pointers: q, table's pool, slot, page, count, first_position, windows, slopes, out, lse, mass, of which
// windows, slopes and mass may be null. Returns 0, 1 for
// a table that points outside the pools, or a code of guard.h.
int64_t testbed_attend(const int64_t* sizes, const void* const* pointers, const testbed::PoolArg* pools,
                       float scale) {
  testbed::Args a{};
  a.S = sizes[0], a.G = sizes[1], a.T = sizes[2], a.D = sizes[3], a.N = sizes[4], a.P = sizes[5];
  a.pool_stride = sizes[6], a.slot_stride = sizes[7], a.page_stride = sizes[8];
  a.sinks = sizes[9], a.window = sizes[10], a.threads = sizes[11], a.split_tokens = sizes[12];
  a.item_splits = sizes[13], a.half = sizes[14], a.bf16 = sizes[15], a.pool_count = sizes[16];
  a.q = (const float*)pointers[0];
  a.pool = (const int8_t*)pointers[1], a.slot = (const int32_t*)pointers[2], a.page = (const int32_t*)pointers[3];
  a.count = (const int32_t*)pointers[4], a.first = (const int32_t*)pointers[5];
  a.windows = (const int32_t*)pointers[6], a.slopes = (const float*)pointers[7];
  a.out = (float*)pointers[8], a.lse = (float*)pointers[9], a.mass = (float*)pointers[10];
  a.pools = pools, a.scale = scale;
  return testbed::guarded([&] { return testbed::attend(a); });
}

}  // extern "C"
