/* The lattice for one width of vectors: see tile.h. */

/* The first six stages of R x, and the hashes of all rows where they are kept. */
static inline void NAME(rotate_coarse)(const float *x, int64_t dim, int64_t blocks, int64_t w, vu keys,
                                       vf *restrict tile, vu *restrict hashes) {
  for (int j = 0; j < 128; j++) {
    vf z[8];
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
      int row = 128 * i + j;
      vu h = NAME(hash)(keys, row);
      vf value = NAME(load_row)(x, dim, blocks, w, row);
      __builtin_prefetch(x + (int64_t)row * blocks + w + 2 * LANES, 0, 2);
      if (KEEPS_HASHES) hashes[row] = h;
      z[i] = (vf)((vu)value ^ (h & 0x80000000u));
    }
    DOWN(8, z)
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) tile[128 * i + j] = z[i];
  }
  NAME(rotate_middle)(tile);
}

/* The lattice point of t: ⌊t⌋ + [frac(t) + u ≥ 1]. */
static inline vi NAME(point)(vf t, vu hash) {
  vi below = NAME(floor)(t);
  return below - (vi)((t - __builtin_convertvector(below, vf)) + NAME(dither)(hash) >= 1.0f);
}

/* The one that is nearest to a key at t, which lies at ⌊t⌋ + place − ½. */
static inline vi NAME(nearest)(vf t, vu hash) {
  vi below = NAME(floor)(t);
  vf place = (t - __builtin_convertvector(below, vf)) + NAME(dither)(hash);
  return below - (vi)(place >= 0.5f) - (vi)(place >= 1.5f);
}

/* What a point stands for, in cells. */
static inline vf NAME(center)(vi k, vu hash) { return (__builtin_convertvector(k, vf) - NAME(dither)(hash)) + 0.5f; }

static void NAME(encode)(const float *x, int64_t dim, int64_t blocks, uint32_t key, float side, int bits,
                         uint32_t *symbols, uint32_t *checks, float *widest) {
  vf tile[1024] __attribute__((aligned(64)));
  vu hashes[KEEPS_HASHES ? 1024 : 1] __attribute__((aligned(64)));
  const float reciprocal = 1.0f / side;
  const uint32_t mask = (1u << bits) - 1;
  vi most = {0};
  for (int64_t w = 0; w < blocks; w += LANES) {
    const vu keys = NAME(block_keys)(key, w);
    NAME(rotate_coarse)(x, dim, blocks, w, keys, tile, hashes);
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
        vu h = NAME(hash_again)(hashes, keys, top + i);
        vi k = NAME(point)(t, h);
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

static void NAME(decode)(const uint32_t *symbols, const uint32_t *checks, const float *key_vector, int64_t dim,
                            int64_t blocks, uint32_t key, float side, int bits, float *out, uint8_t *failed) {
  vf tile[1024] __attribute__((aligned(64)));
  vu hashes[KEEPS_HASHES ? 1024 : 1] __attribute__((aligned(64)));
  const float reciprocal = 1.0f / side;
  const float scale = side * 0.03125f;
  const int32_t mask = (int32_t)((1u << bits) - 1);
  const int32_t half = 1 << (bits - 1);
  for (int64_t w = 0; w < blocks; w += LANES) {
    const vu keys = NAME(block_keys)(key, w);
    NAME(rotate_coarse)(key_vector, dim, blocks, w, keys, tile, hashes);
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
        vu h = NAME(hash_again)(hashes, keys, top + i);
        vi first = NAME(nearest)(t, h) - half; /* of the 2^b points around the key */
        vi k = first + ((vi)(group[(top & 16) + i] - (vu)first) & mask);
        check += (h | 1u) * (vu)(k >> bits);
        z[i] = NAME(center)(k, h);
      }
      UP(16, z)
      _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) tile[top + i] = z[i];
    }
    vu expected = NAME(load_words)(checks + w, blocks, w);
    for (int lane = 0; lane < LANES && w + lane < blocks; lane++)
      failed[w + lane] = lost[lane] || check[lane] != expected[lane];
    NAME(rotate_back_and_store)(tile, hashes, keys, (vf){0} + scale, out, dim, blocks, w);
  }
}

static void NAME(transfer)(const float *x, const float *key_vector, int64_t dim, int64_t blocks, uint32_t key,
                           float side, float *out, int32_t *apart) {
  vf tile[1024] __attribute__((aligned(64)));
  vi points[1024] __attribute__((aligned(64)));
  vu hashes[KEEPS_HASHES ? 1024 : 1] __attribute__((aligned(64)));
  const float reciprocal = 1.0f / side;
  const float scale = side * 0.03125f;
  for (int64_t w = 0; w < blocks; w += LANES) {
    const vu keys = NAME(block_keys)(key, w);
    vi most = {0};
    for (int which = 0; which < 2; which++) {
      NAME(rotate_coarse)(which ? key_vector : x, dim, blocks, w, keys, tile, hashes);
      for (int top = 0; top < 1024; top += 16) {
        vf z[16];
        _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) z[i] = tile[top + i];
        DOWN(16, z)
        _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) {
          vf t = z[i] * 0.03125f * reciprocal;
          vi far = ((vi)t & 0x7FFFFFFF) >= FARTHEST;
          t = (vf)((vi)t & ~far);
          vu h = NAME(hash_again)(hashes, keys, top + i);
          if (!which) {
            points[top + i] = NAME(point)(t, h);
          } else {
            vi off = points[top + i] - NAME(nearest)(t, h);
            off = ((off ^ (off >> 31)) & ~far) | (far & NOWHERE);
            vi more = off > most;
            most = (off & more) | (most & ~more);
            z[i] = NAME(center)(points[top + i], h);
          }
        }
        if (which && out) {
          UP(16, z)
          _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) tile[top + i] = z[i];
        }
      }
    }
    NAME(store_words)((uint32_t *)apart + w, blocks, w, (vu)most);
    if (out) NAME(rotate_back_and_store)(tile, hashes, keys, (vf){0} + scale, out, dim, blocks, w);
  }
}
