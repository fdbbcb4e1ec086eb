// AMX: whether this process may use it, and the tile state of a thread around a use.
#pragma once

#include <string>

namespace hina {

struct AmxStatus {
  bool usable = false;  // tiles, with products of bfloat16 and of int8
  std::string reason;   // one clause for people: why, or which of CPU, kernel and permission is missing
};

// Asks the kernel for permission at the first call, on behalf of the whole process.
const AmxStatus& amx_status();

// Keeps the tile configuration that a thread has, from construction to destruction; the configuration in between is the
// owner's. What other code on the thread (ONNX Runtime's own kernels, say) configured once, and trusts ever after, is
// in place again. The contents of tiles are not kept: no function may expect that of those it calls.
class TileState {
 public:
  // Does nothing unless `amx`, which needs amx_status().usable.
  explicit TileState(bool amx);
  TileState(const TileState&) = delete;
  TileState& operator=(const TileState&) = delete;
  ~TileState();

 private:
  const bool amx_;
  unsigned char before_[64];  // as STTILECFG writes it
};

}  // namespace hina
