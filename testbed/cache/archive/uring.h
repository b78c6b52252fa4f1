// One thread that keeps an io_uring full. The ring itself is liburing's: its functions come as pointers, since the
// library (the PyPI package `liburing`) is optional and found at run time; opaque types stay opaque.
#pragma once
#include <chrono>

#include "engine.h"

namespace testbed {

struct Completion {  // struct io_uring_cqe of the kernel's interface
  uint64_t data;
  int32_t result;
  uint32_t flags;
};

// As native.py packs it: io_uring_queue_init, ... of liburing.
struct Ring {
  int (*init)(unsigned entries, void* ring, unsigned flags);
  void (*exit)(void* ring);
  void* (*entry)(void* ring);
  void (*read)(void* entry, int fd, void* to, unsigned bytes, uint64_t offset);
  void (*write)(void* entry, int fd, const void* from, unsigned bytes, uint64_t offset);
  void (*name)(void* entry, uint64_t data);
  int (*submit_and_wait)(void* ring, unsigned completions);
  int (*peek)(void* ring, Completion** completion);
  void (*seen)(void* ring, Completion* completion);
};

class Uring : public Engine {
 public:
  Uring(int fd, bool direct, int64_t depth, Ring calls) : Engine(fd, direct), calls_(calls), flights_(depth) {
    const int code = calls_.init((unsigned)depth, ring_, 0);
    if (code < 0) throw -code;
    for (int64_t i = 0; i < depth; ++i) idle_.push_back(i);
    threads_.emplace_back([this] { serve(); });
  }
  ~Uring() override { calls_.exit(ring_); }

 private:
  struct Flight {
    Run run{};
    std::unique_ptr<Buffer> buffer;
  };

  void serve() {
    std::vector<int64_t> again;  // interrupted or short, to be handed in once more
    int64_t fruitless = 0;
    for (;;) {
      for (int64_t i : again) hand_in(i);
      again.clear();
      if (!board()) return;
      if (idle_.size() == flights_.size()) continue;  // what was handed in failed before it left
      const int code = calls_.submit_and_wait(ring_, 1);
      Completion* completion;
      bool any = false;
      while (calls_.peek(ring_, &completion) == 0 && completion) {
        const int64_t i = (int64_t)completion->data, result = completion->result;
        calls_.seen(ring_, completion);
        any = true;
        const int64_t status = flights_[i].run.advance(result, direct_);
        if (status == 0) again.push_back(i);
        else land(i, status);
      }
      if (code >= 0 || any) fruitless = 0;
      else if (++fruitless > kTries) give_up(code);
      else std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  // The ring takes nothing any more. Buffers are left to it, in case it still writes into them.
  void give_up(int64_t code) {
    broken_ = code;
    std::vector<bool> idle(flights_.size());
    for (int64_t i : idle_) idle[i] = true;
    for (size_t i = 0; i < flights_.size(); ++i) {
      if (idle[i]) continue;
      (void)flights_[i].buffer.release();
      land((int64_t)i, code);
    }
  }

  // Takes runs off the queue while there is room; waits if nothing is under way. False when all is done for good.
  bool board() {
    std::unique_lock<std::mutex> hold(lock_);
    if (idle_.size() == flights_.size()) wake_.wait(hold, [this] { return stopping_ || !queue_.empty(); });
    while (!queue_.empty() && !idle_.empty()) {
      const int64_t i = idle_.back();
      flights_[i].run = queue_.front();
      queue_.pop_front();
      idle_.pop_back();
      hold.unlock();
      start(i);
      hold.lock();
    }
    return idle_.size() < flights_.size() || !stopping_ || !queue_.empty();
  }

  void start(int64_t i) {
    Flight& flight = flights_[i];
    if (broken_) return land(i, broken_);
    if (!flight.run.straight && (!flight.buffer || flight.buffer->size < flight.run.bytes())) {
      flight.buffer.reset();
      try {
        flight.buffer = std::make_unique<Buffer>(buffer_bytes(flight.run));
      } catch (const std::bad_alloc&) {
        return land(i, -ENOMEM);
      }
    }
    flight.run.prepare(flight.buffer ? flight.buffer->data : nullptr);
    hand_in(i);
  }

  void hand_in(int64_t i) {
    Run& run = flights_[i].run;
    void* entry = calls_.entry(ring_);
    if (!entry) return land(i, -EBUSY);  // can't be: no more runs are under way than the ring has entries
    uint8_t* at = run.memory + run.done;
    const unsigned bytes = (unsigned)(run.bytes() - run.done);
    const uint64_t offset = (uint64_t)(run.offset() + run.done);
    if (run.order().write) calls_.write(entry, fd_, at, bytes, offset);
    else calls_.read(entry, fd_, at, bytes, offset);
    calls_.name(entry, (uint64_t)i);
  }

  void land(int64_t i, int64_t status) {
    if (status > 0) flights_[i].run.deliver(flights_[i].run.memory);
    finish(flights_[i].run, status);
    idle_.push_back(i);
  }

  const Ring calls_;
  alignas(64) uint8_t ring_[4096] = {};  // struct io_uring, 216 bytes today
  std::vector<Flight> flights_;
  std::vector<int64_t> idle_;
  int64_t broken_ = 0;  // why the ring is given up
};

}  // namespace testbed
