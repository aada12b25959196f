// Runs the items of a kernel side by side, each on the first thread that is free.
//
// The threads are the team of torch's own OpenMP runtime, started by its function `GOMP_parallel` (GNU's) or
// `__kmpc_fork_call` (LLVM's and Intel's). torch's workers wait busily for milliseconds after each of its operations;
// threads of our own would compete with them for the cores.
#include "threads.h"

namespace threads {

// Computes one part of one entry of a batch. False: no memory.
typedef bool (*Kernel)(const void *parameters, int64_t entry, int64_t part, int64_t parts);

}  // namespace threads

// Runs `kernel` on each part of each of the entries; on one thread if `team` is null. `forks`: the team is a `Fork`.
// False: no memory.
extern "C" bool run_parts(threads::Kernel kernel, const void *parameters, int64_t first_entry, int64_t entries,
                          int64_t parts, void *team, bool forks, int64_t count) {
  bool complete = true;
  threads::share({team, forks, count}, entries * parts, [&](int64_t item, int64_t) {
    if (!kernel(parameters, first_entry + item / parts, item % parts, parts))
      __atomic_store_n(&complete, false, __ATOMIC_RELAXED);
  });
  return complete;
}
