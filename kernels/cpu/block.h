// What a call hands over, and the blocks of entries that its streams are cut into.
#pragma once
#include <vector>

#include "float_page.h"
#include "proto.h"

namespace testbed {

constexpr int kColumns = 256;  // scores of a block: small enough that its pages stay in L2 for the second pass
const float kInf = __builtin_inff();

struct PoolArg {
  int64_t format, rows, slab_pages, slabs, bytes, pages;
};

struct Args {
  const float* q;  // [S, G, T, D]
  int64_t S, G, T, D, N, P;
  const int8_t* pool;
  const int32_t *slot, *page;
  int64_t pool_stride, slot_stride, page_stride;
  const int32_t *count, *first, *windows;  // windows: [S] or null
  int64_t window;                          // of every stream where windows is null
  const PoolArg* pools;
  int64_t pool_count;
  float scale;
  int64_t sinks;
  const float* slopes;  // [S, G] or null
  float *out, *lse, *mass;
  int64_t threads, split_tokens, item_splits;
  int64_t most_entries;   // of any stream
  const int64_t* origin;  // [S, T] position that a row's distances are counted from, null without slopes
  bool half, bf16;  // whether products may be of 16 bits; whether the queries are bf16 numbers
};

enum Sight : uint8_t { kHidden, kPartly, kWhole };

struct Entry {
  const uint8_t* blob;
  int64_t n, start;  // where in the table; position of its first token
  int32_t column, rows;
  uint8_t format;
  Sight sight;

  int64_t elements_bytes(int P, int D) const {
    const int64_t cells = (int64_t)P * D;
    return format == kFp32 ? 4 * cells : format == kInt8 ? cells : format == kInt4 ? cells / 2 : 2 * cells;
  }
  // Scales are read first, and lie behind the codes.
  Ahead keys(int P, int D) const {
    const int64_t bytes = elements_bytes(P, D);
    if (format == kInt8 || format == kInt4) Ahead{blob + 2 * bytes, blob + 2 * bytes + 24 + 2 * (P + D)}.rest();
    return {blob, blob + bytes};
  }
  Ahead values(int P, int D) const { return {blob + elements_bytes(P, D), blob + 2 * elements_bytes(P, D)}; }
};

// Consecutive entries of a stream whose scores fit in kColumns, those that no row sees left out.
struct Block {
  Entry pages[kColumns / 16], protos[kColumns];
  Proto rows[kColumns];  // of the protos, empty ones left out
  int page_count, proto_count, row_count, columns;
  bool ints, halves;  // holds int8 or int4 pages, bf16 pages
};

inline float hide(float x) { return x == x ? 0.0f : x; }

}  // namespace testbed
