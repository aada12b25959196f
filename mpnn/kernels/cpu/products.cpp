// The two products of a tile of attention, in the cache and nothing else: the rate that kernels made of them can reach.
// `python -m benchmarks` measures them beside attention.
#include "products.h"

namespace products {

struct Products {  // benchmarks/machine.py has the same fields in the same order
  int64_t tiles, rows, columns, width;
  float *memory;  // [parts, 2 * columns * width + 2 * rows * width + rows * columns]
};

inline bool run(const Products &p, int64_t part, int64_t parts) {
  const int64_t rows = p.rows, columns = p.columns, width = p.width;
  float *k = p.memory + part * (2 * columns * width + 2 * rows * width + rows * columns);
  float *v = k + columns * width, *q = v + columns * width, *out = q + rows * width, *s = out + rows * width;
  constexpr int ROW_STEP = VECTOR_BYTES == 64 ? 8 : 4;  // as in tile_attention.cpp
  for (int64_t tile = p.tiles * part / parts; tile < p.tiles * (part + 1) / parts; tile++) {
    product<STEP, false, float>({k, width}, {q, rows}, {s, rows}, columns, width, rows);
    product<ROW_STEP, true, float>({s, 1, rows}, {v, width}, {out, width}, rows, columns, width);
  }
  return true;
}

}  // namespace products

extern "C" int64_t products_size() { return sizeof(products::Products); }
KERNEL(products_f32, products::Products, products::run(*p, part, parts))
