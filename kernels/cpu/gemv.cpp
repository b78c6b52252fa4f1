// x W^T for a few rows x and bf16 weights, sums in float32: a decode step is bound by reading its weights, and bf16 is
// half of float32. A work item is a run of kRun output channels; an output is summed in one order, whatever the number
// of threads or rows. Outputs go one at a time, so that the weights are one stream through memory.
#include <vector>

#include "guard.h"
#include "lanes.h"
#include "parallel.h"

namespace testbed {

constexpr int64_t kRun = 64, kAhead = 512, kPairs = 2 * W;
constexpr int kMostRows = 4;  // two sums a row

typedef uint32_t vu __attribute__((vector_size(32)));
typedef uint32_t vuu __attribute__((vector_size(32), aligned(2), may_alias));

// Rows as the weights are read: of 16 numbers, those at even places, then those at odd ones.
inline void split_pairs(const float* x, int64_t K, float* out) {
  int64_t k = 0;
  for (; k + kPairs <= K; k += kPairs)
    for (int i = 0; i < W; ++i) {
      out[k + i] = x[k + 2 * i];
      out[k + W + i] = x[k + 2 * i + 1];
    }
  for (; k < K; ++k) out[k] = x[k];
}

// y[t][0] = x[t] . w; a pair of weights is one 32-bit word, either half of it a float once the other is cleared.
template <int R>
inline void dot(const float* x, const uint16_t* w, int64_t K, float* y, int64_t N) {
  vf even[R] = {}, odd[R] = {};
  int64_t k = 0;
  for (; k + kPairs <= K; k += kPairs) {
    vu pairs = *reinterpret_cast<const vuu*>(w + k);
    __builtin_prefetch(w + k + kAhead, 0, 3);
    vf low = (vf)(pairs << 16), high = (vf)(pairs & 0xffff0000u);
    for (int t = 0; t < R; ++t) {
      even[t] += low * load(x + t * K + k);
      odd[t] += high * load(x + t * K + k + W);
    }
  }
  for (int t = 0; t < R; ++t) {
    float total = sum(even[t] + odd[t]);
    for (int64_t j = k; j < K; ++j) total += x[t * K + j] * bf16_to_float(w[j]);
    y[t * N] = total;
  }
}

template <int R>
void dots(const float* x, const uint16_t* w, int64_t first, int64_t end, int64_t K, float* y, int64_t N) {
  for (int64_t n = first; n < end; ++n) dot<R>(x, w + n * K, K, y + n, N);
}

}  // namespace testbed

extern "C" {

// x [T, K], w [N, K] bf16, y [T, N], all contiguous. The weights of a run stay in the cache for the rows beyond four.
// Returns 0 or a code of guard.h.
int64_t testbed_gemv(const float* x, const uint16_t* w, float* y, int64_t T, int64_t N, int64_t K, int64_t threads) {
  using namespace testbed;
  std::vector<float> rows;
  auto work = [&](int64_t item) {
    const int64_t first = item * kRun, end = first + kRun < N ? first + kRun : N;
    for (int64_t t = 0; t < T; t += kMostRows) {
      const float* from = rows.data() + t * K;
      float* to = y + t * N;
      switch (T - t < kMostRows ? T - t : kMostRows) {
        case 1: dots<1>(from, w, first, end, K, to, N); break;
        case 2: dots<2>(from, w, first, end, K, to, N); break;
        case 3: dots<3>(from, w, first, end, K, to, N); break;
        default: dots<kMostRows>(from, w, first, end, K, to, N);
      }
    }
  };
  return guarded([&] {
    wanted_bytes = 4 * T * K;
    rows.resize(T * K);
    for (int64_t t = 0; t < T; ++t) split_pairs(x + t * K, K, rows.data() + t * K);
    run((N + kRun - 1) / kRun, threads, work);
    return 0;
  });
}

}  // extern "C"
