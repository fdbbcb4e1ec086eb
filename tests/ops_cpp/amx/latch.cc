// Two operators in turn on the same threads: one that configures its tiles once per thread and trusts that ever after,
// as ONNX Runtime's int8 kernels do, and one that has tiles of other sizes, as HinaMoE does. Argument "kept": the other
// one keeps the configuration it finds (TileState); "careless": it does not. Prints who computed wrong results.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/tile/amx.h"
#include "reference.h"
#include "runtime/amx.h"

namespace {

using reference::Tile;
namespace amx = hina::amx;

std::atomic<int> wrong_trusting{0}, wrong_other{0}, wrong_idle{0};

// tile 0 += tile 1 x tile 2, with tiles of the sizes of `sums`, `left` and `right`.
template <void (*multiply)(), void (*reference_of)(Tile&, const Tile&, const Tile&)>
bool right_product(std::mt19937& random, Tile sums, Tile left, Tile right) {
  for (Tile* tile : {&left, &right})
    for (int r = 0; r < tile->rows; ++r)
      for (int i = 0; i < tile->row_bytes / 2; ++i)
        tile->set(r, i, static_cast<uint16_t>(0x3f80 | random() % 128));  // of bfloat16: 1 to 2
  amx::zero<0>();
  amx::load<1>(left.bytes, 64);
  amx::load<2>(right.bytes, 64);
  multiply();
  Tile got = sums;
  amx::store<0>(got.bytes, 64);
  reference_of(sums, left, right);
  return std::memcmp(got.bytes, sums.bytes, sizeof sums.bytes) == 0;
}

void trusting(std::mt19937& random) {
  thread_local bool configured = false;
  if (!configured) {
    amx::Config config;
    for (int tile = 0; tile < 3; ++tile) config.shape(tile, 16, 64);
    amx::configure(config);
    configured = true;
  }
  const Tile full{16, 64};
  if (!right_product<amx::multiply_signed<0, 1, 2>, reference::tdpb<int8_t, int8_t>>(random, full, full, full))
    ++wrong_trusting;
}

void other(std::mt19937& random, bool keep) {
  const hina::TileState state(keep);
  const int tokens = 1 + static_cast<int>(random() % 15), rows = 1 + static_cast<int>(random() % 15);
  amx::Config config;
  config.shape(0, rows, 4 * tokens);
  config.shape(1, rows, 64);
  config.shape(2, 16, 4 * tokens);
  amx::configure(config);
  if (!right_product<amx::multiply_bf16<0, 1, 2>, reference::tdpbf16ps>(random, {rows, 4 * tokens}, {rows, 64},
                                                                        {16, 4 * tokens}))
    ++wrong_other;
}

void work(unsigned number, bool keep) {
  std::mt19937 random(number);
  other(random, keep);  // on a thread without tiles, as most are: it is left so
  amx::Config config;
  amx::store_configuration(config);
  if (config.palette != 0) ++wrong_idle;
  for (int call = 0; call < 50; ++call) {
    trusting(random);
    if (random() % 2) other(random, keep);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  if (!hina::amx_status().usable) {
    std::printf("%s\n", hina::amx_status().reason.c_str());
    return 77;
  }
  std::vector<std::thread> threads;
  for (unsigned number = 0; number < 4; ++number) threads.emplace_back(work, number, std::string(argv[1]) == "kept");
  for (std::thread& thread : threads) thread.join();
  std::printf("trusting %s, other %s, idle %s\n", wrong_trusting > 0 ? "wrong" : "right",
              wrong_other > 0 ? "wrong" : "right", wrong_idle > 0 ? "wrong" : "right");
  return 0;
}
