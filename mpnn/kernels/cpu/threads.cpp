// Runs the items of a kernel side by side, each on the first thread that is free.
//
// The threads are the team of torch's own OpenMP runtime, started by its function `GOMP_parallel` (GNU's) or
// `__kmpc_fork_call` (LLVM's and Intel's). torch's workers wait busily for milliseconds after each of its operations;
// threads of our own would compete with them for the cores.
#include "simd.h"

namespace threads {

// Computes one part of one entry of a batch. False: no memory.
typedef bool (*Kernel)(const void *parameters, int64_t entry, int64_t part, int64_t parts);

// Calls `function(data)` on `count` threads and returns when all have returned. This is OpenMP's GOMP_parallel.
typedef void (*Team)(void (*function)(void *), void *data, unsigned count, unsigned flags);

// Calls `function(&thread, &thread_of_team, data)` on as many threads as torch uses. This is __kmpc_fork_call, whose last
// arguments are variadic: on macOS arm64 they are passed in another way than named ones.
struct Location {  // ident_t of LLVM's kmp.h
  int32_t reserved, flags, more[2];
  const char *source;
};
typedef void (*Function)(int32_t *thread, int32_t *thread_of_team, void *data);
typedef void (*Fork)(const Location *location, int32_t arguments, Function function, ...);

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

static void take_items_of(int32_t *, int32_t *, void *data) { take_items(data); }

static const Location LOCATION = {0, 2, {0, 0}, ";mpnn;run_parts;0;0;;"};  // 2: in the form that compilers write

}  // namespace threads

// Runs `kernel` on each part of each of the entries; on one thread if `team` is null. `forks`: the team is a `Fork`.
// False: no memory.
extern "C" bool run_parts(threads::Kernel kernel, const void *parameters, int64_t first_entry, int64_t entries,
                          int64_t parts, void *team, bool forks, int64_t count) {
  using namespace threads;
  Work work{kernel, parameters, first_entry, entries * parts, parts, 0, true};
  if (!team || work.items < 2) take_items(&work);
  else if (forks) ((Fork)team)(&LOCATION, 1, take_items_of, &work);
  else ((Team)team)(take_items, &work, (unsigned)count, 0);
  return work.complete;
}
