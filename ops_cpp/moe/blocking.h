// How large the pieces are that the work is cut into. None of them changes a result.
#pragma once

#include <algorithm>
#include <cstdint>

namespace hina {

constexpr int kRows = 32;                    // rows of a block: 16 gate with 16 up, or 32 of one matrix
constexpr int kMaxChunk = 96;                // tokens of a chunk, at most
constexpr int64_t kChunkBytes = 192 * 1024;  // of float32 activations in a chunk
constexpr int64_t kWidenBytes = 512 * 1024;  // of float32 weights in a block; larger blocks convert in the kernel
constexpr int64_t kWidenFrom = 6;    // tokens from which 16-bit rows are converted once per block, not once per tile
constexpr int64_t kTokenBlock = 24;  // tokens of a prepare task
constexpr int64_t kPieceBytes = 128 * 1024 * 1024;  // of intermediate values that a piece of the tokens may need ..
constexpr int64_t kLeastPiece = 1024;  // .. but a piece has this many tokens: the weights are read for each

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tokens of a chunk, of `k` float32 values each.
inline int64_t chunk_of(int64_t k) { return std::clamp<int64_t>(kChunkBytes / (k * 4) / 3 * 3, 3, kMaxChunk); }

// Rows of each matrix in a block of FC1.
inline int64_t fc1_rows(bool gated) { return gated ? kRows / 2 : kRows; }

}  // namespace hina
