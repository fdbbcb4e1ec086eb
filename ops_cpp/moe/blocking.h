// How large the pieces are that the work is cut into. None of them changes a result.
#pragma once

#include <algorithm>
#include <cstdint>

namespace hina {

constexpr int kRows = 32;                        // rows of a block of one matrix, at most ..
constexpr int kFewRows = 128;                    // .. but so many where few tokens meet quantised rows as they lie ..
constexpr int64_t kPage = 4096;                  // .. for each place that they are read from to be so long, in bytes
constexpr int kMaxChunk = 96;                    // tokens of a chunk, at most
constexpr int64_t kChunkBytes = 384 * 1024;      // of tokens in a chunk
constexpr int64_t kDequantiseBytes = 64 * 1024;  // of float32 weights that are dequantised at once
constexpr int64_t kStreamTokens = 4;             // per expert, at most, where tasks are runs of blocks ..
constexpr int64_t kMostRun = 4;                  // .. of so many at most ..
constexpr int64_t kTasksPerWorker = 4;           // .. but so that every worker gets so many tasks
constexpr int64_t kTokenBlock = 24;              // tokens of a prepare task
constexpr int64_t kPieceBytes = 128 * 1024 * 1024;  // of intermediate values that a piece of the tokens may need ..
constexpr int64_t kLeastPiece = 1024;  // .. but a piece has this many tokens: the weights are read for each

constexpr int64_t kTileChunk = 128;  // tokens that a block of rows is multiplied with at a time, in tiles
constexpr int64_t kTileFloats = kTileChunk * 2 * kRows;  // of a worker: results of a block for a chunk of tokens

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes, rounded up so that what follows is aligned.
inline int64_t aligned(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

// Tokens of a chunk, of `bytes` each.
inline int64_t chunk_of(int64_t bytes) { return std::clamp<int64_t>(kChunkBytes / bytes / 12 * 12, 12, kMaxChunk); }

}  // namespace hina
