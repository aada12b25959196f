// Sorts the edges of a graph by row: a stable counting sort.
//
//     ptr[r] = the number of edges in rows below r          edge[k] = the k-th edge in the order of (row, number)
//
// Edges that are in this order already are counted only.
//
//     for each edge: count its row                and whether it comes before the edge before it
//     for each row: where it begins
//     for each edge: put it behind those of its row
//
// Called by `mpnn/kernels/edges/sort.py`, on the caller's thread.
#include "simd.h"

namespace sorting {

template <typename Node>  // int32_t or int64_t
struct SortEdges {  // mpnn/kernels/edges/sort.py has the same fields in the same order
  const Node *row, *col;             // [E]: the two ends of each edge, 0 <= row < num_rows
  int64_t num_edges, num_rows;
  int64_t *ptr;                      // [num_rows + 1]
  int64_t *edge;                     // [E]: this and sorted_col are not written if the edges are sorted already
  int32_t *sorted_col;               // [E]: there are fewer than 2^31 columns
  int64_t is_sorted;                 // a result
};

template <typename Node> static void count(SortEdges<Node> &p) {
  __builtin_memset(p.ptr, 0, (p.num_rows + 1) * sizeof(int64_t));
  int64_t before = 0, descents = 0;
  for (int64_t e = 0; e < p.num_edges; e++) {
    p.ptr[p.row[e] + 1]++;
    descents += p.row[e] < before;
    before = p.row[e];
  }
  for (int64_t r = 0; r < p.num_rows; r++) p.ptr[r + 1] += p.ptr[r];
  p.is_sorted = descents == 0;
}

template <typename Node> static void run(SortEdges<Node> &p) {
  count(p);
  if (p.is_sorted) return;
  for (int64_t e = 0; e < p.num_edges; e++) {
    const int64_t at = p.ptr[p.row[e]]++;  // ends as the beginning of the next row
    p.edge[at] = e;
    p.sorted_col[at] = (int32_t)p.col[e];
  }
  __builtin_memmove(p.ptr + 1, p.ptr, p.num_rows * sizeof(int64_t));
  p.ptr[0] = 0;
}

}  // namespace sorting

extern "C" int64_t sort_edges_size() { return sizeof(sorting::SortEdges<int64_t>); }
extern "C" void sort_edges(sorting::SortEdges<int64_t> *p) { sorting::run(*p); }
extern "C" void sort_edges_i32(sorting::SortEdges<int32_t> *p) { sorting::run(*p); }
