// Vectors of numbers, and the functions of them that the kernels need.
//
// Everything is clang's vector extensions: one source for AVX2, AVX-512 and NEON, without intrinsics. No arithmetic
// assumes finite numbers: NaN and infinities pass through as they do in torch.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifndef VECTOR_BYTES
#define VECTOR_BYTES 32  // of a register: set by the build
#endif

#define INLINE static inline __attribute__((always_inline))
// Exports a kernel, as threads.cpp calls it: the result of an expression of its parameters `p`, for part `part` of `parts`
// of entry `b` of a batch. False: no memory.
#define KERNEL(name, Parameters, ...)                                                    \
  extern "C" bool name(const void *parameters, int64_t b, int64_t part, int64_t parts) { \
    const Parameters *p = (const Parameters *)parameters;                                \
    return __VA_ARGS__;                                                                  \
  }
#define UNROLL _Pragma("clang loop unroll(full)")  // arrays of vectors are in registers only where no loop is left

// N numbers in one value. They need no more alignment than a number.
template <class T, int N> struct vector_of {
  typedef T type __attribute__((vector_size(N * sizeof(T)), aligned(alignof(T)), may_alias));
};
template <class T, int N> using vec = typename vector_of<T, N>::type;

template <class T> struct bits_of;
template <> struct bits_of<float> {
  using type = int32_t;
  static constexpr int mantissa = 23;
  static constexpr int64_t bias = 127;
};
template <> struct bits_of<double> {
  using type = int64_t;
  static constexpr int mantissa = 52;
  static constexpr int64_t bias = 1023;
};

template <class T> constexpr T infinity() { return (T)__builtin_inf(); }

template <class T, int N> INLINE vec<T, N> splat(T x) { return vec<T, N>{} + x; }
template <class T, int N> INLINE vec<T, N> load(const T *from) { return *(const vec<T, N> *)from; }
template <class T, int N> INLINE void store(T *to, vec<T, N> x) { *(vec<T, N> *)to = x; }

// Numbers of 16 bits, which are only stored: arithmetic is in float32.
struct bfloat16 {
  uint16_t bits;  // the upper half of a float32
};
struct float16 {
  uint16_t bits;
};

// N numbers of any type as T.
template <class T, int N, class S> INLINE vec<T, N> load_as(const S *from) {
  return __builtin_convertvector((load<S, N>(from)), vec<T, N>);
}
template <class T, int N> INLINE vec<T, N> load_as(const bfloat16 *from) {
  const auto bits = __builtin_convertvector((load<uint16_t, N>(&from->bits)), vec<uint32_t, N>) << 16;
  return __builtin_convertvector((vec<float, N>)bits, vec<T, N>);
}
template <class T, int N> INLINE vec<T, N> load_as(const float16 *from) {
  return __builtin_convertvector((load<_Float16, N>((const _Float16 *)from)), vec<T, N>);
}

// Stores the numbers of a vector as another type, rounded to the nearest, ties to even.
template <class V> constexpr int count_of = sizeof(V) / sizeof(V{}[0]);
template <class S, class V> INLINE void store_as(S *to, V x) {
  constexpr int N = count_of<V>;
  store<S, N>(to, __builtin_convertvector(x, vec<S, N>));
}
template <class V> INLINE void store_as(float16 *to, V x) { store_as((_Float16 *)to, x); }
template <class V> INLINE void store_as(bfloat16 *to, V x) {
  constexpr int N = count_of<V>;
  const auto single = __builtin_convertvector(x, vec<float, N>);
  const auto bits = (vec<uint32_t, N>)single, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const auto narrow = single == single ? rounded : bits >> 16 | 0x40;  // NaN stays NaN: rounded it may be infinity or 0
  store<uint16_t, N>(&to->bits, __builtin_convertvector(narrow, vec<uint16_t, N>));
}

// The first `count` numbers, and zeros; memory behind them is not touched.
template <int N> struct mask_of {
  typedef bool type __attribute__((ext_vector_type(N)));
};
template <int N> INLINE typename mask_of<N>::type first_lanes(int64_t count) {
  vec<int32_t, N> lane;
  UNROLL for (int k = 0; k < N; k++) lane[k] = k;
  return __builtin_convertvector(lane < (int32_t)(count < N ? count : N), typename mask_of<N>::type);
}
template <class T, int N> INLINE vec<T, N> load_first(const T *from, int64_t count) {
  if (count >= N) return load<T, N>(from);
  using E = T __attribute__((ext_vector_type(N)));  // what the builtins take
  return (vec<T, N>)__builtin_masked_load(first_lanes<N>(count), from, (E)vec<T, N>{});
}
template <class T, int N> INLINE vec<T, N> load_first_as(const T *from, int64_t count) { return load_first<T, N>(from, count); }
template <class T, int N> INLINE vec<T, N> load_first_as(const bfloat16 *from, int64_t count) {
  bfloat16 copy[N] = {};
  __builtin_memcpy(copy, from, (count < N ? count : N) * sizeof(bfloat16));
  return load_as<T, N>(copy);
}
template <class T, int N> INLINE void store_first(T *to, vec<T, N> x, int64_t count) {
  if (count >= N) return store<T, N>(to, x);
  using E = T __attribute__((ext_vector_type(N)));
  __builtin_masked_store(first_lanes<N>(count), (E)x, to);
}

