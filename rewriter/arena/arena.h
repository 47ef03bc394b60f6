// Planned places in one arena, handed out in the order of the calls.
//
// Nothing here knows a device: cpu.cpp puts it behind torch's allocator of one. Callers lock.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace remat {

// One call of the recorded step. An offset below 0 leaves it to torch's allocator.
struct Request {
  int64_t size, offset;
  bool may_outlive;  // the step, as gradients do
};

struct Counts {
  int64_t hits = 0, other_size = 0, occupied = 0, beyond = 0, missed_bytes = 0;
  int64_t moved_out = 0;  // requests that have been left to torch's allocator since

  void add(const Counts& more) {
    hits += more.hits, other_size += more.other_size, occupied += more.occupied;
    beyond += more.beyond, missed_bytes += more.missed_bytes, moved_out += more.moved_out;
  }
};

class Arena {
 public:
  Arena(std::vector<Request> plan, std::shared_ptr<char> memory)
      : plan_(std::move(plan)), memory_(std::move(memory)) {}

  // The planned place of call `i`; null if it is not as planned, or its range is not free.
  void* take(int64_t i, int64_t end, int64_t size, Counts& counts) {
    if (is_closed) return nullptr;
    if (i >= end) return missed(counts.beyond, size, counts);
    const Request& planned = plan_[i];
    if (planned.size != size) return missed(counts.other_size, size, counts);
    if (planned.offset < 0) return nullptr;
    if (is_in_the_way(planned.offset, planned.offset + size, counts))
      return missed(counts.occupied, size, counts);
    held_[planned.offset] = {planned.offset + size, i};
    counts.hits++;
    return memory_.get() + planned.offset;
  }

  void give(const void* block) { held_.erase(static_cast<const char*>(block) - memory_.get()); }

  bool is_empty() const { return held_.empty(); }
  const char* start() const { return memory_.get(); }

  Counts counts;
  bool is_closed = false;

 private:
  struct Held {
    int64_t end, call;
  };

  static void* missed(int64_t& kind, int64_t size, Counts& counts) {
    kind++;
    counts.missed_bytes += size;
    return nullptr;
  }

  // What the user keeps into the next step would be in the way again. So it moves out for good.
  bool is_in_the_way(int64_t start, int64_t end, Counts& counts) {
    auto it = held_.lower_bound(start);
    if (it != held_.begin() && std::prev(it)->second.end > start) --it;
    bool found = false;
    for (; it != held_.end() && it->first < end; ++it) {
      found = true;
      Request& other = plan_[it->second.call];
      if (other.may_outlive && other.offset >= 0) other.offset = -1, counts.moved_out++;
    }
    return found;
  }

  std::vector<Request> plan_;
  std::shared_ptr<char> memory_;
  std::map<int64_t, Held> held_;  // by offset
};

// The requests of one step, and when each block is given back.
class Recording {
 public:
  struct Event {
    int64_t size, call;  // a size below 0: given back
  };

  void taken(const void* block, int64_t size) {
    live_[block] = n_calls;
    events.push_back({size, n_calls++});
  }
  void given(const void* block) {
    auto it = live_.find(block);
    if (it == live_.end()) return;
    events.push_back({-1, it->second});
    live_.erase(it);
  }

  std::vector<Event> events;
  int64_t n_calls = 0;

 private:
  std::unordered_map<const void*, int64_t> live_;
};

}  // namespace remat
