// Work items over the threads of the OpenMP runtime that torch has already loaded (see build.py): no second runtime.
#pragma once
#include <atomic>
#include <cstdint>

namespace testbed {

typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
inline Parallel parallel = nullptr;

template <class F>
void run(int64_t items, int64_t threads, F& body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t items;
    F* body;
  } shared;
  shared.items = items;
  shared.body = &body;
  auto work = [](void* p) {
    Shared* s = static_cast<Shared*>(p);
    for (int64_t i; (i = s->next.fetch_add(1)) < s->items;) (*s->body)(i);
  };
  if (threads > items) threads = items;
  if (threads > 1 && parallel) parallel(work, &shared, static_cast<unsigned>(threads), 0);
  else work(&shared);
}

}  // namespace testbed
