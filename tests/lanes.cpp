// The kernel, one lane wide, on what nobody honest sends: random symbols and checksums, keys of every size.
#include "lanes.hpp"
#include "lattice.cpp"

#include <cstdio>
#include <random>
#include <vector>

int main() {
  std::mt19937 draw(0);
  std::normal_distribution<float> normal;
  const int64_t dim = 2500, blocks = 3;
  const float side = 1e-3f;
  for (int bits = 1; bits <= 16; bits++)
    for (float scale : {0.0f, 1.0f, 5e2f, 1e6f, 1e37f}) {  // 5e2: cells as far out as are told apart
      std::vector<float> key(dim), out(dim);
      for (float &value : key) value = scale * normal(draw);
      std::vector<uint32_t> symbols(32 * bits * blocks), checks(blocks);
      for (uint32_t &word : symbols) word = draw();
      for (uint32_t &word : checks) word = draw();
      std::vector<uint8_t> failed(blocks);
      uint64_t seed = draw();
      float widest = 0;
      quafl_decode(0, 1, 0, 0, symbols.data(), checks.data(), key.data(), dim, blocks, &seed, &side, bits, out.data(),
                   failed.data());
      quafl_encode(0, 1, key.data(), dim, blocks, &seed, &side, bits, symbols.data(), checks.data(), &widest);
    }
  puts("sound");
}
