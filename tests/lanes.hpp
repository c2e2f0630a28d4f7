// GCC's vectors of one lane as classes, so that the sanitizer, which does not look into vectors, sees every operation.
#include <cstdint>
#include <cstring>

#define restrict
#define __builtin_convertvector(value, T) T::converted(value)

struct vi;
struct vu;

template <class To, class From> To same_bits(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

struct vf {
  float v;
  vf(float value = 0) : v(value) {}
  explicit vf(vi bits);
  explicit vf(vu bits);
  static vf converted(vi value);
  float &operator[](int) { return v; }
};

struct vi {
  int32_t v;
  vi(int32_t value = 0) : v(value) {}
  explicit vi(vf value) : v(same_bits<int32_t>(value.v)) {}
  explicit vi(vu bits);
  static vi converted(vf value) { return vi((int32_t)value.v); }
  int32_t &operator[](int) { return v; }
};

struct vu {
  uint32_t v;
  vu(uint32_t value = 0) : v(value) {}
  explicit vu(vf value) : v(same_bits<uint32_t>(value.v)) {}
  explicit vu(vi value) : v((uint32_t)value.v) {}
  uint32_t &operator[](int) { return v; }
};

inline vf::vf(vi bits) : v(same_bits<float>(bits.v)) {}
inline vf::vf(vu bits) : v(same_bits<float>(bits.v)) {}
inline vf vf::converted(vi value) { return vf((float)value.v); }
inline vi::vi(vu bits) : v((int32_t)bits.v) {}

#define BINARY(T, op)                                                 \
  inline T operator op(T one, T other) { return T(one.v op other.v); } \
  inline T &operator op##=(T &one, T other) { return one = one op other; }
#define COMPARED(T, op) \
  inline vi operator op(T one, T other) { return vi(one.v op other.v ? -1 : 0); }
#define INTEGER(T) BINARY(T, +) BINARY(T, -) BINARY(T, *) BINARY(T, &) BINARY(T, |) BINARY(T, ^) BINARY(T, <<) BINARY(T, >>)
INTEGER(vi)
INTEGER(vu)
BINARY(vf, +) BINARY(vf, -) BINARY(vf, *)
COMPARED(vf, >) COMPARED(vf, >=) COMPARED(vf, <)
COMPARED(vi, >) COMPARED(vi, >=) COMPARED(vi, <)
inline vi operator~(vi one) { return vi(~one.v); }
