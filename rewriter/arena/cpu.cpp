// Arenas in front of torch's allocator for the CPU.
//
// One allocator forwards everything to the one that was there before. A thread that is armed is
// served from an arena first. What an arena cannot serve as planned, torch's allocator serves.
// Arming is by thread: the graph of a step runs in one, and what other threads do is not in its way.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cstring>
#include <mutex>

#include "arena.h"

namespace {

using remat::Arena;
using remat::Counts;
using remat::Recording;
using remat::Request;

struct Armed {
  std::shared_ptr<Arena> arena;  // null: the thread records
  int64_t next, end;
  Counts counts;
};

c10::Allocator* before = nullptr;
thread_local Armed* armed = nullptr;

// Never destroyed, since blocks are given back until the process has ended.
std::mutex& guard = *new std::mutex;
auto& arenas = *new std::map<uintptr_t, std::pair<int64_t, std::shared_ptr<Arena>>>;  // by address
auto& opened = *new std::map<int64_t, std::shared_ptr<Arena>>;  // by number
std::unique_ptr<Recording>& recording = *new std::unique_ptr<Recording>;

auto holder_of(const void* block) {
  auto address = reinterpret_cast<uintptr_t>(block);
  auto it = arenas.upper_bound(address);
  if (it == arenas.begin()) return arenas.end();
  --it;
  return address < it->first + it->second.first ? it : arenas.end();
}

// Closed arenas go with their last block. The memory is unmapped where no lock is held.
std::shared_ptr<Arena> dropped(decltype(arenas.begin()) it) {
  auto arena = it->second.second;
  if (!arena->is_closed || !arena->is_empty()) return nullptr;
  arenas.erase(it);
  return arena;
}

bool given_to_arena(void* block) {
  std::shared_ptr<Arena> last;
  std::lock_guard<std::mutex> lock(guard);
  auto it = holder_of(block);
  if (it == arenas.end()) {
    if (recording) recording->given(block);
    return false;
  }
  // The profiler hears of it before the range can be taken again.
  c10::profiledCPUMemoryReporter().Delete(block);
  it->second.second->give(block);
  last = dropped(it);
  return true;
}

// torch frees by it what was taken by `raw_allocate` too, from whichever allocator.
void free_any(void* block) {
  if (block && !given_to_arena(block)) before->raw_deleter()(block);
}

struct Wrapper final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (!armed || !size) return before->allocate(size);
    return armed->arena ? planned(size) : recorded(size);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }
  void copy_data(void* to, const void* from, std::size_t size) const override {
    before->copy_data(to, from, size);
  }
  bool is_simple_data_ptr(const c10::DataPtr& block) const override {
    return before->is_simple_data_ptr(block);
  }

 private:
  static c10::DataPtr planned(size_t size) {
    void* block;
    {
      std::lock_guard<std::mutex> lock(guard);
      block = armed->arena->take(armed->next, armed->end, size, armed->counts);
    }
    if (!block) return before->allocate(size);
    c10::profiledCPUMemoryReporter().New(block, size);
    return {block, block, &free_any, c10::Device(c10::kCPU)};
  }
  static c10::DataPtr recorded(size_t size) {
    auto data = before->allocate(size);
    void* block = data.release_context();
    std::lock_guard<std::mutex> lock(guard);
    if (recording) recording->taken(block, size);
    // With our deleter, so that the end of the block is seen.
    return {block, block, &free_any, c10::Device(c10::kCPU)};
  }
};

Wrapper& wrapper = *new Wrapper;

std::shared_ptr<char> mapped(int64_t bytes) {
  void* start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
  madvise(start, bytes, MADV_HUGEPAGE);
#endif
  return {static_cast<char*>(start), [bytes](char* p) { munmap(p, bytes); }};
}

void write(const Counts& counts, int64_t* out) {
  for (int64_t n : {counts.hits, counts.unplanned, counts.occupied, counts.kept,
                    counts.missed_bytes, counts.moved_out})
    *out++ = n;
}

void disarm() {
  delete armed;
  armed = nullptr;
}

}  // namespace

