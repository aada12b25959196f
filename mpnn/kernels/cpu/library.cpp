// All CPU kernels as one library, without C++'s standard library. Built by hatch_build.py, loaded by library.py.
#include "simd.h"
#include "feature_dropout.cpp"
#include "linear_attention.cpp"
#include "row_attention.cpp"
#include "row_reduce.cpp"
#include "sort_edges.cpp"
#include "threads.cpp"
#include "tile_attention.cpp"
