// Samples in-neighbors without replacement and numbers the nodes found: one layer of a sampled batch.
//
// Target t keeps ptr[t+1] - ptr[t] of its degree[t] edges. Floyd's algorithm draws their positions: it reads nothing of
// a row but the columns it keeps. Draws are hashes of (seed, node, step), so they depend on neither the batch nor the
// memory that holds the graph.
//
//     for each target: draw the positions of its edges
//     for each edge: read its column, number its node
//
// Called by `mpnn/kernels/edges/sample.py`, on the caller's thread.
#include "simd.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace sampling {

struct SampleNeighbors {  // mpnn/kernels/edges/sample.py has the same fields in the same order
  const int32_t *columns;              // the sources of all edges of the graph, by row
  const int64_t *first, *degree;       // [targets]: the row of each target in `columns`
  const int64_t *ptr;                  // [targets + 1]: its row in the sample
  int64_t num_targets, num_src, seed;
  int32_t *nodes;                      // [targets + E]: the targets; other nodes are appended as they are found
  int64_t *source, *destination;       // [E]: results, indices into `nodes`
  int64_t *position;                   // [E]: a result, index into `columns`
  uint64_t *table;                     // [mask + 1]: zeros; becomes a hash table of (node, index into `nodes`)
  int64_t mask;                        // a power of two minus 1, at least twice the number of nodes
  int64_t is_mapped;                   // whether `columns` is a memory map of a file
  int64_t num_nodes, bad_position;     // results; bad_position is -1, or where `columns` holds no node
};

INLINE uint64_t mix64(uint64_t x) {  // splitmix64 (Steele et al. 2014)
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

// The first of `count` ascending numbers that is at least x.
INLINE int64_t lower_bound(const int64_t *numbers, int64_t count, int64_t x) {
  int64_t from = 0;
  while (from < count) {
    const int64_t middle = (from + count) / 2;
    if (numbers[middle] < x) from = middle + 1;
    else count = middle;
  }
  return from;
}

// Writes `count` distinct numbers below `size`, ascending: every subset is as likely (Bentley and Floyd 1987).
static void draw(int64_t *numbers, int64_t count, int64_t size, uint64_t key) {
  for (int64_t drawn = 0, last = size - count; drawn < count; drawn++, last++) {
    const int64_t x = (int64_t)((unsigned __int128)mix64(key ^ (uint64_t)last) * (uint64_t)(last + 1) >> 64);
    const int64_t at = lower_bound(numbers, drawn, x);
    if (at < drawn && numbers[at] == x) {
      numbers[drawn] = last;  // exceeds all numbers drawn before
      continue;
    }
    __builtin_memmove(numbers + at + 1, numbers + at, (drawn - at) * sizeof(int64_t));
    numbers[at] = x;
  }
}

static void choose_positions(SampleNeighbors &p) {
  for (int64_t t = 0; t < p.num_targets; t++) {
    int64_t *chosen = p.position + p.ptr[t];
    const int64_t count = p.ptr[t + 1] - p.ptr[t];
    if (count < p.degree[t]) draw(chosen, count, p.degree[t], mix64((uint64_t)p.seed ^ mix64((uint64_t)p.nodes[t])));
    else for (int64_t k = 0; k < count; k++) chosen[k] = k;
    for (int64_t k = 0; k < count; k++) {
      chosen[k] += p.first[t];
      p.destination[p.ptr[t] + k] = t;
    }
  }
}

#if defined(__unix__) || defined(__APPLE__)
static int64_t page_faults() {  // of this thread, where the system tells, that had to wait for the disk
#ifdef RUSAGE_THREAD
  const auto who = RUSAGE_THREAD;
#else
  const auto who = RUSAGE_SELF;
#endif
  struct rusage usage;
  return getrusage(who, &usage) == 0 ? usage.ru_majflt : 0;
}

// Asks for all pages of a memory map that will be read, if reading some of them has to wait. A disk serves many requests
// at once; page faults come one after the other. For pages in memory, asking would take longer than reading.
static void read_ahead(const SampleNeighbors &p) {
  const int64_t num_edges = p.ptr[p.num_targets], step = num_edges / 64 + 1, before = page_faults();
  for (int64_t e = 0; e < num_edges; e += step) (void)*(const volatile int32_t *)(p.columns + p.position[e]);
  if (page_faults() == before) return;
  const uintptr_t size = (uintptr_t)sysconf(_SC_PAGESIZE);
  uintptr_t last = 0;
  for (int64_t e = 0; e < num_edges; e++) {
    const uintptr_t page = (uintptr_t)(p.columns + p.position[e]) & ~(size - 1);
    if (page != last) madvise((void *)page, size, MADV_WILLNEED);
    last = page;
  }
}
#else
static void read_ahead(const SampleNeighbors &) {}
#endif

// The index of a node in `nodes`, which is `next` for a node that is not in the table yet.
INLINE int64_t index_of(SampleNeighbors &p, int32_t node, int64_t next) {
  uint64_t slot = mix64((uint64_t)node) & (uint64_t)p.mask;
  for (; p.table[slot]; slot = (slot + 1) & (uint64_t)p.mask)
    if ((int32_t)(p.table[slot] >> 32) == node) return (int64_t)(uint32_t)p.table[slot] - 1;
  p.table[slot] = (uint64_t)(uint32_t)node << 32 | (uint64_t)(next + 1);
  return next;
}

static void run(SampleNeighbors &p) {
  choose_positions(p);
  if (p.is_mapped) read_ahead(p);
  p.num_nodes = p.num_targets;
  p.bad_position = -1;
  for (int64_t t = 0; t < p.num_targets; t++) index_of(p, p.nodes[t], t);
  const int64_t num_edges = p.ptr[p.num_targets], ahead = 32;
  for (int64_t e = 0; e < num_edges; e++) {
    if (e + ahead < num_edges) __builtin_prefetch(p.columns + p.position[e + ahead]);
    const int32_t node = p.columns[p.position[e]];
    if (node < 0 || node >= p.num_src) {
      p.bad_position = p.position[e];
      return;
    }
    p.source[e] = index_of(p, node, p.num_nodes);
    if (p.source[e] == p.num_nodes) p.nodes[p.num_nodes++] = node;
  }
}

}  // namespace sampling

extern "C" int64_t sample_neighbors_size() { return sizeof(sampling::SampleNeighbors); }
extern "C" void sample_neighbors(sampling::SampleNeighbors *p) { sampling::run(*p); }
