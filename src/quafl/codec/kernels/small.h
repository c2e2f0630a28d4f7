/* Both codes for a vector of at most 512 coordinates, which is one block of 32 to 512 rows: a number at a time. */

static float small_norm(int rows) { /* 1/√rows */
  double norm = 1;
  for (; rows >= 4; rows /= 4) norm /= 2;
  return (float)(rows == 2 ? norm * 0.70710678118654752440 : norm);
}

static uint32_t small_hash(uint32_t key, int row) {
  uint32_t v = mix(key) + (uint32_t)row * GOLDEN; /* block 0 */
  v ^= v >> 16;
  v *= 0x7FEB352Du;
  v ^= v >> 15;
  v *= 0x846CA68Bu;
  return v;
}

static float small_dither(uint32_t hash) { return (float)(hash >> 7 & 0xFFFFFFu) * 0x1p-24f; }

static float small_flip(float value, uint32_t word) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  bits ^= word & 0x80000000u;
  memcpy(&value, &bits, 4);
  return value;
}

static float small_abs(float value) { return small_flip(value, value < 0 ? 0x80000000u : 0); }

static void small_butterflies(float *z, int rows, int half) {
  for (int i = 0; i < rows; i++)
    if (!(i & half)) {
      float upper = z[i], lower = z[i + half];
      z[i] = upper + lower;
      z[i + half] = upper - lower;
    }
}

/* R x */
static void small_rotate(const float *x, int64_t dim, int rows, uint32_t key, float *z) {
  for (int i = 0; i < rows; i++) z[i] = small_flip(i < dim ? x[i] : 0.0f, small_hash(key, i));
  for (int half = rows / 2; half; half /= 2) small_butterflies(z, rows, half);
  for (int i = 0; i < rows; i++) z[i] *= small_norm(rows);
}

/* R⁻¹ z times a scale */
static void small_rotate_back(float *z, int rows, uint32_t key, float scale, float *out, int64_t dim) {
  for (int half = 1; half < rows; half *= 2) small_butterflies(z, rows, half);
  scale *= small_norm(rows);
  for (int i = 0; i < dim; i++) out[i] = small_flip(z[i] * scale, small_hash(key, i));
}

static float small_sum(float *parts, int count) {
  for (int half = count / 2; half; half /= 2)
    for (int i = 0; i < half; i++) parts[i] += parts[i + half];
  return parts[0];
}

static void small_pack(const uint32_t *symbols, int rows, int bits, uint32_t *words) {
  uint64_t held = 0;
  int count = 0;
  for (int i = 0; i < rows; i++) {
    held |= (uint64_t)symbols[i] << count;
    for (count += bits; count >= 32; count -= 32, held >>= 32) *words++ = (uint32_t)held;
  }
}

static void small_unpack(const uint32_t *words, int rows, int bits, uint32_t *symbols) {
  uint64_t held = 0;
  int count = 0;
  for (int i = 0; i < rows; i++) {
    if (count < bits) {
      held |= (uint64_t)*words++ << count;
      count += 32;
    }
    symbols[i] = (uint32_t)held & ((1u << bits) - 1);
    held >>= bits;
    count -= bits;
  }
}

static int32_t small_floor(float t) {
  int32_t below = (int32_t)t;
  return below - ((float)below > t);
}

static int32_t small_point(float t, uint32_t hash) {
  int32_t below = small_floor(t);
  return below + ((t - (float)below) + small_dither(hash) >= 1.0f);
}

static int32_t small_nearest(float t, uint32_t hash) {
  int32_t below = small_floor(t);
  float place = (t - (float)below) + small_dither(hash);
  return below + (place >= 0.5f) + (place >= 1.5f);
}

static void small_encode(const float *x, int64_t dim, int rows, uint32_t key, float side, int bits, uint32_t *symbols,
                         uint32_t *checks, float *widest) {
  float z[512];
  uint32_t found[512], check = 0;
  int32_t most = 0;
  const float reciprocal = 1.0f / side;
  small_rotate(x, dim, rows, key, z);
  for (int i = 0; i < rows; i++) {
    float t = z[i] * reciprocal;
    uint32_t hash = small_hash(key, i);
    int32_t size;
    memcpy(&size, &t, 4);
    size &= 0x7FFFFFFF;
    if (size > most) most = size;
    if (size >= FARTHEST) t = 0;
    int32_t k = small_point(t, hash);
    check += (hash | 1u) * (uint32_t)(k >> bits);
    found[i] = (uint32_t)k & ((1u << bits) - 1);
  }
  small_pack(found, rows, bits, symbols);
  *checks = check;
  memcpy(widest, &most, 4);
}

