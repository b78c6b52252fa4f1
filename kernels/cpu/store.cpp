// Writing pages: new tokens into float pages with what follows from them, and whole pages into any format.
// Same arithmetic as kernels/pages.py, to the bit.
#include <algorithm>
#include <vector>

#include "guard.h"
#include "pages.h"
#include "parallel.h"

namespace testbed {

constexpr int64_t kChunkPages = 64;

// tile[a][b] = source[a * along_a + b * along_b] as float, whatever the element type.
template <class T, class Convert>
void gather(float* tile, const T* source, int64_t along_a, int64_t along_b, int A, int B, Convert convert) {
  if (along_b == 1) {
    for (int a = 0; a < A; ++a)
      for (int b = 0; b < B; ++b) tile[a * B + b] = convert(source[a * along_a + b]);
  } else {
    for (int b = 0; b < B; ++b)
      for (int a = 0; a < A; ++a) tile[a * B + b] = convert(source[a * along_a + b * along_b]);
  }
}

struct Source {
  const uint8_t* data;
  int64_t format;           // kFp32, kBf16 or kFp16
  int64_t page, token, channel;  // strides, in elements
};

void fetch(float* tile, const Source& s, int64_t m, int64_t along_a, int64_t along_b, int A, int B) {
  if (s.format == kFp32) {
    gather(tile, (const float*)s.data + m * s.page, along_a, along_b, A, B, [](float x) { return x; });
  } else if (s.format == kBf16) {
    gather(tile, (const uint16_t*)s.data + m * s.page, along_a, along_b, A, B, bf16_to_float);
  } else {
    gather(tile, (const uint16_t*)s.data + m * s.page, along_a, along_b, A, B, fp16_to_float);
  }
}

inline void put_float(uint8_t* to, int64_t format, const float* x, int64_t n) {
  if (format == kFp32) std::memcpy(to, x, 4 * n);
  else if (format == kBf16)
    for (int64_t i = 0; i < n; ++i) ((uint16_t*)to)[i] = float_to_bf16(x[i]);
  else
    for (int64_t i = 0; i < n; ++i) ((uint16_t*)to)[i] = float_to_fp16(x[i]);
}

inline void get_float(float* to, int64_t format, const uint8_t* x, int64_t n) {
  if (format == kFp32) std::memcpy(to, x, 4 * n);
  else if (format == kBf16)
    for (int64_t i = 0; i < n; ++i) to[i] = bf16_to_float(((const uint16_t*)x)[i]);
  else
    for (int64_t i = 0; i < n; ++i) to[i] = fp16_to_float(((const uint16_t*)x)[i]);
}

// Whole numbers of 0 to 255 as bytes.
inline void put_bytes(uint8_t* to, vi x) {
#if defined(__AVX2__)
  const __m256i words = (__m256i)x;
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(halves, halves));
#else
  typedef uint8_t vbytes __attribute__((vector_size(W)));
  const vbytes bytes = __builtin_convertvector(x, vbytes);
  std::memcpy(to, &bytes, W);
#endif
}

