// Loaded before torch: gloo's thread rests between the moment at which a collective has its result
// and the end of the profiler's record of it, as on a busy machine now and then.
#include <dlfcn.h>
#include <unistd.h>

#include <exception>

namespace c10d {
struct Work {
  void finish(std::exception_ptr);
};

void Work::finish(std::exception_ptr error) {
  using Finish = void (*)(Work*, std::exception_ptr);
  static auto torchs = reinterpret_cast<Finish>(
      dlsym(dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY),
            "_ZN4c10d4Work6finishENSt15__exception_ptr13exception_ptrE"));
  usleep(20000);
  torchs(this, error);
}
}  // namespace c10d
