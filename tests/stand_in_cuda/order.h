// The order of work on streams: what fences order, and accesses to memory that nothing orders.
//
// Each stream, and the host, counts its own steps, and knows of every other the last step that a fence has made it wait
// for: a vector clock (Lamport 1978, Mattern 1989). Of each byte that has been touched, the last writer is kept and the
// readers since. An access is right if its stream's clock covers the last writer, and for a write the readers, too. What
// the host has done or has waited for comes before all that it launches. Threads of the host count as one.
//
// Checked are memory of the devices and page-locked memory of the host, for operators of both. Freed memory goes back to
// the stream that it was allocated on, whose next kernel may get it: that stream must have waited for all others that
// have used it, except those of `record_stream`.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace order {

using Clock = std::vector<int64_t>;  // Of each actor: the last of its steps that is known to have ended.
using Actor = size_t;                // 0 is the host; the others are streams.
using Address = uintptr_t;

constexpr Actor kHost = 0;
constexpr size_t kDefaultStreams = 16;  // Actors 1 to 16 are the default streams of the devices.

inline Actor actor(int device, int64_t stream) {
  return stream == 0 ? 1 + static_cast<Actor>(device) : kDefaultStreams + static_cast<Actor>(stream);
}

inline std::string name(Actor actor) {
  if (actor == kHost) return "the host";
  if (actor <= kDefaultStreams) return "the default stream of GPU " + std::to_string(actor - 1);
  return "stream " + std::to_string(actor - kDefaultStreams);
}

struct Access {
  Actor actor;
  int64_t step;
  std::string operation;
};

struct History {
  Address end;
  std::vector<Access> writer;   // None or one.
  std::vector<Access> readers;  // At most one of each actor: the last.
};

inline void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

class Order {
 public:
  bool checks = true;

  // Returns what has ended when a stream reaches this point.
  Clock record(Actor actor) {
    std::lock_guard lock(mutex_);
    auto& clock = clock_of(actor);
    join(clock, clock_of(kHost));
    return clock;
  }

  void wait(Actor actor, const Clock& point) {
    std::lock_guard lock(mutex_);
    join(clock_of(actor), point);
  }

  // The host waits for all streams.
  void synchronize() {
    std::lock_guard lock(mutex_);
    for (Actor each = 1; each < clocks_.size(); ++each) join(clock_of(kHost), clocks_[each]);
  }

  bool knows(Actor actor, const Clock& point) {
    std::lock_guard lock(mutex_);
    const auto& clock = clock_of(actor);
    for (size_t i = 0; i < point.size(); ++i)
      if (point[i] > (i < clock.size() ? clock[i] : 0)) return false;
    return true;
  }

  // Begins a step of a stream; its accesses follow.
  void step(Actor actor) {
    std::lock_guard lock(mutex_);
    auto& clock = clock_of(actor);
    join(clock, clock_of(kHost));
    ++clock[actor];
  }

  // Checks and records one access. An access of the host raises at the next one of a stream: observers cannot raise.
  void access(Actor actor, Address begin, size_t nbytes, bool write, const std::string& operation) {
    if (nbytes == 0 || !checks) return;
    bool raises = actor != kHost;
    auto end = begin + nbytes;
    std::string found;
    {
      std::lock_guard lock(mutex_);
      if (raises) found = std::exchange(pending_, {});
      split(begin);
      split(end);
      const auto& clock = clock_of(actor);
      Access now{actor, clock[actor], operation};
      auto first = histories_.lower_bound(begin), last = histories_.lower_bound(end);
      for (auto each = first; each != last && found.empty(); ++each) {
        auto how = name(actor) + (write ? " writes in " : " reads in ") + operation + " what ";
        found = unordered(clock, each->second.writer, how, " wrote in ");
        if (write && found.empty()) found = unordered(clock, each->second.readers, how, " may still read in ");
      }
      if (write) {
        histories_.erase(first, last);
        histories_[begin] = {end, {now}, {}};
      } else {
        read(begin, end, now);
      }
    }
    if (raises) TORCH_CHECK(found.empty(), "Race: ", found, ".");
    if (!found.empty()) pend(found);
  }

  // Forgets memory. `owner` is who may be given it next; `users` are streams that it waits for.
  void free(Actor owner, Address begin, size_t nbytes, const std::vector<Actor>& users) noexcept {
    if (!checks) return;
    std::lock_guard lock(mutex_);
    auto end = begin + nbytes;
    split(begin);
    split(end);
    auto clock = clock_of(owner);
    join(clock, clock_of(kHost));
    for (auto user : users) join(clock, clock_of(user));
    auto first = histories_.lower_bound(begin), last = histories_.lower_bound(end);
    for (auto each = first; each != last && pending_.empty(); ++each) {
      auto how = name(owner) + " may be given what ";
      pending_ = unordered(clock, each->second.writer, how, " wrote in ");
      if (pending_.empty()) pending_ = unordered(clock, each->second.readers, how, " may still read in ");
    }
    histories_.erase(first, last);
  }

  void forget(Address begin, size_t nbytes) noexcept {
    std::lock_guard lock(mutex_);
    split(begin);
    split(begin + nbytes);
    histories_.erase(histories_.lower_bound(begin), histories_.lower_bound(begin + nbytes));
  }

 private:
  void pend(const std::string& found) {
    std::lock_guard lock(mutex_);
    if (pending_.empty()) pending_ = found;
  }

  Clock& clock_of(Actor actor) {
    if (clocks_.size() <= actor) clocks_.resize(actor + 1);
    if (clocks_[actor].size() <= actor) clocks_[actor].resize(actor + 1);
    return clocks_[actor];
  }

  static std::string unordered(const Clock& clock, const std::vector<Access>& before, const std::string& how, const char* did) {
    for (const auto& each : before)
      if (each.step > (each.actor < clock.size() ? clock[each.actor] : 0))
        return how + name(each.actor) + did + each.operation + ", and no fence is between them";
    return {};
  }

  void split(Address at) {
    auto next = histories_.upper_bound(at);
    if (next == histories_.begin()) return;
    auto before = std::prev(next);
    if (before->first == at || before->second.end <= at) return;
    auto rest = before->second;
    before->second.end = at;
    histories_.emplace(at, std::move(rest));
  }

  void read(Address begin, Address end, const Access& now) {
    for (auto at = begin; at < end;) {
      auto next = histories_.lower_bound(at);
      if (next == histories_.end() || next->first >= end || next->first > at) {
        auto until = next == histories_.end() ? end : std::min(end, next->first);
        histories_[at] = {until, {}, {now}};
        at = until;
        continue;
      }
      auto& readers = next->second.readers;
      auto same = std::find_if(readers.begin(), readers.end(), [&](const Access& each) { return each.actor == now.actor; });
      if (same == readers.end()) readers.push_back(now);
      else *same = now;
      at = next->second.end;
    }
  }

  std::mutex mutex_;
  std::vector<Clock> clocks_;
  std::map<Address, History> histories_;  // By the first byte; they have no byte in common.
  std::string pending_;                   // A race that was found where nothing can be raised.
};

// Kept until the process has ended: tensors may be freed after everything else.
inline Order& all() {
  static auto* one = new Order;
  return *one;
}

}  // namespace order
