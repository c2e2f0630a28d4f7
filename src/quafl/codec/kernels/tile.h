/* What both codes share, for one width of vectors; included by kernels.c once per instruction set, with LANES and NAME
 * set.
 *
 * LANES blocks are worked on side by side, a block a lane: a tile of 1024 rows. Rows of a tile lie W floats apart in the
 * vector, so that every access to memory is LANES consecutive floats. Butterflies go from distance 512 down to 1, which
 * leaves the last four stages, the quantization and the packing to 16 neighbouring rows in registers; on the way back
 * they go from 1 up. Additions and multiplications are never fused: all kernels get the same symbols.
 */

typedef float NAME(vf) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t NAME(vi) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t NAME(vu) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define vf NAME(vf)
#define vi NAME(vi)
#define vu NAME(vu)

static inline vu NAME(stir)(vu v) {
  v ^= v >> 16;
  v *= 0x7FEB352Du;
  v ^= v >> 15;
  v *= 0x846CA68Bu;
  return v;
}

static inline vu NAME(mix)(vu v) {
  v = NAME(stir)(v);
  return v ^ (v >> 16);
}

/* The keys of LANES blocks from w on. */
static inline vu NAME(block_keys)(uint32_t key, int64_t w) {
  vu block;
  for (int lane = 0; lane < LANES; lane++) block[lane] = (uint32_t)(w + lane);
  return NAME(mix)(block * GOLDEN + key);
}

static inline vu NAME(hash)(vu block_keys, int row) { return NAME(stir)(block_keys + (uint32_t)row * GOLDEN); }

/* A hash that is needed again: computed again, where the products of a vector cost less than the cache that they would
 * fill. Of 1024 rows of 16 lanes, that is more than a core's first one has. */
#define KEEPS_HASHES (LANES == 4)
static inline vu NAME(hash_again)(const vu *hashes, vu block_keys, int row) {
  return KEEPS_HASHES && hashes ? hashes[row] : NAME(hash)(block_keys, row);
}

/* Row `row` of the tile at block w; what lies beyond the vector or beyond the last block is zero. */
static inline vf NAME(load_row)(const float *x, int64_t dim, int64_t blocks, int64_t w, int row) {
  int64_t at = row * blocks + w;
  if (w + LANES <= blocks && at + LANES <= dim) return *(const vf *)(x + at);
  vf value = {0};
  for (int lane = 0; lane < LANES && w + lane < blocks && at + lane < dim; lane++) value[lane] = x[at + lane];
  return value;
}

static inline void NAME(store_row)(float *x, int64_t dim, int64_t blocks, int64_t w, int row, vf value) {
  int64_t at = row * blocks + w;
  if (w + LANES <= blocks && at + LANES <= dim) {
    *(vf *)(x + at) = value;
    return;
  }
  for (int lane = 0; lane < LANES && w + lane < blocks && at + lane < dim; lane++) x[at + lane] = value[lane];
}

static inline vu NAME(load_words)(const uint32_t *words, int64_t blocks, int64_t w) {
  if (w + LANES <= blocks) return *(const vu *)words;
  vu value = {0};
  for (int lane = 0; w + lane < blocks; lane++) value[lane] = words[lane];
  return value;
}

static inline void NAME(store_words)(uint32_t *words, int64_t blocks, int64_t w, vu value) {
  if (w + LANES <= blocks) {
    *(vu *)words = value;
    return;
  }
  for (int lane = 0; w + lane < blocks; lane++) words[lane] = value[lane];
}

/* Hadamard of RADIX registers, from the largest distance down, or from the smallest up. */
#define DOWN(radix, z)                                         \
  _Pragma("GCC unroll 4") for (int h = (radix) / 2; h; h /= 2) \
    _Pragma("GCC unroll 16") for (int i = 0; i < (radix); i++) if (!(i & h)) BUTTERFLY(z, i, h)
