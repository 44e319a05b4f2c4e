// Streams: each is a queue with a thread of its own, which does one thing after the other.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "record.h"

namespace ascsim {

// Note: [Nominal time]
// A sleep always ends a little late. So a stream carries the time at which its work would have ended on a device that
// is exactly as slow as the settings say: the next piece of work starts from there, and lateness doesn't add up. A
// piece of work is given its nominal start, and returns its nominal end.
using Work = std::function<double(double start)>;

class Stream {
 public:
  explicit Stream(int number);
  ~Stream();
  void push(const CallPtr &call, Work work);
  void synchronize();
  bool idle();
  int number() const { return number_; }

 private:
  struct Task {
    double pushed;
    CallPtr call;
    Work work;
  };
  void run();
  double jitter();

  const int number_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<Task> queue_;
  bool busy_ = false, stop_ = false;
  double nominal_ = 0;
  uint64_t random_ = 0, drawn_ = 0;
  int reseeded_ = -1;
  double mood_ = 0;
  std::thread thread_;
};

Stream &stream_of(void *handle);  // a null handle is the default stream
Stream &stream_of(Calling &call, void *handle);  // the same, and notes it as the stream of the call
void host_waits_for(Stream &stream);             // for all that it was asked until now
std::vector<Stream *> all_streams();

// An operator's work takes at least ASCSIM_OP_DELAY_US.
Work operator_work(std::function<void()> body);

}  // namespace ascsim
