// Batches of pages as runs of neighbours in the file, whatever moves the bytes. A run goes straight from or to the
// caller's memory where page follows page there as in the file and the alignment suits, else through a buffer.
#pragma once
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

#include "checksum.h"

namespace testbed {

constexpr int64_t kRunBytes = 256 << 10;  // most of one read or write: fits a second-level cache, fills a disk's queue
constexpr int64_t kBlock = 512;           // what O_DIRECT aligns to
constexpr int64_t kTries = 8;             // interrupted or fruitless calls in a row after which a run fails
constexpr int64_t kCut = -100000;         // the file ends before the page; no errno

// As native.py packs it.
struct Order {
  int64_t write, pages, page_bytes, stride;
  const int64_t* offset;  // [pages] ascending
  const int64_t* place;   // [pages] which page of `base`
  uint8_t* base;
  uint64_t* sum;  // [pages] out
  const uint64_t* coefficient;
};

struct Batch {
  Order order;
  int64_t left = 0;                       // runs under way
  int64_t error = 0, fault_offset = -1;  // of the first run that failed
};

struct Run {
  Batch* batch;
  int64_t first, pages;
  bool straight;
  int64_t done = 0, tries = 0;
  uint8_t* memory = nullptr;

  const Order& order() const { return batch->order; }
  int64_t offset() const { return order().offset[first]; }
  int64_t bytes() const { return pages * order().stride; }
  uint8_t* page(int64_t i) const { return order().base + order().place[first + i] * order().page_bytes; }

  // Pages into memory, with their sums; what lies between them is zero.
  void prepare(uint8_t* buffer) {
    memory = straight ? page(0) : buffer;
    if (!order().write) return;
    const int64_t gap = order().stride - order().page_bytes;
    for (int64_t i = 0; i < pages; ++i) {
      uint8_t* to = memory + i * order().stride;
      order().sum[first + i] = take_page(page(i), to, order().page_bytes, order().coefficient);
      std::memset(to + order().page_bytes, 0, gap);
    }
  }

  // Pages that were read, from memory to where they belong, with their sums.
  void deliver(const uint8_t* from) const {
    if (order().write) return;
    for (int64_t i = 0; i < pages; ++i)
      order().sum[first + i] =
          take_page(from + i * order().stride, page(i), order().page_bytes, order().coefficient);
  }

  // What a call's result (bytes, or -errno) means: 0 = go on, 1 = all done, below 0 = failed.
  int64_t advance(int64_t result, bool direct) {
    if (result == -EINTR || result == -EAGAIN) return ++tries > kTries ? result : 0;
    if (result < 0) return result;
    if (result == 0) return order().write ? -EIO : kCut;
    const int64_t before = done;
    done += result;
    if (done >= bytes()) return 1;
    if (direct) done -= done % kBlock;
    tries = done > before ? 0 : tries + 1;
    if (tries > kTries) return order().write ? -EIO : kCut;
    return 0;
  }
};

inline std::vector<Run> runs_of(Batch* batch, bool direct) {
  const Order& o = batch->order;
  const int64_t most = o.stride < kRunBytes ? kRunBytes / o.stride : 1;
  std::vector<Run> runs;
  for (int64_t i = 0; i < o.pages;) {
    int64_t n = 1;
    bool straight = o.stride == o.page_bytes;
    for (; n < most && i + n < o.pages && o.offset[i + n] == o.offset[i] + n * o.stride; ++n)
      straight = straight && o.place[i + n] == o.place[i] + n;
    const bool aligned = (uintptr_t)(o.base + o.place[i] * o.page_bytes) % kBlock == 0;
    runs.push_back(Run{batch, i, n, straight && (aligned || !direct)});
    i += n;
  }
  return runs;
}

}  // namespace testbed