static void small_decode(const uint32_t *symbols, const uint32_t *checks, const float *key_vector, int64_t dim,
                            int rows, uint32_t key, float side, int bits, float *out, uint8_t *failed) {
  float z[512];
  uint32_t found[512], check = 0;
  int lost = 0;
  const int32_t mask = (int32_t)((1u << bits) - 1), half = 1 << (bits - 1);
  const float reciprocal = 1.0f / side;
  small_rotate(key_vector, dim, rows, key, z);
  small_unpack(symbols, rows, bits, found);
  for (int i = 0; i < rows; i++) {
    float t = z[i] * reciprocal;
    uint32_t hash = small_hash(key, i);
    int32_t size;
    memcpy(&size, &t, 4);
    if ((size & 0x7FFFFFFF) >= FARTHEST) t = 0, lost = 1;
    int32_t first = small_nearest(t, hash) - half;
    int32_t k = first + ((int32_t)(found[i] - (uint32_t)first) & mask);
    check += (hash | 1u) * (uint32_t)(k >> bits);
    z[i] = ((float)k - small_dither(hash)) + 0.5f;
  }
  *failed = (uint8_t)(lost || check != *checks);
  small_rotate_back(z, rows, key, side, out, dim);
}

static void small_transfer(const float *x, const float *key_vector, int64_t dim, int rows, uint32_t key, float side,
                           float *out, int32_t *apart) {
  float z[512], near[512];
  const float reciprocal = 1.0f / side;
  *apart = 0;
  small_rotate(x, dim, rows, key, z);
  small_rotate(key_vector, dim, rows, key, near);
  for (int i = 0; i < rows; i++) {
    float t[2] = {z[i] * reciprocal, near[i] * reciprocal};
    int32_t size[2];
    memcpy(size, t, 8);
    for (int which = 0; which < 2; which++) size[which] = (size[which] & 0x7FFFFFFF) >= FARTHEST;
    uint32_t hash = small_hash(key, i);
    int32_t k = small_point(size[0] ? 0 : t[0], hash), off = k - small_nearest(size[1] ? 0 : t[1], hash);
    off = size[1] ? NOWHERE : off < 0 ? ~off : off;
    if (off > *apart) *apart = off;
    z[i] = ((float)k - small_dither(hash)) + 0.5f;
  }
  if (out) small_rotate_back(z, rows, key, side, out, dim);
}

static void small_encode_difference(const float *x, int64_t dim, int rows, uint32_t key, int bits, const float *curve,
                                    const float *levels, uint32_t *symbols, float *energy, float *match) {
  float z[512], parts[512];
  uint32_t found[512];
  const float most = (float)((1 << (bits - 1)) - 1);
  small_rotate(x, dim, rows, key, z);
  for (int i = 0; i < rows; i++) parts[i] = i < dim ? x[i] * x[i] : 0.0f;
  *energy = small_sum(parts, rows);
  float s = *energy * (1.0f / (float)rows), half = s * 0.5f, guess;
  int32_t raw;
  memcpy(&raw, &s, 4);
  raw = 0x5F375A86 - (raw >> 1);
  memcpy(&guess, &raw, 4);
  guess = guess * (1.5f - (half * guess) * guess);
  guess = guess * (1.5f - (half * guess) * guess);
  for (int i = 0; i < rows; i++) {
    float size = small_abs(z[i]), t = size * guess;
    float place = t * (t * (t * (t * curve[3] + curve[2]) + curve[1]) + curve[0]);
    place = place < most ? place : most;
    int32_t cell = (int32_t)place, sign;
    memcpy(&sign, &z[i], 4);
    parts[i] = size * levels[cell];
    found[i] = (uint32_t)cell | ((uint32_t)sign >> 31) << (bits - 1);
  }
  for (int group = 0; group < rows / 16; group++) parts[group] = small_sum(parts + 16 * group, 16);
  *match = small_sum(parts, rows / 16);
  small_pack(found, rows, bits, symbols);
}

static void small_decode_difference(const uint32_t *symbols, const float *scales, int64_t dim, int rows, uint32_t key,
                                    int bits, const float *levels, float *out) {
  float z[512];
  uint32_t found[512];
  small_unpack(symbols, rows, bits, found);
  for (int i = 0; i < rows; i++)
    z[i] = small_flip(levels[found[i] & ((1u << (bits - 1)) - 1)], found[i] >> (bits - 1) << 31);
  small_rotate_back(z, rows, key, *scales, out, dim);
}
