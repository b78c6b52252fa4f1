// No exception may leave a C function: `guarded` turns it into a code, which build.py raises again.
#pragma once
#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>

namespace testbed {

constexpr int64_t kFailed = -1, kNoMemory = -2;  // and below kNoMemory: minus the bytes wanted

inline thread_local int64_t wanted_bytes = 0;  // what the call is about to ask for, where it is known

// body's own code, 0 or more, or one of those above.
template <class F>
int64_t guarded(F&& body) noexcept {
  wanted_bytes = 0;
  try {
    return body();
  } catch (const std::bad_alloc&) {
  } catch (const std::length_error&) {
  } catch (...) {
    return kFailed;
  }
  return wanted_bytes > -kNoMemory ? -wanted_bytes : kNoMemory;
}

}  // namespace testbed
