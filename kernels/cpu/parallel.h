// Work items over a few sleeping threads of our own. No OpenMP: a second runtime beside torch's would fight it for the
// cores, and joining torch's own means its barrier, which waits for every thread even when the work is done; on a busy
// machine that is a scheduler's time slice a call. Here the caller works too, a thread that wakes late finds nothing
// left, and only threads that are in the middle of an item are waited for. A forked child, which has none of the
// threads and finds the locks as they happened to be, gets a crew of its own.
#pragma once
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>

namespace testbed {

constexpr int64_t kMostThreads = 256;

class Crew {
 public:
  static Crew& get() { return *current_; }

  // Runs work(data) here and on up to threads - 1 others; it must return once no item is left, and not throw.
  void run(int64_t threads, void (*work)(void*), void* data) {
    std::lock_guard<std::mutex> one_call_at_a_time(call_);
    {
      std::lock_guard<std::mutex> hold(state_);
      hire(std::min(threads, kMostThreads) - 1);
      work_ = work, data_ = data, places_ = std::min(threads - 1, hired_);
    }
    wake_.notify_all();
    work(data);
    std::unique_lock<std::mutex> hold(state_);
    places_ = 0;
    done_.wait(hold, [this] { return busy_ == 0; });
  }

 private:
  // A thread that can't be started isn't missed: the others do its items.
  void hire(int64_t wanted) {
    try {
      for (; hired_ < wanted; ++hired_) std::thread([this] { serve(); }).detach();
    } catch (const std::exception&) {
    }
  }

  static Crew* first() {
    pthread_atfork(nullptr, nullptr, [] { current_ = new Crew; });
    return new Crew;
  }

  void serve() {
    std::unique_lock<std::mutex> hold(state_);
    for (;;) {
      wake_.wait(hold, [this] { return places_ > 0; });
      --places_, ++busy_;
      auto work = work_;
      void* data = data_;
      hold.unlock();
      work(data);
      hold.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex call_, state_;
  std::condition_variable wake_, done_;
  void (*work_)(void*) = nullptr;
  void* data_ = nullptr;
  int64_t places_ = 0, busy_ = 0, hired_ = 0;
  static Crew* current_;  // never freed: its threads may outlive static destruction
};

inline Crew* Crew::current_ = Crew::first();

// body(i) of every item; throws what the first one that failed threw, once all threads have stopped.
template <class F>
void run(int64_t items, int64_t threads, F& body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t items;
    F* body;
    std::atomic<bool> failed{false};
    std::exception_ptr error;
  } shared;
  shared.items = items;
  shared.body = &body;
  auto work = [](void* p) {
    Shared* s = static_cast<Shared*>(p);
    try {
      for (int64_t i; (i = s->next.fetch_add(1)) < s->items;) (*s->body)(i);
    } catch (...) {
      s->next = s->items;
      if (!s->failed.exchange(true)) s->error = std::current_exception();
    }
  };
  if (threads > items) threads = items;
  if (threads > 1) Crew::get().run(threads, work, &shared);
  else work(&shared);
  if (shared.failed) std::rethrow_exception(shared.error);
}

}  // namespace testbed
