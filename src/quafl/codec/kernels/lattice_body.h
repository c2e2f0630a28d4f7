/* The lattice kernel for one width of vectors; included by lattice.c once per instruction set, with LANES and NAME set.
 *
 * LANES blocks are worked on side by side, a block a lane: a tile of 1024 rows. Rows of a tile lie W floats apart in the
 * vector, so that every access to memory is LANES consecutive floats. Butterflies go from distance 512 down to 1, which
 * leaves the last four stages, the quantization and the packing to 16 neighbouring rows in registers; on the way back
 * they go from 1 up. Additions and multiplications are never fused: all kernels get the same lattice points.
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

/* The first six stages of R x, and the hashes of all rows. */
static inline void NAME(rotate_coarse)(const float *x, int64_t dim, int64_t blocks, int64_t w, vu keys,
                                       vf *restrict tile, vu *restrict hashes) {
  for (int j = 0; j < 128; j++) {
    vf z[8];
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
      int row = 128 * i + j;
      vu h = NAME(hash)(keys, row);
      vf value = NAME(load_row)(x, dim, blocks, w, row);
      __builtin_prefetch(x + (int64_t)row * blocks + w + 2 * LANES, 0, 2);
      hashes[row] = h;
      z[i] = (vf)((vu)value ^ (h & 0x80000000u));
    }
    DOWN(8, z)
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) tile[128 * i + j] = z[i];
  }
  for (int top = 0; top < 1024; top += 128)
    for (int j = 0; j < 16; j++) {
      vf z[8];
      _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) z[i] = tile[top + 16 * i + j];
      DOWN(8, z)
      _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) tile[top + 16 * i + j] = z[i];
    }
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

static void NAME(encode)(const float *x, int64_t dim, int64_t blocks, uint32_t key, float side, int bits,
                         uint32_t *symbols, uint32_t *checks, float *widest) {
  vf tile[1024] __attribute__((aligned(64)));
  vu hashes[1024] __attribute__((aligned(64)));
  const float reciprocal = 1.0f / side;
  const uint32_t mask = (1u << bits) - 1;
  vi most = {0};
  for (int64_t w = 0; w < blocks; w += LANES) {
    NAME(rotate_coarse)(x, dim, blocks, w, NAME(block_keys)(key, w), tile, hashes);
    vu check = {0}, group[32];
    for (int top = 0; top < 1024; top += 16) {
      vf z[16];
      _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) z[i] = tile[top + i];
      DOWN(16, z)
      _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) {
        vf t = z[i] * 0.03125f * reciprocal;
        vi size = (vi)t & 0x7FFFFFFF;
        vi more = size > most;
        most = (size & more) | (most & ~more);
        t = (vf)((vi)t & (size < FARTHEST));
        vu h = hashes[top + i];
        vi below = NAME(floor)(t);
        vi k = below - (vi)((t - __builtin_convertvector(below, vf)) + NAME(dither)(h) >= 1.0f);
        check += (h | 1u) * (vu)(k >> bits);
        group[(top & 16) + i] = (vu)k & mask;
      }
      if (top & 16) NAME(pack)(group, bits, symbols + (top / 32) * bits * blocks + w, blocks, w);
    }
    NAME(store_words)(checks + w, blocks, w, check);
  }
  int32_t top = 0;
  for (int lane = 0; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;
  memcpy(widest, &top, 4);
}

static int64_t NAME(decode)(const uint32_t *symbols, const uint32_t *checks, const float *key_vector, int64_t dim,
                            int64_t blocks, uint32_t key, float side, int bits, float *out, uint8_t *failed) {
  vf tile[1024] __attribute__((aligned(64)));
  vu hashes[1024] __attribute__((aligned(64)));
  const float reciprocal = 1.0f / side;
  const float scale = side * 0.03125f;
  const int32_t mask = (int32_t)((1u << bits) - 1);
  const float half = (float)(1u << (bits - 1));
  int64_t failures = 0;
  for (int64_t w = 0; w < blocks; w += LANES) {
    NAME(rotate_coarse)(key_vector, dim, blocks, w, NAME(block_keys)(key, w), tile, hashes);
    vu check = {0}, group[32];
    vi lost = {0};
    for (int top = 0; top < 1024; top += 16) {
      if (!(top & 16)) NAME(unpack)(group, bits, symbols + (top / 32) * bits * blocks + w, blocks, w);
      vf z[16];
      _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) z[i] = tile[top + i];
      DOWN(16, z)
      _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) {
        vf t = z[i] * 0.03125f * reciprocal;
        vi far = ((vi)t & 0x7FFFFFFF) >= FARTHEST;
        lost |= far;
        t = (vf)((vi)t & ~far);
        vu h = hashes[top + i];
        vi below = NAME(floor)(t);
        vf offset = (t - __builtin_convertvector(below, vf)) + NAME(dither)(h) - 0.5f;
        vi further = offset >= 0.5f; /* -1 where true */
        vi cell = below - further;
        offset += __builtin_convertvector(further, vf);
        vi ahead = (vi)(group[(top & 16) + i] - (vu)cell) & mask;
        vi beyond = __builtin_convertvector(ahead, vf) - offset > half;
        ahead -= beyond & (mask + 1);
        check += (h | 1u) * (vu)((cell + ahead) >> bits);
        z[i] = __builtin_convertvector(ahead, vf) - offset;
      }
      UP(16, z)
      _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) tile[top + i] = z[i];
    }
    vu expected = NAME(load_words)(checks + w, blocks, w);
    for (int lane = 0; lane < LANES && w + lane < blocks; lane++) {
      failed[w + lane] = lost[lane] || check[lane] != expected[lane];
      failures += failed[w + lane];
    }
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
        vf moved = (vf)((vu)(z[i] * scale) ^ (hashes[row] & 0x80000000u));
        NAME(store_row)(out, dim, blocks, w, row, NAME(load_row)(key_vector, dim, blocks, w, row) + moved);
      }
    }
  }
  return failures;
}

#undef vf
#undef vi
#undef vu
#undef DOWN
#undef UP
#undef BUTTERFLY
