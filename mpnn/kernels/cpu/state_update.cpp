// One token of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), with the state [values, keys] of transformers' caches, in place:
//
//     dt = softplus(dt' + b)      S = exp(dt A) S + (dt x) B^T      out = (S C + D x) silu(z)
//
// One pass over the state. A row of it is read and written in whole vectors, of which the last may be cut off.
//
//     for each head of a batch entry              side by side
//         for each row of the state
//             for each vector of its columns
//
// Called by `mpnn/kernels/recurrent/state.py`, a step of decoding.
#include "simd.h"

namespace state_update {
namespace {

struct StateUpdate {  // mpnn/kernels/recurrent/state.py has the same fields in the same order
  int64_t batch, heads, groups, values, keys;
  float *state;                               // [B, H, values, keys]
  const float *x, *z;                         // [B, H, values]; z may be null
  const float *dt, *A, *bias, *D;             // [B, H], [H], [H] or null, [H] or null
  const float *B, *C;                         // [B, groups, keys]
  float *out;                                 // [B, H, values]
  int64_t softplus;
};

// Part `part` of the heads of entry b.
bool update(const StateUpdate &p, int64_t b, int64_t part, int64_t parts) {
  constexpr int L = VECTOR_BYTES / sizeof(float);
  for (int64_t h = p.heads * part / parts; h < p.heads * (part + 1) / parts; h++) {
    const int64_t at = b * p.heads + h, group = (b * p.groups + h / (p.heads / p.groups)) * p.keys;
    float dt = p.dt[at] + (p.bias ? p.bias[h] : 0);
    if (p.softplus && dt <= 20) dt = (float)__builtin_log1p(__builtin_exp(dt));
    const float gate = (float)__builtin_exp((double)dt * p.A[h]);
    const float *B = p.B + group, *C = p.C + group;
    for (int64_t v = 0; v < p.values; v++) {
      float *row = p.state + (at * p.values + v) * p.keys;
      const float x = p.x[at * p.values + v], dx = dt * x;
      vec<float, L> sums = {};
      for (int64_t k = 0; k < p.keys; k += L) {
        const int64_t left = p.keys - k;
        const auto s = gate * load_first<float, L>(row + k, left) + dx * load_first<float, L>(B + k, left);
        store_first<float, L>(row + k, s, left);
        sums += s * load_first<float, L>(C + k, left);
      }
      float out = sum<float, L>(sums) + (p.D ? p.D[h] * x : 0);
      if (p.z) {
        const float z = p.z[at * p.values + v];
        out *= z / (1 + (float)__builtin_exp(-(double)z));
      }
      p.out[at * p.values + v] = out;
    }
  }
  return true;
}

}  // namespace
}  // namespace state_update

KERNEL(state_update_f32, state_update::StateUpdate, state_update::update(*p, b, part, parts))
