/* The difference code for one width of vectors: see tile.h. */

/* Two halves first, then theirs: the order in which all kernels add up. */
static inline vf NAME(sum)(vf *parts, int count) {
  for (int half = count / 2; half; half /= 2)
    for (int i = 0; i < half; i++) parts[i] += parts[i + half];
  return parts[0];
}

/* 1/√s to five digits, by products and sums alone. */
static inline vf NAME(inverse_root)(vf s) {
  vf guess = (vf)(0x5F375A86 - ((vi)s >> 1)), half = s * 0.5f;
  guess = guess * (1.5f - (half * guess) * guess);
  return guess * (1.5f - (half * guess) * guess);
}

/* Levels, also as vectors of them. */
struct NAME(table) {
  const float *all;
  vf part[LANES > 4 ? 128 / LANES : 1];
  int parts;
};

static inline struct NAME(table) NAME(table_of)(const float *levels, int count) {
  struct NAME(table) made;
  made.all = levels;
  made.parts = (count + LANES - 1) / LANES;
  for (int i = 0; i < 128 && LANES > 4; i++) made.part[i / LANES][i % LANES] = i < count ? levels[i] : 0.0f;
  return made;
}

/* The levels of some cells: chosen from vectors where that takes few steps, else fetched from memory. */
static inline vf NAME(level)(const struct NAME(table) *table, vi cell) {
#if defined(__GNUC__) && !defined(__clang__) && LANES > 4
  if (table->parts == 1) return __builtin_shuffle(table->part[0], cell);
  if (table->parts <= 8) {
    vf found = __builtin_shuffle(table->part[0], table->part[1], cell);
    for (int pair = 2; pair < table->parts; pair += 2) {
      vf other = __builtin_shuffle(table->part[pair], table->part[pair + 1], cell);
      vi mine = cell >= pair * LANES;
      found = (vf)(((vi)other & mine) | ((vi)found & ~mine));
    }
    return found;
  }
#endif
  vf found;
  for (int lane = 0; lane < LANES; lane++) found[lane] = table->all[cell[lane]];
  return found;
}

static void NAME(encode_difference)(const float *x, int64_t dim, int64_t blocks, uint32_t key, int bits,
                                    const float *curve, const float *levels, uint32_t *symbols, float *energies,
                                    float *matches) {
  vf tile[1024] __attribute__((aligned(64))), parts[128];
  const int count = 1 << (bits - 1);
  const struct NAME(table) table = NAME(table_of)(levels, count);
  const vf most = (vf){0} + (float)(count - 1);
  const float a = curve[0], b = curve[1], c = curve[2], d = curve[3];
  for (int64_t w = 0; w < blocks; w += LANES) {
    const vu keys = NAME(block_keys)(key, w);
    for (int j = 0; j < 128; j++) {
      vf z[8], square[8];
      _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
        int row = 128 * i + j;
        vf value = NAME(load_row)(x, dim, blocks, w, row);
        __builtin_prefetch(x + (int64_t)row * blocks + w + 2 * LANES, 0, 2);
        square[i] = value * value;
        z[i] = (vf)((vu)value ^ (NAME(hash)(keys, row) & 0x80000000u));
      }
      parts[j] = ((square[0] + square[4]) + (square[2] + square[6])) + ((square[1] + square[5]) + (square[3] + square[7]));
      DOWN(8, z)
      _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) tile[128 * i + j] = z[i];
    }
    const vf energy = NAME(sum)(parts, 128), inverse = NAME(inverse_root)(energy * (1.0f / 1024));
    NAME(rotate_middle)(tile);
    vu group[32];
    for (int top = 0; top < 1024; top += 16) {
      vf z[16], found[16];
      vi cells[16];
      _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) z[i] = tile[top + i];
      DOWN(16, z)
      _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) {
        vf value = z[i] * 0.03125f;
        vf size = (vf)((vi)value & 0x7FFFFFFF);
        vf t = size * inverse;
        vf place = t * (t * (t * (t * d + c) + b) + a);
        cells[i] = __builtin_convertvector(NAME(least)(place, most), vi);
        found[i] = size;
        group[(top & 16) + i] = (vu)cells[i] | ((vu)value >> 31) << (bits - 1);
      }
      for (int i = 0; i < 16; i++) found[i] *= NAME(level)(&table, cells[i]);
      parts[top / 16] = NAME(sum)(found, 16);
      if (top & 16) NAME(pack)(group, bits, symbols + (top / 32) * bits * blocks + w, blocks, w);
    }
    NAME(store_words)((uint32_t *)energies + w, blocks, w, (vu)energy);
    NAME(store_words)((uint32_t *)matches + w, blocks, w, (vu)NAME(sum)(parts, 64));
  }
}

static void NAME(decode_difference)(const uint32_t *symbols, const float *scales, int64_t dim, int64_t blocks,
                                    uint32_t key, int bits, const float *levels, float *out) {
  vf tile[1024] __attribute__((aligned(64)));
  const int cells = 1 << (bits - 1);
  const struct NAME(table) table = NAME(table_of)(levels, cells);
  for (int64_t w = 0; w < blocks; w += LANES) {
    vu group[32];
    for (int top = 0; top < 1024; top += 16) {
      if (!(top & 16)) NAME(unpack)(group, bits, symbols + (top / 32) * bits * blocks + w, blocks, w);
      vf z[16];
      _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) {
        vu symbol = group[(top & 16) + i];
        vf level = NAME(level)(&table, (vi)(symbol & (uint32_t)(cells - 1)));
        z[i] = (vf)((vu)level ^ ((symbol >> (bits - 1)) << 31));
      }
      UP(16, z)
      _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) tile[top + i] = z[i];
    }
    const vf scale = (vf)NAME(load_words)((const uint32_t *)scales + w, blocks, w) * 0.03125f;
    NAME(rotate_back_and_store)(tile, 0, NAME(block_keys)(key, w), scale, out, dim, blocks, w);
  }
}
