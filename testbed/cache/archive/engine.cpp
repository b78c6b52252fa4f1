// What native.py calls. No exception leaves a function here; codes are 0 or -errno, kCut for a file that is too short.
#include "threads.h"
#include "uring.h"

namespace testbed {

int64_t system_read(int fd, void* to, int64_t bytes, int64_t offset) {
  const ssize_t done = ::pread64(fd, to, (size_t)bytes, offset);
  return done < 0 ? -errno : done;
}

int64_t system_write(int fd, const void* from, int64_t bytes, int64_t offset) {
  const ssize_t done = ::pwrite64(fd, from, (size_t)bytes, offset);
  return done < 0 ? -errno : done;
}

template <class F>
int64_t opened(Engine** out, F&& make) noexcept {
  try {
    *out = make();
    return 0;
  } catch (int code) {
    return -code;
  } catch (const std::bad_alloc&) {
    return -ENOMEM;
  } catch (...) {
    return -EAGAIN;  // a thread can't be started
  }
}

}  // namespace testbed

extern "C" {

void testbed_checksum(const uint8_t* pages, int64_t count, int64_t page_bytes, const uint64_t* coefficient,
                      uint64_t* sum) {
  for (int64_t i = 0; i < count; ++i)
    sum[i] = testbed::sum_words<false>(pages + i * page_bytes, nullptr, page_bytes / 8, coefficient);
}

// calls: null for the system's own.
int64_t testbed_open_threads(int64_t fd, int64_t direct, int64_t mapped, int64_t threads, const testbed::Calls* calls,
                             testbed::Engine** out) {
  using namespace testbed;
  const Calls used = calls ? *calls : Calls{system_read, system_write};
  return opened(out, [&]() -> Engine* { return new Threads((int)fd, direct, mapped, threads, used); });
}

int64_t testbed_open_uring(int64_t fd, int64_t direct, int64_t depth, const testbed::Ring* calls,
                           testbed::Engine** out) {
  using namespace testbed;
  return opened(out, [&]() -> Engine* { return new Uring((int)fd, direct, depth, *calls); });
}

testbed::Batch* testbed_submit(testbed::Engine* engine, const testbed::Order* order) {
  try {
    return engine->submit(*order);
  } catch (...) {
    return nullptr;  // no memory
  }
}

int64_t testbed_wait(testbed::Engine* engine, testbed::Batch* batch, int64_t* fault_offset) {
  return engine->wait(batch, fault_offset);
}

void testbed_close(testbed::Engine* engine) {
  engine->stop();
  delete engine;
}

}  // extern "C"
