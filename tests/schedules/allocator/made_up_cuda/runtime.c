// A CUDA runtime without a GPU: so much of it as torch's allocator calls. Memory is only counted, and
// addresses point to nothing.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_runtime_api.h"

#define MIB (1ull << 20)
#define N_BUCKETS 65536
#define TOTAL_MEMORY_OFFSET 288  // of totalGlobalMem in cudaDeviceProp, CUDA 10 to 13

static size_t capacity, used;

void made_up_capacity(size_t bytes) { capacity = bytes; }

void made_up_give_back(size_t bytes) { used -= bytes; }

int made_up_take(size_t bytes) {
  if (used + bytes > capacity) return 0;
  used += bytes;
  return 1;
}

// Allocations by address.
struct allocation {
  uint64_t address;
  size_t bytes;
  struct allocation* next;
};
static struct allocation* buckets[N_BUCKETS];
static uint64_t next_address = 1ull << 44;

static struct allocation** bucket_of(uint64_t address) {
  return &buckets[(address / MIB) % N_BUCKETS];
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (!made_up_take(bytes)) return cudaErrorMemoryAllocation;
  struct allocation* made = malloc(sizeof *made);
  struct allocation** bucket = bucket_of(next_address);
  *made = (struct allocation){next_address, bytes, *bucket};
  *bucket = made;
  *pointer = (void*)next_address;
  next_address += (bytes / (2 * MIB) + 2) * (2 * MIB);  // no two touch
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  struct allocation** at = bucket_of((uint64_t)pointer);
  while (*at && (*at)->address != (uint64_t)pointer) at = &(*at)->next;
  if (!*at) return cudaSuccess;
  struct allocation* gone = *at;
  *at = gone->next;
  made_up_give_back(gone->bytes);
  free(gone);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = capacity - used;
  *total_bytes = capacity;
  return cudaSuccess;
}

// The device.
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(void* properties, int device) {
  memset(properties, 0, TOTAL_MEMORY_OFFSET);
  memcpy((char*)properties + TOTAL_MEMORY_OFFSET, &capacity, sizeof capacity);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -3;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) { return "an error of the made-up runtime"; }
const char* cudaGetErrorName(cudaError_t error) { return "made-up"; }