#define UP(radix, z)                                           \
  _Pragma("GCC unroll 4") for (int h = 1; h < (radix); h *= 2) \
    _Pragma("GCC unroll 16") for (int i = 0; i < (radix); i++) if (!(i & h)) BUTTERFLY(z, i, h)
#define BUTTERFLY(z, i, h)          \
  {                                 \
    vf upper = z[i], lower = z[i + h]; \
    z[i] = upper + lower;           \
    z[i + h] = upper - lower;       \
  }

/* Three stages of R between rows 16 apart, within 128. */
static inline void NAME(rotate_middle)(vf *restrict tile) {
  for (int top = 0; top < 1024; top += 128)
    for (int j = 0; j < 16; j++) {
      vf z[8];
      _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) z[i] = tile[top + 16 * i + j];
      DOWN(8, z)
      _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) tile[top + 16 * i + j] = z[i];
    }
}

/* The last six stages of R⁻¹, and what comes of them: each row times its lane's scale, with its sign. */
static inline void NAME(rotate_back_and_store)(vf *restrict tile, const vu *hashes, vu keys, vf scale, float *out,
                                               int64_t dim, int64_t blocks, int64_t w) {
  for (int top = 0; top < 1024; top += 128)
    for (int j = 0; j < 16; j++) {
      vf z[8];
      _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) z[i] = tile[top + 16 * i + j];
      UP(8, z)
      _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) tile[top + 16 * i + j] = z[i];
    }
  for (int j = 0; j < 128; j++) {
    vf z[8];
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) z[i] = tile[128 * i + j];
    UP(8, z)
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
      int row = 128 * i + j;
      vu h = NAME(hash_again)(hashes, keys, row);
      NAME(store_row)(out, dim, blocks, w, row, (vf)((vu)(z[i] * scale) ^ (h & 0x80000000u)));
    }
  }
}

/* The smaller of two, `y` if one is not a number. */
static inline vf NAME(least)(vf x, vf y) {
#if defined(__SSE2__) && LANES == 4
  return (vf)_mm_min_ps((__m128)x, (__m128)y);
#elif defined(SEVERAL_SETS) && LANES == 8
  return (vf)_mm256_min_ps((__m256)x, (__m256)y);
#elif defined(SEVERAL_SETS) && LANES == 16
  return (vf)_mm512_min_ps((__m512)x, (__m512)y);
#else
  vi less = x < y;
  return (vf)(((vi)x & less) | ((vi)y & ~less));
#endif
}

static inline vf NAME(dither)(vu hash) { return __builtin_convertvector((vi)(hash >> 7 & 0xFFFFFFu), vf) * 0x1p-24f; }

/* 32 symbols into `bits` rows of words, and back. */
static inline void NAME(pack)(const vu *symbols, int bits, uint32_t *words, int64_t blocks, int64_t w) {
  vu word = {0};
  int filled = 0;
  for (int j = 0; j < 32; j++) {
    word |= symbols[j] << filled;
    filled += bits;
    if (filled >= 32) {
      NAME(store_words)(words, blocks, w, word);
      words += blocks;
      filled -= 32;
      word = filled ? symbols[j] >> (bits - filled) : (vu){0};
    }
  }
}

static inline void NAME(unpack)(vu *symbols, int bits, const uint32_t *words, int64_t blocks, int64_t w) {
  vu word = {0};
  int left = 0; /* bits of the word not yet used */
  for (int j = 0; j < 32; j++) {
    vu symbol = word;
    if (left < bits) {
      word = NAME(load_words)(words, blocks, w);
      words += blocks;
      symbol |= word << left;
      word = word >> (bits - left);
      left += 32;
    } else {
      word = word >> bits;
    }
    left -= bits;
    symbols[j] = symbol;
  }
}

/* ⌊t⌋, for |t| < 2^31 */
static inline vi NAME(floor)(vf t) {
  vi below = __builtin_convertvector(t, vi);
  return below + (vi)(__builtin_convertvector(below, vf) > t);
}
