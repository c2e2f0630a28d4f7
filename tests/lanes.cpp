// The kernels, one lane wide, on what nobody honest sends: random symbols, checksums and scales, vectors of every size.
#include "lanes.hpp"
#include "kernels.cpp"

#include <cstdio>
#include <limits>
#include <random>
#include <vector>

int main() {
  std::mt19937 draw(0);
  std::normal_distribution<float> normal;
  const float side = 1e-3f, curve[4] = {3.9f, 0.03f, -0.27f, 0.04f}, infinite = std::numeric_limits<float>::infinity();
  for (int64_t dim : {1, 40, 512, 2500})
    for (int bits = 1; bits <= 16; bits++)
      for (float scale : {0.0f, 1.0f, 5e2f, 1e6f, 1e37f, infinite}) {  // 5e2: cells as far out as are told apart
        const int64_t blocks = (dim + 1023) / 1024;
        const int size = dim > 512 ? 1024 : dim > 256 ? 512 : dim > 32 ? 64 : 32;
        std::vector<float> key(dim), out(dim);
        for (float &value : key) value = scale * normal(draw);
        std::vector<uint32_t> symbols(size / 32 * bits * blocks), checks(blocks);
        for (uint32_t &word : symbols) word = draw();
        for (uint32_t &word : checks) word = draw();
        std::vector<uint8_t> failed(blocks);
        uint64_t seed = draw();
        float widest = 0;
        quafl_decode(0, 1, 0, 0, symbols.data(), checks.data(), key.data(), dim, blocks, size, &seed, &side, bits,
                     out.data(), failed.data());
        if (bits <= 8) {
          std::vector<float> levels(1 << (bits - 1), 1.0f), energy(blocks), match(blocks), scales(blocks, scale);
          quafl_decode_difference(0, 1, symbols.data(), scales.data(), dim, blocks, size, &seed, bits, levels.data(),
                                  out.data());
          quafl_encode_difference(0, 1, key.data(), dim, blocks, size, &seed, bits, curve, levels.data(),
                                  symbols.data(), energy.data(), match.data());
        }
        quafl_encode(0, 1, key.data(), dim, blocks, size, &seed, &side, bits, symbols.data(), checks.data(), &widest);
        std::vector<int32_t> apart(blocks);
        std::vector<float> x(dim, scale);
        quafl_transfer(0, 1, 0, 0, x.data(), key.data(), dim, blocks, size, &seed, &side, out.data(), apart.data());
      }
  puts("sound");
}
