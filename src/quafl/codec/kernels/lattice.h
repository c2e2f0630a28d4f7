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
        vi below = NAME(floor)(t);
        vf place = (t - __builtin_convertvector(below, vf)) + NAME(dither)(h); /* the key's: below + place − ½ */
        vi first = below - (vi)(place >= 0.5f) - (vi)(place >= 1.5f) - half; /* of the 2^b points around it */
        vi k = first + ((vi)(group[(top & 16) + i] - (vu)first) & mask);
        check += (h | 1u) * (vu)(k >> bits);
        z[i] = (__builtin_convertvector(k, vf) - NAME(dither)(h)) + 0.5f;
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