// Rows of tile [A, B] to codes, with step and lowest value of a row as 8-bit codes on grids of the whole page.
void quantise(const float* tile, int A, int B, int levels, uint8_t* codes, uint8_t* scale, uint8_t* zero,
              float* header) {
  const int padded = (B + W - 1) / W * W;
  std::vector<float> low(A), high(A), last(W);
  std::vector<uint8_t> row(padded);
  // Whole vectors of a row; the last may overlap the one before, which neither bound nor code minds.
  auto each = [&](const float* x, auto&& body) {
    if (B < W) {
      for (int i = 0; i < W; ++i) last[i] = x[i < B ? i : B - 1];
      return body(0, load(last.data()));
    }
    for (int b = 0; b + W <= B; b += W) body(b, load(x + b));
    if (B % W) body(B - W, load(x + B - W));
  };
  vf spoilt = splat(0.0f);  // NaN once there was a NaN or an infinity, which comparisons would pass over
  for (int a = 0; a < A; ++a) {
    vf l = splat(tile[a * B]), h = l;
    each(tile + a * B, [&](int, vf x) { l = x < l ? x : l, h = x > h ? x : h, spoilt += x - x; });
    low[a] = -highest(-l), high[a] = highest(h);
  }
  float base = low[0], top = low[0];
  for (float x : low) base = x < base ? x : base, top = x > top ? x : top;
  const float zero_unit = (top - base) / 255.0f;
  float needed = 0.0f;
  for (int a = 0; a < A; ++a) {
    float code = zero_unit > 0 ? std::floor((low[a] - base) / zero_unit) : 0.0f;
    zero[a] = (uint8_t)(code < 255.0f ? code : 255.0f);
    low[a] = zero[a] * zero_unit;
  }
  // In a loop of its own: a fused multiply-add would round otherwise than kernels/pages.py.
  for (int a = 0; a < A; ++a) {
    low[a] += base;
    high[a] = (high[a] - low[a]) / levels;
    needed = high[a] > needed ? high[a] : needed;
  }
  const float step_unit = needed / 255.0f;
  for (int a = 0; a < A; ++a) {
    float code = step_unit > 0 ? std::ceil(high[a] / step_unit) : 0.0f;
    scale[a] = (uint8_t)(code < 255.0f ? code : 255.0f);
    const float step = scale[a] * step_unit, divisor = step > 0 ? step : INFINITY;
    const vf most = splat((float)levels), none = splat(0.0f), magic = splat(12582912.0f);
    uint8_t* to = levels == 255 && B >= W ? codes + a * B : row.data();
    each(tile + a * B, [&](int b, vf x) {
      x = (x - splat(low[a])) / splat(divisor);  // the inverse of a step below 2^-128 would overflow
      x = x < none ? none : x;
      x = x > most ? most : x;
      put_bytes(to + b, (vi)(x + magic) - (vi)magic);
    });
    if (levels == 255 && B < W) std::memcpy(codes + a * B, to, B);
    if (levels == 15)
      for (int b = 0; b < B / 2; ++b) codes[a * (B / 2) + b] = row[b] | (uint8_t)(row[b + B / 2] << 4);
  }
  const float fault = sum(spoilt);
  header[0] = step_unit, header[1] = fault == 0.0f ? base : fault, header[2] = zero_unit;
}

// tile: keys [D, P], then values [P, D].
void encode_tile(int64_t format, const float* tile, int P, int D, uint8_t* to) {
  const float* values = tile + P * D;
  if (format < kInt8) return put_float(to, format, tile, 2ll * P * D);
  const int levels = format == kInt8 ? 255 : 15;
  const int64_t bytes = format == kInt8 ? P * D : P * D / 2;
  uint8_t* header_at = to + 2 * bytes;
  uint8_t *k_scale = header_at + 24, *k_zero = k_scale + D, *v_scale = k_zero + D, *v_zero = v_scale + P;
  float header[6];
  quantise(tile, D, P, levels, to, k_scale, k_zero, header);
  quantise(values, P, D, levels, to + bytes, v_scale, v_zero, header + 3);
  std::memcpy(header_at, header, 24);
}

void encode_page(int64_t format, const Source& k, const Source& v, int64_t m, int P, int D, float* tile, uint8_t* to) {
  fetch(tile, k, m, k.channel, k.token, D, P);
  fetch(tile + P * D, v, m, v.token, v.channel, P, D);
  encode_tile(format, tile, P, D, to);
}

// Rows [A, B] of codes to floats; header: step unit, base, zero unit. `scratch` holds 2 A floats. Products and sums have
// loops of their own: a fused multiply-add would round otherwise than kernels/pages.py.
void dequantise(const uint8_t* codes, bool eight, int A, int B, const uint8_t* scale, const uint8_t* zero,
                const float* header, float* scratch, float* tile) {
  float *step = scratch, *low = scratch + A;
  for (int a = 0; a < A; ++a) step[a] = scale[a] * header[0];
  for (int a = 0; a < A; ++a) low[a] = zero[a] * header[2];
  for (int a = 0; a < A; ++a) low[a] += header[1];
  for (int a = 0; a < A; ++a) {
    float* __restrict row = tile + a * B;
    const uint8_t* __restrict from = codes + a * (eight ? B : B / 2);
    if (eight)
      for (int b = 0; b < B; ++b) row[b] = from[b] * step[a];
    else
      for (int b = 0; b < B / 2; ++b) row[b] = (from[b] & 15) * step[a], row[b + B / 2] = (from[b] >> 4) * step[a];
    for (int b = 0; b < B; ++b) row[b] += low[a];
  }
}

