// Writing pages: new tokens into float pages, and whole pages into any format. Same arithmetic as kernels/pages.py.
#include <vector>

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

// Rows of tile [A, B] to codes, with step and lowest value of a row as 8-bit codes on grids of the whole page.
void quantise(const float* tile, int A, int B, int levels, uint8_t* codes, uint8_t* scale, uint8_t* zero, float* header) {
  std::vector<float> low(A), high(A);
  std::vector<uint8_t> row(B);
  for (int a = 0; a < A; ++a) {
    vf l = load(tile + a * B), h = l;
    for (int b = W; b < B; b += W) {
      vf x = load(tile + a * B + b);
      l = x < l ? x : l, h = x > h ? x : h;
    }
    low[a] = -highest(-l), high[a] = highest(h);
  }
  float base = low[0], top = low[0];
  for (float x : low) base = x < base ? x : base, top = x > top ? x : top;
  const float zero_unit = (top - base) / 255.0f;
  float needed = 0.0f;
  for (int a = 0; a < A; ++a) {
    float code = zero_unit > 0 ? std::floor((low[a] - base) / zero_unit) : 0.0f;
    zero[a] = (uint8_t)(code < 255.0f ? code : 255.0f);
    low[a] = base + zero[a] * zero_unit;
    high[a] = (high[a] - low[a]) / levels;
    needed = high[a] > needed ? high[a] : needed;
  }
  const float step_unit = needed / 255.0f;
  for (int a = 0; a < A; ++a) {
    float code = step_unit > 0 ? std::ceil(high[a] / step_unit) : 0.0f;
    scale[a] = (uint8_t)(code < 255.0f ? code : 255.0f);
    const float step = scale[a] * step_unit, inverse = step > 0 ? 1.0f / step : 0.0f;
    const vf most = splat((float)levels), none = splat(0.0f), magic = splat(12582912.0f);
    for (int b = 0; b < B; b += W) {
      vf x = (load(tile + a * B + b) - splat(low[a])) * splat(inverse);
      x = x < none ? none : x;
      x = x > most ? most : x;
      vb8 bytes = __builtin_convertvector((vi)(x + magic) - (vi)magic, vb8);
      std::memcpy(row.data() + b, &bytes, 8);
    }
    if (levels == 255) std::memcpy(codes + a * B, row.data(), B);
    else
      for (int b = 0; b < B / 2; ++b) codes[a * (B / 2) + b] = row[b] | (uint8_t)(row[b + B / 2] << 4);
  }
  header[0] = step_unit, header[1] = base, header[2] = zero_unit;
}

void encode_page(int64_t format, const Source& k, const Source& v, int64_t m, int P, int D, float* tile, uint8_t* to) {
  float* values = tile + P * D;
  fetch(tile, k, m, k.channel, k.token, D, P);
  fetch(values, v, m, v.token, v.channel, P, D);
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

}  // namespace testbed

extern "C" {

// strides: page, token, channel of k, then of v, in elements; source_format: kFp32, kBf16 or kFp16.
void testbed_encode(const uint8_t* k, const uint8_t* v, uint8_t* out, const int64_t* strides, int64_t source_format,
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
  run((pages + kChunkPages - 1) / kChunkPages, threads, work);
}

// k, v: [S, T, D] float; slot: [S, T]; offset: [T].
void testbed_append(const float* k, const float* v, const int32_t* slot, const int32_t* offset, int64_t S, int64_t T,
                    int64_t D, int64_t P, int64_t format, int64_t slab_pages, const int64_t* slabs, int64_t bytes) {
  using namespace testbed;
  const int64_t width = format == kFp32 ? 4 : 2;
  for (int64_t i = 0; i < S * T; ++i) {
    uint8_t* page = (uint8_t*)slabs[slot[i] / slab_pages] + (slot[i] % slab_pages) * bytes;
    const int64_t row = offset[i % T];
    for (int64_t d = 0; d < D; ++d) put_float(page + (d * P + row) * width, format, k + i * D + d, 1);
    put_float(page + (P * D + row * D) * width, format, v + i * D, D);
  }
}

// Whole pages between slabs and one run of bytes: out[i] = page slot[i], or the other way round.
void testbed_gather(const int64_t* slabs, int64_t slab_pages, int64_t bytes, const int64_t* slot, int64_t n, uint8_t* out) {
  for (int64_t i = 0; i < n; ++i)
    std::memcpy(out + i * bytes, (const uint8_t*)slabs[slot[i] / slab_pages] + (slot[i] % slab_pages) * bytes, bytes);
}

void testbed_scatter(const int64_t* slabs, int64_t slab_pages, int64_t bytes, const int64_t* slot, int64_t n,
                     const uint8_t* in) {
  for (int64_t i = 0; i < n; ++i)
    std::memcpy((uint8_t*)slabs[slot[i] / slab_pages] + (slot[i] % slab_pages) * bytes, in + i * bytes, bytes);
}

}  // extern "C"
