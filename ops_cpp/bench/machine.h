// What this machine can do at most, measured on the spot: benchmarks say which share of it a layer reaches.
#pragma once

#include <string>

namespace hina {

// `request` is "THREADS PATH": that many threads read the mapped file PATH, which should be larger than four times the
// last-level cache, and run the loops of kernels/peak/ in the best way that the chosen instruction set offers.
//
//   {"isa": .., "threads": .., "read_bytes_per_second": .., "float32_flops": .., "bfloat16_flops": .., "int8_ops": ..}
//
// all of them per second and of all threads together; a multiply-add is two operations. bfloat16_flops is null below
// avx512_bf16. What went wrong is {"error": "one sentence"}.
std::string machine_json(const std::string& request);

}  // namespace hina
