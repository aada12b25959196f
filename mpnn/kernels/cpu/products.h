// Products of matrices that lie in the cache, and what else the kernels made of them share: transposition, and memory.
#pragma once
#include "simd.h"

#define NOINLINE __attribute__((noinline))

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that a product holds in registers, for two vectors of columns.
constexpr int STEP = VECTOR_BYTES == 64 ? 12 : 6;

template <class T> struct Matrix {  // element (r, c) is data[r * row + c * column]
  T *data;
  int64_t row, column = 1;
};

// C [R, N vectors of L numbers] = A [R, depth] B [depth, ...], or added, with C in registers.
template <int L, int R, int N, bool ADD, class T>
INLINE void product_block(Matrix<const T> A, Matrix<const T> B, Matrix<T> C, int64_t depth) {
  vec<T, L> sum[R][N];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int n = 0; n < N; n++) sum[r][n] = ADD ? ::load<T, L>(C.data + r * C.row + n * L) : vec<T, L>{};
  for (int64_t k = 0; k < depth; k++)
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int n = 0; n < N; n++)
        sum[r][n] += A.data[r * A.row + k * A.column] * ::load<T, L>(B.data + k * B.row + n * L);
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int n = 0; n < N; n++) ::store<T, L>(C.data + r * C.row + n * L, sum[r][n]);
}

// The same for any number of rows, in blocks of R.
template <int L, int R, int N, bool ADD, class T>
INLINE void product_columns(Matrix<const T> A, Matrix<const T> B, Matrix<T> C, int64_t rows, int64_t depth) {
  for (; rows >= R; rows -= R, A.data += R * A.row, C.data += R * C.row) product_block<L, R, N, ADD>(A, B, C, depth);
  for (; rows > 0; rows--, A.data += A.row, C.data += C.row) product_block<L, 1, N, ADD>(A, B, C, depth);
}

// C [rows, width] = A [rows, depth] B [depth, width], or added, in blocks of R rows and two vectors. Rows of B and C
// are contiguous, and their width is a multiple of 8.
template <int R, bool ADD, class T>
NOINLINE void product(Matrix<const T> A, Matrix<const T> B, Matrix<T> C, int64_t rows, int64_t depth, int64_t width) {
  constexpr int L = VECTOR_BYTES / sizeof(T);
  for (; width >= 2 * L; width -= 2 * L, B.data += 2 * L, C.data += 2 * L)
    product_columns<L, R, 2, ADD>(A, B, C, rows, depth);
  for (; width >= L; width -= L, B.data += L, C.data += L) product_columns<L, R, 1, ADD>(A, B, C, rows, depth);
  if constexpr (L > 8)
    if (width) product_columns<8, R, 1, ADD>(A, B, C, rows, depth);
}

// Transposes a square of 8 x 8 numbers: each round moves one bit of the row's number to the column's.
template <class T> INLINE void transpose(vec<T, 8> *x) {
  UNROLL for (int round = 0; round < 3; round++) {
    vec<T, 8> y[8];
    UNROLL for (int r = 0; r < 4; r++) {
      y[2 * r] = __builtin_shufflevector(x[r], x[r + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      y[2 * r + 1] = __builtin_shufflevector(x[r], x[r + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    UNROLL for (int r = 0; r < 8; r++) x[r] = y[r];
  }
}

// Each quarter, of four numbers, of a vector from the same quarters of `a` (numbers 0 to 3) and of `b` (4 to 7).
template <int I, int J, int K, int M, int L> INLINE vec<float, L> in_quarters(vec<float, L> a, vec<float, L> b) {
#define NUMBER(q, i) (i < 4 ? 4 * q + i : L + 4 * q + i - 4)
#define QUARTER(q) NUMBER(q, I), NUMBER(q, J), NUMBER(q, K), NUMBER(q, M)
  if constexpr (L == 8) return __builtin_shufflevector(a, b, QUARTER(0), QUARTER(1));
  else return __builtin_shufflevector(a, b, QUARTER(0), QUARTER(1), QUARTER(2), QUARTER(3));
#undef QUARTER
#undef NUMBER
}

// Loads four numbers of each of L rows, 8 or 16, as four vectors across the rows; `row(i)` is where row i begins. Quarters
// of vectors are joined as they are loaded, so that no number crosses a quarter: a square of 8 x 8 takes 16 shuffles,
// where `transpose` takes 48.
template <int L, class F> INLINE void load_across(F row, vec<float, L> *to) {
  vec<float, L> x[4];
  UNROLL for (int i = 0; i < 4; i++) {
    const auto half = [&](int r) {
      return __builtin_shufflevector((load<float, 4>(row(r))), (load<float, 4>(row(r + 4))), 0, 1, 2, 3, 4, 5, 6, 7);
    };
    if constexpr (L == 8) x[i] = half(i);
    else x[i] = __builtin_shufflevector(half(i), half(i + 8), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  }
  const vec<float, L> low01 = in_quarters<0, 4, 1, 5, L>(x[0], x[1]), high01 = in_quarters<2, 6, 3, 7, L>(x[0], x[1]);
  const vec<float, L> low23 = in_quarters<0, 4, 1, 5, L>(x[2], x[3]), high23 = in_quarters<2, 6, 3, 7, L>(x[2], x[3]);
  to[0] = in_quarters<0, 1, 4, 5, L>(low01, low23);
  to[1] = in_quarters<2, 3, 6, 7, L>(low01, low23);
  to[2] = in_quarters<0, 1, 4, 5, L>(high01, high23);
  to[3] = in_quarters<2, 3, 6, 7, L>(high01, high23);
}

// The memory of a call, in pieces that begin at cache lines.
class Memory {
  static constexpr int64_t LINE = 64;
  char *start, *next;

public:
  explicit Memory(int64_t bytes, int64_t pieces)
      : start((char *)__builtin_malloc(bytes + (pieces + 1) * LINE)), next(start) {}
  ~Memory() { __builtin_free(start); }
  explicit operator bool() const { return start; }
  template <class T> T *take(int64_t count) {
    next += -(uintptr_t)next % LINE;
    T *piece = (T *)next;
    next += count * sizeof(T);
    return piece;
  }
};
