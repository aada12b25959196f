// Dropout of features: which elements are dropped is a hash of (row, column), so that the backward pass draws it again.
//
//     out[r, c] = x[r, c] * growth if mix(mix(key ^ r) ^ c) >> 8 reaches the threshold, else 0
//
//     for each row                            rows side by side
//         for each vector of columns
//
// Called by `mpnn/kernels/feature_dropout.py:FeatureDropout`, forward and backward.
#include "simd.h"

namespace feature_dropout {

template <class T, int N>
INLINE vec<T, N> drop(vec<T, N> x, uint32_t row_key, int64_t column, uint32_t threshold, T growth) {
  vec<uint32_t, N> columns;
  for (int n = 0; n < N; n++) columns[n] = uint32_t(column + n);
  const auto kept =
      __builtin_convertvector(mix(columns ^ row_key) >> 8 >= threshold, vec<typename bits_of<T>::type, N>);
  return kept ? x * growth : vec<T, N>{};
}

template <class T> struct FeatureDropout {  // mpnn/kernels/feature_dropout.py has the same fields in the same order
  const T *x;                              // [rows, width]
  T *out;
  int64_t rows, width, key, threshold;
  double growth;
};

template <class T> bool run(const FeatureDropout<T> &p, int64_t part, int64_t parts) {
  constexpr int N = VECTOR_BYTES / sizeof(uint32_t);  // the hash is most of the work
  for (int64_t r = p.rows * part / parts; r < p.rows * (part + 1) / parts; r++) {
    const uint32_t row_key = mix(uint32_t(p.key) ^ uint32_t(r)), threshold = p.threshold;
    const T *x = p.x + r * p.width, growth = p.growth;
    T *out = p.out + r * p.width;
    int64_t c = 0;
    for (; c + N <= p.width; c += N) store<T, N>(out + c, drop<T, N>(load<T, N>(x + c), row_key, c, threshold, growth));
    for (; c < p.width; c++) store<T, 1>(out + c, drop<T, 1>(load<T, 1>(x + c), row_key, c, threshold, growth));
  }
  return true;
}

}  // namespace feature_dropout

extern "C" int64_t feature_dropout_size() { return sizeof(feature_dropout::FeatureDropout<float>); }
KERNEL(feature_dropout_f32, feature_dropout::FeatureDropout<float>, feature_dropout::run(*p, part, parts))
KERNEL(feature_dropout_f64, feature_dropout::FeatureDropout<double>, feature_dropout::run(*p, part, parts))
