// All CPU kernels as one library, without C++'s standard library. Built by hatch_build.py, loaded by library.py.
#include "simd.h"
#include "tile_attention.cpp"
