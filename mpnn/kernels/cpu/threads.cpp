// Runs the items of a kernel side by side, each on the first thread that is free.
//
// The threads are the team of torch's own OpenMP runtime, started by its function `GOMP_parallel`. torch's workers wait
// busily for milliseconds after each of its operations; threads of our own would compete with them for the cores.
#include "simd.h"

namespace threads {

// Computes one part of one entry of a batch. False: no memory.
typedef bool (*Kernel)(const void *parameters, int64_t entry, int64_t part, int64_t parts);

// Calls `function(data)` on `count` threads and returns when all have returned. This is OpenMP's GOMP_parallel.
typedef void (*Team)(void (*function)(void *), void *data, unsigned count, unsigned flags);

struct Work {
  Kernel kernel;
  const void *parameters;
  int64_t first_entry, items, parts, next;
  bool complete;
};

static void take_items(void *data) {
  Work &work = *(Work *)data;
  for (;;) {
    const int64_t item = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED);
    if (item >= work.items) return;
    if (!work.kernel(work.parameters, work.first_entry + item / work.parts, item % work.parts, work.parts))
      __atomic_store_n(&work.complete, false, __ATOMIC_RELAXED);
  }
}

}  // namespace threads

// Runs `kernel` on each part of each of the entries; on one thread if `team` is null. False: no memory.
extern "C" bool run_parts(threads::Kernel kernel, const void *parameters, int64_t first_entry, int64_t entries,
                          int64_t parts, threads::Team team, int64_t count) {
  threads::Work work{kernel, parameters, first_entry, entries * parts, parts, 0, true};
  if (team && work.items > 1) team(threads::take_items, &work, (unsigned)count, 0);
  else threads::take_items(&work);
  return work.complete;
}
