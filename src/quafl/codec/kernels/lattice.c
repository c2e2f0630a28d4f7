/* The lattice codec on CPUs: rotation, dither, rounding, packing and checksum in one pass over memory.
 *
 * The format is docs/wire.md's; kernels/oracle.py is the same in torch. Compiled once per instruction set, chosen when
 * the library is used. Plain C with GCC's vector extension (GCC or Clang), no Python inside: it is called through ctypes,
 * which releases the interpreter lock.
 */

#define _DEFAULT_SOURCE /* for madvise */
#include <stdint.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#define GOLDEN 0x9E3779B9u
#define FARTHEST 0x4A000000 /* 2^21 as a float's bits: beyond it, float32 does not resolve the place within a cell */

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(x) JOIN(x, SET)

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SEVERAL_SETS 1
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,prefer-vector-width=512")
#define SET avx512
#define LANES 16
#include "lattice_body.h"
#undef SET
#undef LANES
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2")
#define SET avx2
#define LANES 8
#include "lattice_body.h"
#undef SET
#undef LANES
#pragma GCC pop_options
#endif

#define SET plain
#define LANES 4
#include "lattice_body.h"

static uint32_t mix(uint32_t v) {
  v ^= v >> 16;
  v *= 0x7FEB352Du;
  v ^= v >> 15;
  v *= 0x846CA68Bu;
  v ^= v >> 16;
  return v;
}

/* Large results go to fresh memory: with large pages, first touching it costs less than computing what goes there. */
static void expect_large(void *start, int64_t octets) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = 4096, first = ((uintptr_t)start + page - 1) / page * page;
  const uintptr_t end = ((uintptr_t)start + (uintptr_t)octets) / page * page;
  if (octets >= (4 << 20) && end > first) madvise((void *)first, end - first, MADV_HUGEPAGE);
#endif
  (void)start, (void)octets;
}

static uint32_t seed_key(uint64_t seed) { return mix((uint32_t)seed) ^ mix((uint32_t)(seed >> 32) + GOLDEN); }

/* The instruction set in use: 2 AVX-512, 1 AVX2, 0 plain; `at_most` lets tests and benchmarks choose a lower one. */
int quafl_instruction_set(int at_most) {
#ifdef SEVERAL_SETS
  __builtin_cpu_init();
  if (at_most >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return 2;
  if (at_most >= 1 && __builtin_cpu_supports("avx2")) return 1;
#endif
  (void)at_most;
  return 0;
}

void quafl_encode(int set, int64_t rows, const float *x, int64_t dim, int64_t blocks, const uint64_t *seeds,
                  const float *sides, int bits, uint32_t *symbols, uint32_t *checks, float *widest) {
  expect_large(symbols, 4 * rows * 32 * bits * blocks);
  for (int64_t row = 0; row < rows; row++) {
    const float *vector = x + row * dim;
    uint32_t key = seed_key(seeds[row]), *words = symbols + row * 32 * bits * blocks, *sums = checks + row * blocks;
#ifdef SEVERAL_SETS
    if (set == 2)
      encode_avx512(vector, dim, blocks, key, sides[row], bits, words, sums, widest + row);
    else if (set == 1)
      encode_avx2(vector, dim, blocks, key, sides[row], bits, words, sums, widest + row);
    else
#endif
      encode_plain(vector, dim, blocks, key, sides[row], bits, words, sums, widest + row);
  }
  (void)set;
}

/* A message per row, or one for all (packet_step 0); a key per row, or one for all (key_step 0). */
int64_t quafl_decode(int set, int64_t rows, int packet_step, int key_step, const uint32_t *symbols,
                     const uint32_t *checks, const float *keys, int64_t dim, int64_t blocks, const uint64_t *seeds,
                     const float *sides, int bits, float *out, uint8_t *failed) {
  int64_t failures = 0;
  expect_large(out, 4 * rows * dim);
  for (int64_t row = 0; row < rows; row++) {
    int64_t packet = row * packet_step;
    const uint32_t *words = symbols + packet * 32 * bits * blocks, *sums = checks + packet * blocks;
    const float *vector = keys + row * key_step * dim;
    float *result = out + row * dim, side = sides[packet];
    uint32_t key = seed_key(seeds[packet]);
    uint8_t *bad = failed + row * blocks;
#ifdef SEVERAL_SETS
    if (set == 2)
      failures += decode_avx512(words, sums, vector, dim, blocks, key, side, bits, result, bad);
    else if (set == 1)
      failures += decode_avx2(words, sums, vector, dim, blocks, key, side, bits, result, bad);
    else
#endif
      failures += decode_plain(words, sums, vector, dim, blocks, key, side, bits, result, bad);
  }
  (void)set;
  return failures;
}
