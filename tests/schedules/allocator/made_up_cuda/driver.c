// The driver's virtual memory, which expandable segments are made of. Torch asks for its functions by
// name. Handles are allocations of which only the size is known.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define RANGE_BYTES (1ull << 30)
#define GRANULARITY_BYTES (2ull << 20)
#define OUT_OF_MEMORY 2

int made_up_take(size_t bytes);
void made_up_give_back(size_t bytes);

static uint64_t next_range = 1ull << 52;

static int cuMemAddressReserve(uint64_t* address, size_t bytes, size_t alignment, uint64_t wanted,
                               unsigned long long flags) {
  *address = next_range;
  next_range += (bytes / RANGE_BYTES + 2) * RANGE_BYTES;
  return 0;
}

static int cuMemCreate(unsigned long long* handle, size_t bytes, const void* properties,
                       unsigned long long flags) {
  if (!made_up_take(bytes)) return OUT_OF_MEMORY;
  size_t* size = malloc(sizeof *size);
  *size = bytes;
  *handle = (unsigned long long)(uintptr_t)size;
  return 0;
}

static int cuMemRelease(unsigned long long handle) {
  size_t* size = (size_t*)(uintptr_t)handle;
  made_up_give_back(*size);
  free(size);
  return 0;
}

static int cuMemGetAllocationGranularity(size_t* bytes, const void* properties, int option) {
  *bytes = GRANULARITY_BYTES;
  return 0;
}

static int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}

static int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = 1;
  return 0;
}

static int cuGetErrorString(int error, const char** text) {
  *text = "an error of the made-up driver";
  return 0;
}

// Mapping, unmapping and rights to access: nothing to do.
static int done(void) { return 0; }

static const struct { const char* name; void* function; } known[] = {
    {"cuMemAddressReserve", cuMemAddressReserve},
    {"cuMemCreate", cuMemCreate},
    {"cuMemRelease", cuMemRelease},
    {"cuMemGetAllocationGranularity", cuMemGetAllocationGranularity},
    {"cuDeviceGet", cuDeviceGet},
    {"cuDeviceGetAttribute", cuDeviceGetAttribute},
    {"cuGetErrorString", cuGetErrorString},
};

int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                     unsigned long long flags, int* found) {
  if (found) *found = 0;  // cudaDriverEntryPointSuccess
  *function = done;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (!strcmp(name, known[i].name)) *function = known[i].function;
  return 0;
}