// A page of any format but "proto" to keys [D, P] and values [P, D]; scratch holds 2 max(P, D) floats.
void decode_tile(int64_t format, const uint8_t* page, int P, int D, float* scratch, float* tile) {
  if (format < kInt8) return get_float(tile, format, page, 2ll * P * D);
  const bool eight = format == kInt8;
  const int64_t bytes = eight ? P * D : P * D / 2;
  const uint8_t *header_at = page + 2 * bytes, *scale = header_at + 24;
  float header[6];
  std::memcpy(header, header_at, 24);
  dequantise(page, eight, D, P, scale, scale + D, header, scratch, tile);
  scale += 2 * D;
  dequantise(page + bytes, eight, P, D, scale, scale + P, header + 3, scratch, tile + P * D);
}

// A pool as `Pool.native` of kernels/table.py describes it, and how many pages it holds.
struct Slabs {
  int64_t format, rows, slab_pages;
  const int64_t* slabs;
  int64_t bytes, pages;
  uint8_t* at(int64_t slot) const { return (uint8_t*)slabs[slot / slab_pages] + (slot % slab_pages) * bytes; }
};

// Where copies of filled pages go: slot [S, T], rows of `stream` elements; null for no copies.
struct Copies {
  const int32_t* slot;
  int64_t stream;
  Slabs pool;
};

// k, v: [S, T, D], channels contiguous, strides in elements; all else as kernels/upkeep.py. A stride of 0 between
// streams: they share the row. Filled by kernels/cpu/store.py.
struct Append {
  const uint8_t *k, *v;
  int64_t source, k_stream, k_token, v_stream, v_token, S, T, D, P;
  const int32_t *slot, *offset;
  int64_t slot_stream, offset_stream;
  Slabs pool;
  const int32_t* page;
  int64_t page_stream;
  uint8_t *lowest, *highest;  // [S, N, D] or null
  int64_t bounds_format, N, low_stream, low_page, high_stream, high_page;
  Copies sealed, prototypes;
  int64_t threads;
};

inline int64_t width_of(int64_t format) { return format == kFp32 ? 4 : 2; }

// Rounds to a format and back.
inline void round_to(float* x, int64_t format, uint8_t* scratch, int64_t n) {
  if (format == kFp32) return;
  put_float(scratch, format, x, n);
  get_float(x, format, scratch, n);
}

template <class T>
inline void spread(uint8_t* to, const uint8_t* from, int64_t apart, int64_t n) {
  for (int64_t i = 0; i < n; ++i) ((T*)to)[i * apart] = ((const T*)from)[i];
}

// One bound of a page: the lesser or greater of what it is and x, channel by channel; NaN in x changes nothing.
template <bool LOW>
inline void widen(uint8_t* bound, int64_t format, const float* x, float* old, int64_t n) {
  get_float(old, format, bound, n);
  for (int64_t i = 0; i < n; ++i) {
    if (LOW) old[i] = x[i] < old[i] ? x[i] : old[i];
    else old[i] = x[i] > old[i] ? x[i] : old[i];
  }
  put_float(bound, format, old, n);
}

// The groups of a page's tokens, by the leader rule of kernels/prototypes.py (method "greedy", the default there).
// gram [P, P]: inner products of the keys less their mean. Fills group [P].
void lead(const float* gram, int P, int groups, int* group) {
  constexpr float kSpread = 1.5f;  // GREEDY_SPREAD
  std::vector<float> square(groups), inner(groups);
  std::vector<int> count(groups);
  float trace = 0.0f;
  for (int j = 0; j < P; ++j) trace += gram[j * P + j];
  const float most = kSpread * trace / P;
  for (int j = 0, opened = 0; j < P; ++j) {
    std::fill(inner.begin(), inner.end(), 0.0f);
    for (int i = 0; i < j; ++i) inner[group[i]] += gram[i * P + j];
    const float own = gram[j * P + j];
    float nearest = INFINITY;
    int to = 0;
    for (int g = 0; g < opened; ++g) {
      const float size = (float)count[g], distance = square[g] / (size * size) - 2 * inner[g] / size + own;
      if (distance < nearest) nearest = distance, to = g;
    }
    if (opened < groups && (nearest > most || opened + P - j <= groups)) to = opened++;
    square[to] += 2 * inner[to] + own;
    ++count[to];
    group[j] = to;
  }
}

