// The threads of torch's own OpenMP runtime, which share the items of a kernel.
#pragma once
#include "simd.h"

namespace threads {

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

static const Location LOCATION = {0, 2, {0, 0}, ";mpnn;run_parts;0;0;;"};  // 2: in the form that compilers write

// The address of a `Team` or, if `forks`, of a `Fork`, and the number of its threads. A null team is the caller alone.
struct Crew {
  void *team;
  int64_t forks, count;
};

template <class F> struct Work {
  F *function;
  int64_t items, members, joined, next;
};

template <class F> void take_items(void *data) {
  Work<F> &work = *(Work<F> *)data;
  const int64_t member = __atomic_fetch_add(&work.joined, 1, __ATOMIC_RELAXED);
  if (member >= work.members) return;
  for (;;) {
    const int64_t item = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED);
    if (item >= work.items) return;
    (*work.function)(item, member);
  }
}

template <class F> void take_items_of(int32_t *, int32_t *, void *data) { take_items<F>(data); }

// Calls `function(item, member)` for each item, on the first thread that is free. `member` is the number of this thread,
// below the crew's count. Returns when all items are done.
template <class F> void share(const Crew &crew, int64_t items, F function) {
  Work<F> work{&function, items, crew.team ? crew.count : 1, 0, 0};
  if (!crew.team || items < 2) take_items<F>(&work);
  else if (crew.forks) ((Fork)crew.team)(&LOCATION, 1, take_items_of<F>, &work);
  else ((Team)crew.team)(take_items<F>, &work, (unsigned)crew.count, 0);
}

}  // namespace threads
