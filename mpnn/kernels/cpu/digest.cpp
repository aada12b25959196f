// A digest of numbers: whether a weight is what it was when it was packed. It reads a weight at the rate of the memory.
//
// As in XXH3, the halves of each 64 bits are multiplied with one another after a key was mixed in, and the keys differ
// by position: it is no protection against somebody who looks for two weights with the same digest.
#include "simd.h"

namespace digest {

struct Digest {  // mpnn/kernels/linear.py has the same fields in the same order
  const uint32_t *x;
  int64_t count;
  uint64_t *out;  // [parts, 8]
};

inline bool run(const Digest &p, int64_t part, int64_t parts) {
  constexpr int L = 8, SUMS = 4, STEP_64 = L * SUMS;
  constexpr uint64_t KEY = 0x9e3779b97f4a7c15, NEXT_KEY = 0xbf58476d1ce4e5b9, LOW = 0xffffffff;
  int64_t k = p.count * part / parts;
  const int64_t end = p.count * (part + 1) / parts;
  vec<uint64_t, L> sum[SUMS], key[SUMS];
  for (int n = 0; n < SUMS; n++)
    for (int l = 0; l < L; l++) sum[n][l] = 0, key[n][l] = KEY * (n * L + l + 1);
  for (; k + 2 * STEP_64 <= end; k += 2 * STEP_64)
    UNROLL for (int n = 0; n < SUMS; n++) {
      const auto x = load<uint64_t, L>((const uint64_t *)(p.x + k) + n * L), mixed = x ^ key[n];
      sum[n] += (mixed & LOW) * (mixed >> 32) + x;
      key[n] += NEXT_KEY;
    }
  for (int n = 1; n < SUMS; n++) sum[0] += sum[n] * (2 * n + 1);
  for (; k < end; k++) sum[0][k % L] = (sum[0][k % L] ^ p.x[k]) * KEY;
  store<uint64_t, L>(p.out + part * L, sum[0]);
  return true;
}

}  // namespace digest

extern "C" int64_t digest_size() { return sizeof(digest::Digest); }
KERNEL(digest_f32, digest::Digest, digest::run(*p, part, parts))
