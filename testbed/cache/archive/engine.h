// A queue of runs and the threads that serve it. Batches are handed in and waited for from any thread; runs finish in
// any order.
#pragma once
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "runs.h"

namespace testbed {

struct Buffer {
  explicit Buffer(int64_t bytes) : data((uint8_t*)std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)), size(bytes) {
    if (!data) throw std::bad_alloc();
  }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  uint8_t* const data;
  const int64_t size;
};

class Engine {
 public:
  Engine(int fd, bool direct) : fd_(fd), direct_(direct) {}
  virtual ~Engine() = default;

  Batch* submit(const Order& order) {
    auto batch = std::make_unique<Batch>();
    batch->order = order;
    const std::vector<Run> runs = runs_of(batch.get(), direct_);
    batch->left = (int64_t)runs.size();
    {
      std::lock_guard<std::mutex> hold(lock_);
      queue_.insert(queue_.end(), runs.begin(), runs.end());
    }
    if (runs.size() >= threads_.size()) wake_.notify_all();
    else for (size_t i = 0; i < runs.size(); ++i) wake_.notify_one();
    return batch.release();
  }

  // Blocks; the batch is gone afterwards. 0, -errno or kCut.
  int64_t wait(Batch* batch, int64_t* fault_offset) {
    std::unique_lock<std::mutex> hold(lock_);
    ++waiting_;
    done_.wait(hold, [&] { return batch->left == 0; });
    if (--waiting_ == 0 && stopping_) done_.notify_all();
    const int64_t error = batch->error;
    *fault_offset = batch->fault_offset;
    delete batch;
    return error;
  }

  // What is queued is done first.
  void stop() {
    {
      std::lock_guard<std::mutex> hold(lock_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    std::unique_lock<std::mutex> hold(lock_);
    done_.wait(hold, [this] { return waiting_ == 0; });
  }

 protected:
  // status: 1, or what went wrong.
  void finish(const Run& run, int64_t status) {
    {
      std::lock_guard<std::mutex> hold(lock_);
      Batch& batch = *run.batch;
      if (status < 0 && batch.error == 0) batch.error = status, batch.fault_offset = run.offset() + run.done;
      if (--batch.left) return;
    }
    done_.notify_all();
  }

  static int64_t buffer_bytes(const Run& run) { return run.bytes() > kRunBytes ? run.bytes() : kRunBytes; }

  const int fd_;
  const bool direct_;
  std::mutex lock_;
  std::condition_variable wake_, done_;
  std::deque<Run> queue_;
  std::vector<std::thread> threads_;
  int64_t waiting_ = 0;
  bool stopping_ = false;
};

}  // namespace testbed
