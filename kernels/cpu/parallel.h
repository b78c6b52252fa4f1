// Work items over a few sleeping threads of our own. No OpenMP: a second runtime beside torch's would fight it for the
// cores, and joining torch's own means its barrier, which waits for every thread even when the work is done; on a busy
// machine that is a scheduler's time slice a call. Here the caller works too, a thread that wakes late finds nothing
// left, and only threads that are in the middle of an item are waited for. After a fork the caller works alone.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace testbed {

class Crew {
 public:
  static Crew& get() {
    static Crew* crew = new Crew;  // never freed: its threads may outlive static destruction
    return *crew;
  }

  // Runs work(data) here and on up to threads - 1 others; it must return once no item is left.
  void run(int64_t threads, void (*work)(void*), void* data) {
    std::lock_guard<std::mutex> one_call_at_a_time(call_);
    {
      std::lock_guard<std::mutex> hold(state_);
      for (; hired_ < threads - 1; ++hired_) std::thread([this] { serve(); }).detach();
      work_ = work, data_ = data, places_ = threads - 1;
    }
    wake_.notify_all();
    work(data);
    std::unique_lock<std::mutex> hold(state_);
    places_ = 0;
    done_.wait(hold, [this] { return busy_ == 0; });
  }

 private:
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
};

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
  if (threads > 1) Crew::get().run(threads, work, &shared);
  else work(&shared);
}

}  // namespace testbed
