// The race checker: who may touch which memory when.
//
// Note: [Happens before]
// There is one timeline for each stream and one for the host. Everything asked of a stream comes after what the host
// did before the call and after what the stream was asked before. A wait puts a stream after the record it waits for; a
// synchronisation, or a query that finds the work done, puts the host after it. Two accesses to the same bytes, one of
// them a write, that neither of these rules puts in an order are a race, however they happened to run this time. So a
// race is found from the calls alone, at the call: no delay has to come at the right moment.
//
// All threads of the host are one timeline, in the order of their ACL calls: locks between threads can't be seen from
// here, and MindSpore hands every operator from thread to thread. What a race checker of threads would find, this
// doesn't.
#pragma once
#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "record.h"

namespace ascsim {

// For each timeline how far it has come.
class Clock {
 public:
  uint64_t at(size_t timeline) const { return timeline < ticks_.size() ? ticks_[timeline] : 0; }
  uint64_t tick(size_t timeline) {
    if (ticks_.size() <= timeline) ticks_.resize(timeline + 1, 0);
    return ++ticks_[timeline];
  }
  void reach(size_t timeline, uint64_t tick) {
    if (ticks_.size() <= timeline) ticks_.resize(timeline + 1, 0);
    ticks_[timeline] = std::max(ticks_[timeline], tick);
  }
  void join(const Clock &other) {
    if (ticks_.size() < other.ticks_.size()) ticks_.resize(other.ticks_.size(), 0);
    for (size_t i = 0; i < other.ticks_.size(); ++i) ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
  }

 private:
  std::vector<uint64_t> ticks_;
};

enum class AccessKind { kRead, kWrite, kFree };

struct Access {
  size_t timeline = 0;
  uint64_t tick = 0;  // 0: no access
  AccessKind kind = AccessKind::kRead;
  SitePtr site;
  Range range;
  bool before(const Clock &clock) const { return tick <= clock.at(timeline); }
};

// Note: [Pinned sources]
// After a copy from host memory MindSpore puts a callback on the stream, which lets go of the source: its pool may hand
// out the block again from then on, and rightly so, though no call tells the emulator. So once a callback has run, what
// its stream had read of pinned memory counts as done, for everybody. That depends on the schedule; a program that
// keeps its pinned tensors is checked without this exception under ASCSIM_STRICT_PINNED=1.
class RaceChecker {
 public:
  RaceChecker();

  void stream_access(int stream, const SitePtr &site, const std::vector<Range> &reads,
                     const std::vector<Range> &writes);
  void host_access(const SitePtr &site, const std::vector<Range> &reads, const std::vector<Range> &writes);
  void released(const SitePtr &site, Range range);

  Clock clock_of(int stream);
  void stream_joins(int stream, const Clock &clock);
  void host_joins(const Clock &clock);
  uint64_t tick_of(int stream);
  void callback_done(int stream, uint64_t tick);

  // Reports what the host isn't ordered after, among the accesses to `address`: the write, for a write also the reads.
  void host_touch(uintptr_t address, bool write, const SitePtr &site);

  size_t count();
  std::string json();
  void forget();
  void report_at_end();

 private:
  // A stretch of addresses that was last accessed as a whole.
  struct Stretch {
    uintptr_t end = 0;
    Access write;
    std::vector<Access> reads;  // since that write, the last of each timeline
  };
  struct Race {
    Access first, second;
    Range overlap;
    bool pinned = false;
    int64_t times = 1;
  };
  using Stretches = std::map<uintptr_t, Stretch>;

  Clock &clock(size_t timeline);
  void access(size_t timeline, const SitePtr &site, const std::vector<Range> &reads, const std::vector<Range> &writes);
  void split(uintptr_t address);
  void fill(Range range);
  void check(const Access &earlier, const Access &later, const Clock &now, Range overlap);
  void read(const Access &access, const Clock &now);
  void write(const Access &access, const Clock &now);
  void add(const Access &first, const Access &second, Range overlap);
  std::string text(const Race &race) const;
  std::string json(const Race &race) const;
  std::string json_of_all() const;

  const bool on_;
  std::mutex mutex_;
  std::vector<Clock> clocks_;
  Clock released_;  // see [Pinned sources]: of each stream, up to where its reads of pinned memory are done
  Stretches stretches_;
  std::map<std::string, Race> found_;
  std::vector<std::string> order_;
};

RaceChecker &races();

}  // namespace ascsim
