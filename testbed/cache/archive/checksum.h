// The checksum of a page: sum over its 64-bit words x_i of (x_i ^ x_i >> 32) * c_i modulo 2^64, c_i odd (a multilinear
// hash; checksum.py makes the table c and says what it detects). Copying and summing go together: a page that has just
// been read is in the processor's cache once.
#pragma once
#include <cstdint>
#include <cstring>

namespace testbed {

template <bool kCopy>
inline uint64_t sum_words(const uint8_t* from, uint8_t* to, int64_t words, const uint64_t* coefficient) {
  uint64_t sums[4] = {0, 0, 0, 0};
  auto one = [&](int64_t i, int lane) {
    uint64_t x;
    std::memcpy(&x, from + 8 * i, 8);
    if (kCopy) std::memcpy(to + 8 * i, &x, 8);
    sums[lane] += (x ^ x >> 32) * coefficient[i];
  };
  int64_t i = 0;
  for (; i + 4 <= words; i += 4) one(i, 0), one(i + 1, 1), one(i + 2, 2), one(i + 3, 3);
  for (; i < words; ++i) one(i, 0);
  return sums[0] + sums[1] + sums[2] + sums[3];
}

// Sums `bytes` (a multiple of 8) at `from` and, unless it is the same place, copies them to `to`.
inline uint64_t take_page(const uint8_t* from, uint8_t* to, int64_t bytes, const uint64_t* coefficient) {
  if (from == to) return sum_words<false>(from, to, bytes / 8, coefficient);
  return sum_words<true>(from, to, bytes / 8, coefficient);
}

}  // namespace testbed