// Prototypes of a float page: k, v [C, D] bf16 means and log2 of the counts; tile as large as in `append_stream`.
void prototypes_of(const uint8_t* page, int64_t format, int P, int D, float* tile, const Slabs& pool, uint8_t* to) {
  const int groups = (int)pool.rows;
  float *keys = tile, *values = tile + P * D;
  get_float(tile, format, page, 2ll * P * D);
  std::vector<int> group(P), count(groups);
  std::vector<float> mean(2 * groups * D);
  if (groups > 1) {
    std::vector<float> gram(P * P), row(P);
    for (int d = 0; d < D; ++d) {
      float total = 0.0f;
      for (int j = 0; j < P; ++j) total += keys[d * P + j];
      for (int j = 0; j < P; ++j) row[j] = keys[d * P + j] - total / P;
      for (int i = 0; i < P; ++i)
        for (int j = 0; j < P; ++j) gram[i * P + j] += row[i] * row[j];
    }
    lead(gram.data(), P, groups, group.data());
  }
  for (int j = 0; j < P; ++j) ++count[group[j]];
  for (int d = 0; d < D; ++d)
    for (int j = 0; j < P; ++j) mean[group[j] * D + d] += keys[d * P + j];
  for (int j = 0; j < P; ++j)
    for (int d = 0; d < D; ++d) mean[(groups + group[j]) * D + d] += values[j * D + d];
  for (int g = 0; g < 2 * groups; ++g)
    for (int d = 0; d < D; ++d) mean[g * D + d] /= count[g % groups] ? count[g % groups] : 1;
  std::memset(to, 0, pool.bytes);
  put_float(to, kBf16, mean.data(), 2ll * groups * D);
  for (int g = 0; g < groups; ++g) {
    const float log2_count = count[g] ? std::log2((float)count[g]) : -INFINITY;
    std::memcpy(to + 4ll * groups * D + 4 * g, &log2_count, 4);
  }
}

// All new tokens of a stream, in order.
void append_stream(const Append& c, int64_t s) {
  const int64_t P = c.P, D = c.D, width = width_of(c.pool.format), in = width_of(c.source);
  std::vector<float> tile(2 * P * D + 2 * D);  // also holds the rows of one token
  float *x = tile.data(), *old = x + D;
  std::vector<uint8_t> stored(4 * D);
  const int32_t* offset = c.offset + s * c.offset_stream;
  for (int64_t t = 0; t < c.T; ++t) {
    const int64_t slot = c.slot[s * c.slot_stream + t], row = offset[t];
    uint8_t* page = c.pool.at(slot);
    get_float(x, c.source, c.v + (s * c.v_stream + t * c.v_token) * in, D);
    put_float(page + (P * D + row * D) * width, c.pool.format, x, D);
    get_float(x, c.source, c.k + (s * c.k_stream + t * c.k_token) * in, D);
    put_float(stored.data(), c.pool.format, x, D);
    if (width == 4) spread<uint32_t>(page + row * 4, stored.data(), P, D);
    else spread<uint16_t>(page + row * 2, stored.data(), P, D);
    if (c.lowest) {
      const int64_t size = width_of(c.bounds_format), at = c.page[s * c.page_stream + t];
      get_float(x, c.pool.format, stored.data(), D);
      round_to(x, c.bounds_format, stored.data(), D);
      widen<true>(c.lowest + (s * c.low_stream + at * c.low_page) * size, c.bounds_format, x, old, D);
      widen<false>(c.highest + (s * c.high_stream + at * c.high_page) * size, c.bounds_format, x, old, D);
    }
    const int64_t seal = c.sealed.slot ? c.sealed.slot[s * c.sealed.stream + t] : -1;
    if (seal >= 0) {
      const Slabs& pool = c.sealed.pool;
      const Source k{page, c.pool.format, 0, 1, P}, v{page + P * D * width, c.pool.format, 0, D, 1};
      uint8_t* to = pool.at(seal);
      std::memset(to, 0, pool.bytes);
      encode_page(pool.format, k, v, 0, (int)P, (int)D, tile.data(), to);
    }
    const int64_t group = c.prototypes.slot ? c.prototypes.slot[s * c.prototypes.stream + t] : -1;
    if (group >= 0)
      prototypes_of(page, c.pool.format, (int)P, (int)D, tile.data(), c.prototypes.pool, c.prototypes.pool.at(group));
  }
}