extern "C" {

// 0: in place; 1: there is an allocator whose blocks cannot be told apart. It stays in place, since
// blocks of arenas are given back through it.
int remat_arena_install() {
  if (before) return 0;
  auto* found = c10::GetCPUAllocator();
  if (!found->raw_deleter()) return 1;
  before = found;
  pthread_atfork([] { guard.lock(); }, [] { guard.unlock(); }, [] { guard.unlock(); });
  // At the priority of the one before, which torch does not tell.
  for (int priority = 0; priority < 256 && c10::GetCPUAllocator() != &wrapper; priority++)
    c10::SetCPUAllocator(&wrapper, static_cast<uint8_t>(priority));
  return 0;
}

// The number of the new arena; 0: the system has no such range.
int64_t remat_arena_open(const int64_t* sizes, const int64_t* offsets, const int64_t* may_outlive,
                         int64_t n, int64_t bytes) {
  static int64_t n_opened = 0;
  std::vector<Request> plan;
  for (int64_t i = 0; i < n; i++) plan.push_back({sizes[i], offsets[i], may_outlive[i] != 0});
  auto memory = mapped(bytes);
  if (!memory) return 0;
  auto arena = std::make_shared<Arena>(std::move(plan), memory);
  std::lock_guard<std::mutex> lock(guard);
  arenas[reinterpret_cast<uintptr_t>(memory.get())] = {bytes, arena};
  opened[++n_opened] = arena;
  return n_opened;
}

// Serves nothing more; its memory goes with the last block in it.
void remat_arena_close(int64_t number) {
  std::shared_ptr<Arena> last;
  std::lock_guard<std::mutex> lock(guard);
  auto it = opened.find(number);
  if (it == opened.end()) return;
  it->second->is_closed = true;
  last = dropped(holder_of(it->second->start()));
  opened.erase(it);
}

// Calls of this thread are those from `first` on, up to `end`, until remat_arena_end.
void remat_arena_begin(int64_t number, int64_t first, int64_t end) {
  disarm();
  std::lock_guard<std::mutex> lock(guard);
  auto it = opened.find(number);
  if (it != opened.end()) armed = new Armed{it->second, first, end, {}};
}

// Disarms the thread, if it is armed; what has been counted since it was.
void remat_arena_end(int64_t* out) {
  Counts counts;
  if (armed && armed->arena) {
    std::lock_guard<std::mutex> lock(guard);
    counts = armed->counts;
    armed->arena->counts.add(counts);
  }
  write(counts, out);
  disarm();
}

int remat_is_armed() { return armed != nullptr; }

void remat_arena_counts(int64_t number, int64_t* out) {
  std::lock_guard<std::mutex> lock(guard);
  auto it = opened.find(number);
  write(it == opened.end() ? Counts{} : it->second->counts, out);
}

// Arenas whose memory is still mapped.
int64_t remat_arenas_mapped() {
  std::lock_guard<std::mutex> lock(guard);
  return static_cast<int64_t>(arenas.size());
}

void remat_record_open() {
  std::lock_guard<std::mutex> lock(guard);
  recording = std::make_unique<Recording>();
}
void remat_record_begin() {
  disarm();
  armed = new Armed{nullptr, 0, 0, {}};
}
// Ends a part of the step: calls and events so far.
void remat_record_end(int64_t* out) {
  disarm();
  std::lock_guard<std::mutex> lock(guard);
  out[0] = recording ? recording->n_calls : 0;
  out[1] = recording ? static_cast<int64_t>(recording->events.size()) : 0;
}
int64_t remat_record_call(int64_t address) {
  std::lock_guard<std::mutex> lock(guard);
  return recording ? recording->call_of(reinterpret_cast<const void*>(address)) : -1;
}
void remat_record_read(int64_t* out, int64_t n) {
  std::lock_guard<std::mutex> lock(guard);
  for (int64_t i = 0; recording && i < n; i++) {
    *out++ = recording->events[i].size;
    *out++ = recording->events[i].call;
  }
}
void remat_record_close() {
  std::lock_guard<std::mutex> lock(guard);
  recording.reset();
}
}
