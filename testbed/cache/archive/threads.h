// Threads that wait for the disk: pread and pwrite, or a copy out of a mapping of the file.
#pragma once
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace testbed {

// How the system is asked; results are bytes or -errno.
struct Calls {
  int64_t (*read)(int fd, void* to, int64_t bytes, int64_t offset);
  int64_t (*write)(int fd, const void* from, int64_t bytes, int64_t offset);
};

constexpr int64_t kMapBytes = int64_t(1) << 40;  // of address space; pages beyond are read by calls

class Threads : public Engine {
 public:
  Threads(int fd, bool direct, bool mapped, int64_t threads, Calls calls) : Engine(fd, direct), calls_(calls) {
    if (mapped) {
      void* at = ::mmap(nullptr, kMapBytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
      if (at == MAP_FAILED) throw errno;
      map_ = (const uint8_t*)at;
    }
    try {
      for (int64_t i = 0; i < threads; ++i) threads_.emplace_back([this] { serve(); });
    } catch (const std::exception&) {  // fewer do too
      if (threads_.empty()) throw;
    }
  }
  ~Threads() override {
    if (map_) ::munmap((void*)map_, kMapBytes);
  }

 private:
  void serve() {
    std::unique_ptr<Buffer> buffer;
    std::unique_lock<std::mutex> hold(lock_);
    for (;;) {
      wake_.wait(hold, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Run run = queue_.front();
      queue_.pop_front();
      hold.unlock();
      finish(run, move(run, buffer));
      hold.lock();
    }
  }

  int64_t move(Run& run, std::unique_ptr<Buffer>& buffer) {
    if (map_ && !run.order().write && run.offset() + run.bytes() <= kMapBytes) return from_map(run);
    if (!run.straight && (!buffer || buffer->size < run.bytes())) {
      buffer.reset();
      try {
        buffer = std::make_unique<Buffer>(buffer_bytes(run));
      } catch (const std::bad_alloc&) {
        return -ENOMEM;
      }
    }
    run.prepare(buffer ? buffer->data : nullptr);
    for (;;) {
      uint8_t* at = run.memory + run.done;
      const int64_t bytes = run.bytes() - run.done, offset = run.offset() + run.done;
      const int64_t result =
          run.order().write ? calls_.write(fd_, at, bytes, offset) : calls_.read(fd_, at, bytes, offset);
      const int64_t status = run.advance(result, direct_);
      if (status < 0) return status;
      if (status) break;
    }
    run.deliver(run.memory);
    return 1;
  }

  // Populating first turns the signal that a cut file or a bad disk would send into a code.
  int64_t from_map(const Run& run) {
    struct stat about;
    if (::fstat(fd_, &about) != 0) return -errno;
    if (about.st_size < run.offset() + run.bytes()) return kCut;
    const int64_t start = run.offset() / 4096 * 4096;
    for (int64_t tries = 0; ::madvise((void*)(map_ + start), run.offset() + run.bytes() - start, MADV_POPULATE_READ);) {
      if (errno == EINVAL) break;  // a kernel before 5.14
      if (errno != EINTR && errno != EAGAIN) return errno == EFAULT ? -EIO : -errno;
      if (++tries > kTries) return -errno;
    }
    run.deliver(map_ + run.offset());
    return 1;
  }

  const Calls calls_;
  const uint8_t* map_ = nullptr;
};

}  // namespace testbed