// What is out of range, or 0: 1 table_slot, 2 offset, 3 page, 4 sealed_slot, 5 prototype_slot.
int64_t fault(const Append& c) {
  for (int64_t s = 0; s < (c.offset_stream ? c.S : 1); ++s)
    for (int64_t t = 0; t < c.T; ++t) {
      const int64_t row = c.offset[s * c.offset_stream + t];
      if (row < 0 || row >= c.P) return 2;
    }
  for (int64_t s = 0; c.lowest && s < (c.page_stream ? c.S : 1); ++s)
    for (int64_t t = 0; t < c.T; ++t) {
      const int64_t column = c.page[s * c.page_stream + t];
      if (column < 0 || column >= c.N) return 3;
    }
  auto bad = [&](const Copies& copies, int64_t s, int64_t t) {
    if (!copies.slot) return false;
    const int64_t slot = copies.slot[s * copies.stream + t];
    return slot < -1 || slot >= copies.pool.pages || (slot >= 0 && c.offset[s * c.offset_stream + t] != c.P - 1);
  };
  for (int64_t s = 0; s < c.S; ++s)
    for (int64_t t = 0; t < c.T; ++t) {
      const int64_t slot = c.slot[s * c.slot_stream + t];
      if (slot < 0 || slot >= c.pool.pages) return 1;
      if (bad(c.sealed, s, t)) return 4;
      if (bad(c.prototypes, s, t)) return 5;
    }
  return 0;
}

}  // namespace testbed

extern "C" {

// strides: page, token, channel of k, then of v, in elements; source_format: kFp32, kBf16 or kFp16. Returns 0 or a code
// of guard.h.
int64_t testbed_encode(const uint8_t* k, const uint8_t* v, uint8_t* out, const int64_t* strides, int64_t source_format,
                       int64_t format, int64_t pages, int64_t P, int64_t D, int64_t bytes, int64_t threads) {
  using namespace testbed;
  const Source ks{k, source_format, strides[0], strides[1], strides[2]};
  const Source vs{v, source_format, strides[3], strides[4], strides[5]};
  auto work = [&](int64_t chunk) {
    std::vector<float> tile(2 * P * D);
    const int64_t end = (chunk + 1) * kChunkPages < pages ? (chunk + 1) * kChunkPages : pages;
    for (int64_t m = chunk * kChunkPages; m < end; ++m)
      encode_page(format, ks, vs, m, (int)P, (int)D, tile.data(), out + m * bytes);
  };
  return guarded([&] { return run((pages + kChunkPages - 1) / kChunkPages, threads, work), 0; });
}

// Pages [n, from_bytes] of one format to pages [n, bytes] of another, neither of them "proto"; `out` is zeros.
int64_t testbed_transcode(const uint8_t* in, uint8_t* out, int64_t from_format, int64_t from_bytes, int64_t format,
                          int64_t bytes, int64_t pages, int64_t P, int64_t D, int64_t threads) {
  using namespace testbed;
  auto work = [&](int64_t chunk) {
    std::vector<float> tile(2 * P * D), scratch(2 * std::max(P, D));
    const int64_t end = (chunk + 1) * kChunkPages < pages ? (chunk + 1) * kChunkPages : pages;
    for (int64_t m = chunk * kChunkPages; m < end; ++m) {
      decode_tile(from_format, in + m * from_bytes, (int)P, (int)D, scratch.data(), tile.data());
      encode_tile(format, tile.data(), (int)P, (int)D, out + m * bytes);
    }
  };
  return guarded([&] { return run((pages + kChunkPages - 1) / kChunkPages, threads, work), 0; });
}

// Nothing is written unless all is in range; see `fault`, and guard.h.
int64_t testbed_append(const testbed::Append* call) {
  using namespace testbed;
  const int64_t wrong = fault(*call);
  if (wrong) return wrong;
  auto work = [&](int64_t s) { append_stream(*call, s); };
  return guarded([&] { return run(call->S, call->threads, work), 0; });
}

}  // extern "C"
