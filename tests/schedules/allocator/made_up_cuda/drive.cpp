// Serves a trace from torch's own CUDA caching allocator, and prints what it says of itself.
//
// Argument: bytes of the device. Standard input: a trace as schedules/allocator/replay.py has it,
// one integer a line. Settings come from PYTORCH_ALLOC_CONF (PYTORCH_CUDA_ALLOC_CONF before 2.10).
// Output: peak allocated, peak reserved, reserved in the end, how often the cache was emptied for room,
// and the request that failed or -1.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

extern "C" void made_up_capacity(size_t bytes);

int main(int, char** arguments) {
  made_up_capacity(std::strtoull(arguments[1], nullptr, 10));
  c10::cuda::detail::init_p2p_access_cache(1);
  auto* allocator = c10::cuda::CUDACachingAllocator::get();
  allocator->init(1);
  std::vector<void*> given;
  long failed = -1;
  for (long event; failed < 0 && std::scanf("%ld", &event) == 1;) {
    if (event > 0) {
      try {
        given.push_back(allocator->raw_alloc(event));
      } catch (const c10::OutOfMemoryError&) {
        failed = static_cast<long>(given.size());
      }
    } else if (event < 0) {
      allocator->raw_delete(given[~event]);
    } else {
      allocator->emptyCache();
    }
  }
  const auto said = allocator->getDeviceStats(0);
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto& reserved = said.reserved_bytes[all];
  std::printf("%lld %lld %lld %lld %ld\n", (long long)said.allocated_bytes[all].peak,
              (long long)reserved.peak, (long long)reserved.current,
              (long long)said.num_alloc_retries, failed);
}