template <class T, int N> INLINE T sum(vec<T, N> x) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    vec<T, N / 2> low, high;
    __builtin_memcpy(&low, &x, sizeof(low));
    __builtin_memcpy(&high, (const T *)&x + N / 2, sizeof(high));
    return sum<T, N / 2>(low + high);
  }
}

// The sums of eight vectors of eight, as one vector: three rounds of adding halves, two vectors at a time.
template <class T> INLINE vec<T, 8> sums_of_eight(const vec<T, 8> *x) {
#define ADD_HALVES(a, b, ...) (__builtin_shufflevector(a, b, __VA_ARGS__))
  vec<T, 8> y[4], z[2];
  for (int p = 0; p < 4; p++)
    y[p] = ADD_HALVES(x[p], x[p + 4], 0, 1, 2, 3, 8, 9, 10, 11) + ADD_HALVES(x[p], x[p + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  for (int p = 0; p < 2; p++) {
    vec<T, 8> a = y[2 * p], b = y[2 * p + 1];
    z[p] = ADD_HALVES(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + ADD_HALVES(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  return ADD_HALVES(z[0], z[1], 0, 2, 8, 10, 4, 6, 12, 14) + ADD_HALVES(z[0], z[1], 1, 3, 9, 11, 5, 7, 13, 15);
#undef ADD_HALVES
}

// exp(x) = 2^n exp(r) with |r| <= log(2) / 2: a Taylor polynomial for exp(r), and the bits of the exponent for 2^n.
template <class T, int N> INLINE vec<T, N> exp(vec<T, N> x) {
#pragma clang fp reassociate(off)  // the order of the two subtractions below matters
  using V = vec<T, N>;
  using I = vec<typename bits_of<T>::type, N>;
  constexpr bool single = sizeof(T) == 4;
  const T low = single ? (T)-87.33654 : (T)-708.39641853226408, high = single ? (T)88.72283 : (T)709.78271289338397;
  V inside = x < low ? splat<T, N>(low) : x;
  inside = inside > high ? splat<T, N>(high) : inside;
  V n = __builtin_elementwise_rint(inside * (T)1.4426950408889634);
  n = n > (T)bits_of<T>::bias ? splat<T, N>((T)bits_of<T>::bias) : n;
  // log(2) in two parts, so that the remainder keeps all its bits
  V r = inside - n * (single ? (T)0.693145751953125 : (T)6.93147180369123816490e-01);
  r = r - n * (single ? (T)1.428606765330187e-06 : (T)1.90821492927058770002e-10);
  V p;
  if constexpr (single) {
    p = splat<T, N>((T)(1.0 / 720));
  } else {
    p = splat<T, N>((T)(1.0 / 6227020800.0));
    const T more[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720};
    for (T c : more) p = p * r + c;
  }
  const T last[] = {(T)(1.0 / 120), (T)(1.0 / 24), (T)(1.0 / 6), (T)0.5, (T)1, (T)1};
  for (T c : last) p = p * r + c;
  I exponent;
  if constexpr (single) {
    exponent = __builtin_convertvector(n, I) + 127;
  } else {  // the integer stands in the low bits of the mantissa of n + 1.5 * 2^52
    V shifted = n + (T)6755399441055744.0;
    exponent = (I)shifted + 1023;
  }
  V y = p * (V)(exponent << bits_of<T>::mantissa);
  y = x < low ? splat<T, N>(0) : y;
  return x > high ? splat<T, N>(infinity<T>()) : y;
}

template <class T> struct Exp2;  // (2^f - 1) / f on [-1/2, 1/2]
template <> struct Exp2<float> {  // the least largest relative error of 2^f, 1e-7
  static constexpr float coefficients[] = {1.326472731e-3f, 9.671512991e-3f, 5.550733581e-2f, 2.402224243e-1f,
                                           6.931470037e-1f};
};
template <> struct Exp2<double> {  // the Taylor series: log(2)^k / k!
  static constexpr double coefficients[] = {1.3691488853904128881e-12, 2.5678435993488205141e-11,
                                            4.4455382718708114976e-10, 7.0549116208011233299e-9,
                                            1.0178086009239699728e-7,  1.3215486790144309488e-6,
                                            1.5252733804059840280e-5,  1.5403530393381609954e-4,
                                            1.3333558146428443423e-3,  9.6181291076284771620e-3,
                                            5.5504108664821579953e-2,  2.4022650695910071233e-1,
                                            6.9314718055994530942e-1};
};
template <class T, int N> INLINE vec<T, N> exp2_slope(vec<T, N> f) {
  vec<T, N> slope{};
  for (T c : Exp2<T>::coefficients) slope = slope * f + c;
  return slope;
}

// 2^n power, for integers n.
template <class T, int N> INLINE vec<T, N> times_exp2(vec<T, N> power, vec<T, N> n) {
  using Ints = vec<typename bits_of<T>::type, N>;
  const auto exponent = __builtin_convertvector(__builtin_convertvector(n, vec<int32_t, N>), Ints);
  return (vec<T, N>)((Ints)power + (exponent << bits_of<T>::mantissa));
}

// 2^x for x below 128 (1024 in float64), as 2^n 2^f; beyond, the bits overflow. Exactly 0 for x = -inf.
template <class T, int N> INLINE vec<T, N> exp2_below(vec<T, N> x) {
#pragma clang fp reassociate(off)
  constexpr T LOWEST = -bits_of<T>::bias;
  x = LOWEST > x ? splat<T, N>(LOWEST) : x;  // NaN passes
  const vec<T, N> n = __builtin_elementwise_rint(x), f = x - n;
  return times_exp2<T, N>(exp2_slope<T, N>(f) * f + 1, n);  // at LOWEST, the power is 1 and the bits are all 0
}

// The same for any x: the largest numbers or infinity where 2^x exceeds all numbers.
template <class T, int N> INLINE vec<T, N> exp2_up_to(vec<T, N> x) {
  constexpr T MOST = bits_of<T>::bias + 1;
  return exp2_below<T, N>(x > MOST ? splat<T, N>(MOST) : x);
}

template <class T> constexpr T LOG2_E = T(1.4426950408889634);

// exp(x) for x below 88 (709 in float64); `exp` takes any x. Off by some |x| units in the last place, which for x < 0 is
// less than one of exp(0). Exactly 0 for x = -inf, so that a pair that is no edge weighs nothing.
template <class T, int N> INLINE vec<T, N> exp_below(vec<T, N> x) { return exp2_below<T, N>(x * LOG2_E<T>); }

// tanh(x), to a few units in the last place, small x included: a rational function near zero (Moshier's Cephes), else
// 1 - 2 / (exp(2 |x|) + 1).
template <class T, int N> INLINE vec<T, N> tanh(vec<T, N> x) {
  using V = vec<T, N>;
  V size = x < 0 ? -x : x, square = x * x;
  V top = ((T)-9.64399179425052238628e-1 * square - (T)9.92877231001918586564e1) * square - (T)1.61468768441708447952e3;
  V bottom = ((square + (T)1.12811678491632931402e2) * square + (T)2.23548839060100448583e3) * square + (T)4.84406305325125486048e3;
  V small = x + x * square * (top / bottom);
  V large = 1 - 2 / (exp<T, N>(size + size) + 1);
  large = x < 0 ? -large : large;
  return size < (T)0.625 ? small : large;
}

template <class T, int N> INLINE vec<T, N> sigmoid(vec<T, N> x) { return 1 / (1 + exp<T, N>(-x)); }

template <class T> INLINE T exp1(T x) { return exp<T, 1>(splat<T, 1>(x))[0]; }

// The largest, where NaN is passed over.
template <class V> INLINE V larger(V x, V best) { return x > best ? x : best; }

// Dropout. `mpnn/graph/rng.py` is the specification: element (row, column) of a stream is kept if the product of their
// three words is, as a signed number, at least the threshold. `dropout_keys` hold the keys of rows and of columns, then
// the words of streams.
template <class U> INLINE U mix(U x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

INLINE uint32_t dropout_word(uint32_t key, uint32_t number) { return mix(key ^ number) | 1; }

// Asks for the cache lines of `count` numbers ahead of their use.
template <class T> INLINE void prefetch(const T *from, int64_t count) {
  for (int64_t c = 0; c < count; c += 64 / (int64_t)sizeof(T)) __builtin_prefetch(from + c, 0, 3);
}
