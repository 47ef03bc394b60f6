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
  int64_t hits = 0, unplanned = 0, occupied = 0, kept = 0, missed_bytes = 0;
  int64_t moved_out = 0;  // requests that have been left to torch's allocator since

  void add(const Counts& more) {
    hits += more.hits, unplanned += more.unplanned, occupied += more.occupied;
    kept += more.kept, missed_bytes += more.missed_bytes, moved_out += more.moved_out;
  }
};

// How far a call is looked for among the next ones, where calls are left out or put in.
constexpr int64_t kAhead = 16;

class Arena {
 public:
  Arena(std::vector<Request> plan, std::shared_ptr<char> memory)
      : plan_(std::move(plan)), memory_(std::move(memory)) {}

  // The planned place of the next call of this size; null if there is none, or if it is not free.
  void* take(int64_t& next, int64_t end, int64_t size, Counts& counts) {
    if (is_closed) return nullptr;
    int64_t i = call_of(next, end, size);
    if (i < 0) return missed(counts.unplanned, size, counts);
    next = i + 1;
    const Request& planned = plan_[i];
    if (planned.offset < 0) return nullptr;
    switch (in_the_way(planned.offset, planned.offset + size, counts)) {
      case InTheWay::kOther:
        return missed(counts.occupied, size, counts);
      case InTheWay::kKept:
        return missed(counts.kept, size, counts);
      case InTheWay::kNothing:
        break;
    }
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

  enum class InTheWay { kNothing, kKept, kOther };

  // What the user keeps into the next step would be in the way again. So it moves out for good.
  InTheWay in_the_way(int64_t start, int64_t end, Counts& counts) {
    auto it = held_.lower_bound(start);
    if (it != held_.begin() && std::prev(it)->second.end > start) --it;
    auto found = InTheWay::kNothing;
    for (; it != held_.end() && it->first < end; ++it) {
      Request& other = plan_[it->second.call];
      if (!other.may_outlive)
        found = InTheWay::kOther;
      else if (found == InTheWay::kNothing)
        found = InTheWay::kKept;
      if (other.may_outlive && other.offset >= 0) other.offset = -1, counts.moved_out++;
    }
    return found;
  }

  int64_t call_of(int64_t next, int64_t end, int64_t size) const {
    for (int64_t i = next; i < end && i < next + kAhead; i++)
      if (plan_[i].size == size) return i;
    return -1;
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
  // The call that took a block which is live; -1 if none did.
  int64_t call_of(const void* block) const {
    auto it = live_.find(block);
    return it == live_.end() ? -1 : it->second;
  }

  std::vector<Event> events;
  int64_t n_calls = 0;

 private:
  std::unordered_map<const void*, int64_t> live_;
};

}  // namespace remat
