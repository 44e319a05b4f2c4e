// What happened: one record for each ACL call, the counters, the trace file, and where in the program a call was made.
#pragma once
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "acl.h"

namespace ascsim {

// Microseconds since the emulator was loaded.
double now_us();
void sleep_until_us(double when);

// The place of a call in the program: what a report names.
struct Site {
  uint64_t index = 0;   // the how-manieth ACL call of the process
  std::string name;     // "aclrtMemcpyAsync D2H", "aclnnMatmul"
  int stream = -1;      // -1: the host itself
  long thread = 0;
  std::string thread_name;
  std::string where;    // "train.py:12 in step", where the calling thread runs Python
  std::string mark;     // what the program last gave to ascsim_mark
};
using SitePtr = std::shared_ptr<const Site>;

// One ACL call. Shared by the calling thread and, for work on a stream, by the stream; whoever lets go last writes the
// line of the trace.
struct Call {
  std::shared_ptr<Site> site;
  const char *kind = "";  // of a copy: H2D, D2H, D2D, H2H
  int64_t event = -1;
  size_t bytes = 0;
  double called = 0, returned = 0;  // on the calling thread
  double start = -1, end = -1;      // on the stream
  std::vector<Range> reads, writes;
  ~Call();
};
using CallPtr = std::shared_ptr<Call>;

// Stands at the top of an ACL function: counts the call, and times it.
class Calling {
 public:
  explicit Calling(const char *name);
  ~Calling();
  Call *operator->() const { return call_.get(); }
  const CallPtr &shared() const { return call_; }
  void locate() const;  // looks up where in the program this is

 private:
  CallPtr call_;
};

enum class Counter {
  kDeviceUsed, kDevicePeak, kPinnedUsed, kPinnedPeak, kPinnedAllocations,
  kH2dAsyncBytes, kD2hAsyncBytes, kH2dSyncBytes, kD2hSyncBytes, kD2dBytes,
  kH2dAsync, kD2hAsync, kH2dSync, kD2hSync, kD2d, kPageableAsync,
  kSyncStream, kSyncEvent, kSyncDevice, kSyncCopy, kSyncPageable,
  kOperators, kLast
};
void count(Counter counter, int64_t by = 1);
// Adds to a counter of what is in use now, and keeps its peak.
void count_used(Counter used, Counter peak, int64_t by);
int64_t counted(Counter counter);

FILE *open_for_writing(const std::string &path);  // ends the program if it can't be

std::string quoted(const std::string &text);  // as JSON
std::string json(const Site &site);
std::string json(const std::vector<Range> &ranges);

}  // namespace ascsim
