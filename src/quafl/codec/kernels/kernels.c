/* The lattice and the difference code on CPUs: rotation, rounding, packing and checksums in one pass over memory.
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
#ifdef __SSE2__
#include <immintrin.h>
#endif

#define GOLDEN 0x9E3779B9u
#define FARTHEST 0x4A000000 /* 2^21 as a float's bits: beyond it, float32 does not resolve the place within a cell */
#define NOWHERE (1 << 30)   /* cells between a point and a key that lies there */

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define NAME(x) JOIN(x, SET)

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SEVERAL_SETS 1
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,prefer-vector-width=512")
#define SET avx512
#define LANES 16
#include "set.h"
#undef SET
#undef LANES
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2")
#define SET avx2
#define LANES 8
#include "set.h"
#undef SET
#undef LANES
#pragma GCC pop_options
#endif

#define SET plain
#define LANES 4
#include "set.h"

static uint32_t mix(uint32_t v) {
  v ^= v >> 16;
  v *= 0x7FEB352Du;
  v ^= v >> 15;
  v *= 0x846CA68Bu;
  v ^= v >> 16;
  return v;
}

static uint32_t seed_key(uint64_t seed) { return mix((uint32_t)seed) ^ mix((uint32_t)(seed >> 32) + GOLDEN); }

#include "small.h"

/* A function of the instruction set in use. */
#ifdef SEVERAL_SETS
#define OF_SET(name) (set == 2 ? name##_avx512 : set == 1 ? name##_avx2 : name##_plain)
#else
#define OF_SET(name) ((void)set, name##_plain)
#endif

/* Large results go to fresh memory: with large pages, first touching it costs less than computing what goes there. */
static void expect_large(void *start, int64_t octets) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = 4096, first = ((uintptr_t)start + page - 1) / page * page;
  const uintptr_t end = ((uintptr_t)start + (uintptr_t)octets) / page * page;
  if (octets >= (4 << 20) && end > first) madvise((void *)first, end - first, MADV_HUGEPAGE);
#endif
  (void)start, (void)octets;
}

/* Raised whenever what a function takes or does is changed: native.py has the same number. */
int quafl_version(void) { return 2; }

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

/* In what follows, `size` is the number of coordinates in a block: 1024, or less for a vector that is a single one. */

void quafl_encode(int set, int64_t rows, const float *x, int64_t dim, int64_t blocks, int size, const uint64_t *seeds,
                  const float *sides, int bits, uint32_t *symbols, uint32_t *checks, float *widest) {
  const int64_t words = size / 32 * bits * blocks;
  expect_large(symbols, 4 * rows * words);
  for (int64_t row = 0; row < rows && blocks; row++) {
    const uint32_t key = seed_key(seeds[row]);
    if (size < 1024)
      small_encode(x + row * dim, dim, size, key, sides[row], bits, symbols + row * words, checks + row, widest + row);
    else
      OF_SET(encode)
      (x + row * dim, dim, blocks, key, sides[row], bits, symbols + row * words, checks + row * blocks, widest + row);
  }
}

/* A message per row, or one for all (packet_step 0); a key per row, or one for all (key_step 0). */
void quafl_decode(int set, int64_t rows, int packet_step, int key_step, const uint32_t *symbols,
                     const uint32_t *checks, const float *keys, int64_t dim, int64_t blocks, int size,
                     const uint64_t *seeds, const float *sides, int bits, float *out, uint8_t *failed) {
  const int64_t words = size / 32 * bits * blocks;
  expect_large(out, 4 * rows * dim);
  for (int64_t row = 0; row < rows && blocks; row++) {
    const int64_t packet = row * packet_step;
    const uint32_t key = seed_key(seeds[packet]), *mine = symbols + packet * words, *sums = checks + packet * blocks;
    const float *near = keys + row * key_step * dim;
    if (size < 1024)
      small_decode(mine, sums, near, dim, size, key, sides[packet], bits, out + row * dim, failed + row);
    else
      OF_SET(decode)(mine, sums, near, dim, blocks, key, sides[packet], bits, out + row * dim,
                                 failed + row * blocks);
  }
}

/* A vector and a key per row, or one for all (steps of 0); what comes of a vector that is for all is written once. */
void quafl_transfer(int set, int64_t rows, int vector_step, int key_step, const float *x, const float *keys,
                    int64_t dim, int64_t blocks, int size, const uint64_t *seeds, const float *sides, float *out,
                    int32_t *apart) {
  expect_large(out, 4 * (vector_step ? rows : 1) * dim);
  for (int64_t row = 0; row < rows && blocks; row++) {
    const int64_t vector = row * vector_step;
    const uint32_t key = seed_key(seeds[vector]);
    const float *mine = x + vector * dim, *near = keys + row * key_step * dim;
    float *result = row == vector ? out + row * dim : NULL;
    if (size < 1024)
      small_transfer(mine, near, dim, size, key, sides[vector], result, apart + row);
    else
      OF_SET(transfer)(mine, near, dim, blocks, key, sides[vector], result, apart + row * blocks);
  }
}

void quafl_encode_difference(int set, int64_t rows, const float *x, int64_t dim, int64_t blocks, int size,
                             const uint64_t *seeds, int bits, const float *curve, const float *levels,
                             uint32_t *symbols, float *energies, float *matches) {
  const int64_t words = size / 32 * bits * blocks;
  expect_large(symbols, 4 * rows * words);
  for (int64_t row = 0; row < rows && blocks; row++) {
    const uint32_t key = seed_key(seeds[row]);
    uint32_t *mine = symbols + row * words;
    float *energy = energies + row * blocks, *match = matches + row * blocks;
    if (size < 1024)
      small_encode_difference(x + row * dim, dim, size, key, bits, curve, levels, mine, energy, match);
    else
      OF_SET(encode_difference)(x + row * dim, dim, blocks, key, bits, curve, levels, mine, energy, match);
  }
}

void quafl_decode_difference(int set, int64_t rows, const uint32_t *symbols, const float *scales, int64_t dim,
                             int64_t blocks, int size, const uint64_t *seeds, int bits, const float *levels,
                             float *out) {
  const int64_t words = size / 32 * bits * blocks;
  expect_large(out, 4 * rows * dim);
  for (int64_t row = 0; row < rows && blocks; row++) {
    const uint32_t key = seed_key(seeds[row]), *mine = symbols + row * words;
    const float *scale = scales + row * blocks;
    if (size < 1024)
      small_decode_difference(mine, scale, dim, size, key, bits, levels, out + row * dim);
    else
      OF_SET(decode_difference)(mine, scale, dim, blocks, key, bits, levels, out + row * dim);
  }
}
