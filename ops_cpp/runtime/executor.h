// Who runs the workers: ONNX Runtime's pool in a session, own threads in tests and benchmarks.
#pragma once

#include <cstddef>

namespace hina {

struct Executor {
  void* self;
  // Calls fn(data, i) once for every i in [0, total), on as many threads as there are; returns when all calls have.
  void (*parallel_for)(void* self, void (*fn)(void* data, size_t index), size_t total, void* data);
  // The node that the asking thread runs on now, 0.. as runtime/topology lists them; nullptr: all are on node 0.
  int (*node)(void* self) = nullptr;
};

}  // namespace hina
