// Runs recorded calls of kernels again, by a library for another processor, under an emulator: without Python and torch.
//
//     replay LIBRARY CALLS RESULTS
//
// CALLS is written by tests/support/kernel_calls.py: of each call the name of the kernel, its parameters, and all memory
// that they point to. RESULTS gets this memory as the kernels leave it.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef bool (*Kernel)(const void *parameters, int64_t entry, int64_t part, int64_t parts);

struct Call {  // numbers of a call, in the order of the file
  char name[64];
  int64_t parameters, regions, pointers, first_entry, entries, parts;
};
struct Pointer {  // the parameters have the address of a region plus `delta` at `offset`
  int64_t offset, region, delta;
};

static int fail(const char *why, const char *what) {
  fprintf(stderr, "%s: %s\n", why, what);
  return 1;
}

// `count` objects from the file, in memory that begins at a cache line; null if there are not as many.
template <class T> static T *read(FILE *file, int64_t count) {
  char *memory = (char *)malloc(count * sizeof(T) + 64);
  memory += -(uintptr_t)memory % 64;
  return (int64_t)fread(memory, sizeof(T), count, file) == count ? (T *)memory : nullptr;
}

int main(int count, char **arguments) {
  if (count != 4) return fail("usage", "replay LIBRARY CALLS RESULTS");
  void *library = dlopen(arguments[1], RTLD_NOW);
  FILE *calls = fopen(arguments[2], "rb"), *results = fopen(arguments[3], "wb");
  if (!library) return fail("cannot load", dlerror());
  if (!calls || !results) return fail("cannot open", calls ? arguments[3] : arguments[2]);
  for (Call call; fread(&call, sizeof(call), 1, calls) == 1;) {
    const Kernel kernel = (Kernel)dlsym(library, call.name);
    if (!kernel) return fail("no such kernel", call.name);
    char *parameters = read<char>(calls, call.parameters);
    const int64_t *sizes = read<int64_t>(calls, call.regions);
    const Pointer *pointers = read<Pointer>(calls, call.pointers);
    char **regions = (char **)calloc(call.regions, sizeof(char *));
    if (!parameters || !sizes || !pointers) return fail("the file ends within", call.name);
    for (int64_t r = 0; r < call.regions; r++)
      if (!(regions[r] = read<char>(calls, sizes[r]))) return fail("the file ends within", call.name);
    for (int64_t k = 0; k < call.pointers; k++)
      *(char **)(parameters + pointers[k].offset) = regions[pointers[k].region] + pointers[k].delta;
    for (int64_t item = 0; item < call.entries * call.parts; item++)
      if (!kernel(parameters, call.first_entry + item / call.parts, item % call.parts, call.parts))
        return fail("no memory", call.name);
    for (int64_t r = 0; r < call.regions; r++) fwrite(regions[r], 1, sizes[r], results);
  }
  return fclose(results) ? fail("cannot write", arguments[3]) : 0;
}
