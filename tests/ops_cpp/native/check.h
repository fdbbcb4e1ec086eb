// The least a native test needs: a check that says where and what, and memory that ends at a guard page.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                   \
      std::fputc('\n', stderr);                                            \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

// `size` bytes whose last byte lies before an unreadable page, and whose page begins after one. The page is filled with
// 0xff, which is NaN in float32, float16 and bfloat16 alike: whatever is read beside the data poisons the result.
class Guarded {
 public:
  explicit Guarded(size_t size) : size_(size) {
    pages_ = (size + kPage - 1) / kPage + (size == 0);
    base_ = static_cast<char*>(mmap(nullptr, (pages_ + 2) * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(base_ != MAP_FAILED, "mmap of %zu bytes", size);
    CHECK(mprotect(base_ + kPage, pages_ * kPage, PROT_READ | PROT_WRITE) == 0, "mprotect");
    std::memset(base_ + kPage, 0xff, pages_ * kPage);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(base_, (pages_ + 2) * kPage); }

  char* data() const { return base_ + (1 + pages_) * kPage - size_; }  // ends at the guard
  // Whether the bytes of the page before the data are still as they were made.
  bool margin_intact() const {
    for (const char* p = base_ + kPage; p < data(); ++p)
      if (static_cast<unsigned char>(*p) != 0xff) return false;
    return true;
  }

 private:
  static constexpr size_t kPage = 4096;
  size_t size_, pages_;
  char* base_;
};
