#include "stream.h"

#include <pthread.h>

#include <algorithm>
#include <map>
#include <utility>

#include "races.h"
#include "scramble.h"
#include "settings.h"

namespace ascsim {
namespace {

struct Streams {
  std::mutex mutex;
  std::map<int, Stream *> all;
  int next = 0;
  Stream *create() {
    std::lock_guard<std::mutex> lock(mutex);
    auto *stream = new Stream(next);
    all[next++] = stream;
    return stream;
  }
  // Takes a stream out of the table; null if it isn't one.
  Stream *remove(void *handle) {
    std::lock_guard<std::mutex> lock(mutex);
    for (auto &one : all) {
      if (one.second != handle) continue;
      Stream *stream = one.second;
      all.erase(one.first);
      return stream;
    }
    return nullptr;
  }
};

Streams &streams() {
  static Streams *one = [] {
    auto *result = new Streams();
    result->create();  // the default stream is number 0
    return result;
  }();
  return *one;
}

Stream &default_stream() {
  static Stream *one = streams().all.at(0);
  return *one;
}

uint64_t mixed(uint64_t value) { return scrambled(value + 0x9e3779b97f4a7c15ull); }

aclError synchronize(const char *name, void *handle) {
  Calling call(name);
  call.locate();
  count(Counter::kSyncStream);
  host_waits_for(stream_of(call, handle));
  return kSuccess;
}

aclError synchronize_device(const char *name) {
  Calling call(name);
  call.locate();
  count(Counter::kSyncDevice);
  for (Stream *stream : all_streams()) host_waits_for(*stream);
  return kSuccess;
}

aclError destroy(const char *name, void *handle) {
  Calling call(name);
  Stream *stream = streams().remove(handle);
  if (stream == nullptr) return fail(kInvalidParameter, "%s: %p is not a stream", name, handle);
  host_waits_for(*stream);
  delete stream;
  return kSuccess;
}

}  // namespace

Stream::Stream(int number) : number_(number) {
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), ("stream " + std::to_string(number)).c_str());
}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

// A stream is slow for some pieces of work, then quick again: delays that are drawn for each piece alone cancel out,
// and one stream would never run far ahead of another.
double Stream::jitter() {
  double seed = settings().seed;
  if (seed < 0) return 0;
  if (int latest = settings().reseeded; latest != reseeded_) {
    reseeded_ = latest;
    drawn_ = 0;
    random_ = mixed(static_cast<uint64_t>(seed) * 1000003 + static_cast<uint64_t>(number_));
  }
  constexpr uint64_t kStretch = 12;
  random_ = mixed(random_);
  if (drawn_++ % kStretch == 0) {
    const double moods[] = {0, 0.1, 1};
    mood_ = moods[random_ % 3];
    random_ = mixed(random_);
  }
  return settings().jitter_us * mood_ * fraction(random_);
}

void Stream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    double start = std::max(task.pushed, nominal_) + jitter();
    sleep_until_us(start);
    double end = task.work(start);
    if (task.call != nullptr) {
      task.call->start = start;
      task.call->end = end;
    }
    task = Task{};
    lock.lock();
    nominal_ = end;
    busy_ = false;
    if (queue_.empty()) idle_.notify_all();
  }
}

void Stream::push(const CallPtr &call, Work work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back({now_us(), call, std::move(work)});
  }
  wake_.notify_one();
}

void Stream::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

Stream &stream_of(void *handle) { return handle != nullptr ? *static_cast<Stream *>(handle) : default_stream(); }

Stream &stream_of(Calling &call, void *handle) {
  Stream &stream = stream_of(handle);
  call->site->stream = stream.number();
  return stream;
}

void host_waits_for(Stream &stream) {
  Clock reached = races().clock_of(stream.number());  // before waiting: later work isn't waited for
  stream.synchronize();
  races().host_joins(reached);
}

std::vector<Stream *> all_streams() {
  std::lock_guard<std::mutex> lock(streams().mutex);
  std::vector<Stream *> result;
  for (auto &one : streams().all) result.push_back(one.second);
  return result;
}

Work operator_work(std::function<void()> body) {
  return [body = std::move(body)](double start) {
    double begin = now_us();
    body();
    double end = start + std::max(now_us() - begin, settings().op_delay_us.load());
    sleep_until_us(end);
    return end;
  };
}

ACL_EXPORT aclError aclrtCreateStreamWithConfig(void **out, uint32_t, uint32_t) {
  Calling call("aclrtCreateStreamWithConfig");
  Stream *stream = streams().create();
  call->site->stream = stream->number();
  *out = stream;
  return kSuccess;
}

ACL_EXPORT aclError aclrtCreateStream(void **out) { return aclrtCreateStreamWithConfig(out, 0, 0); }
ACL_EXPORT aclError aclrtDestroyStream(void *stream) { return destroy("aclrtDestroyStream", stream); }
ACL_EXPORT aclError aclrtDestroyStreamForce(void *stream) { return destroy("aclrtDestroyStreamForce", stream); }

ACL_EXPORT aclError aclrtSynchronizeStream(void *stream) {
  return synchronize("aclrtSynchronizeStream", stream);
}

ACL_EXPORT aclError aclrtSynchronizeStreamWithTimeout(void *stream, int) {
  return synchronize("aclrtSynchronizeStreamWithTimeout", stream);
}

ACL_EXPORT aclError aclrtSynchronizeDevice() { return synchronize_device("aclrtSynchronizeDevice"); }

ACL_EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int) {
  return synchronize_device("aclrtSynchronizeDeviceWithTimeout");
}

ACL_EXPORT aclError aclrtStreamQuery(void *handle, int *status) {
  Calling call("aclrtStreamQuery");
  Stream &stream = stream_of(call, handle);
  Clock reached = races().clock_of(stream.number());
  constexpr int kComplete = 0, kNotReady = 1;
  *status = stream.idle() ? kComplete : kNotReady;
  if (*status == kComplete) races().host_joins(reached);
  return kSuccess;
}

ACL_EXPORT aclError aclrtLaunchCallback(void (*function)(void *), void *data, int, void *handle) {
  Calling call("aclrtLaunchCallback");
  Stream &stream = stream_of(call, handle);
  uint64_t tick = races().tick_of(stream.number());
  stream.push(call.shared(), [=, number = stream.number()](double start) {
    double begin = now_us();
    function(data);
    races().callback_done(number, tick);
    return start + now_us() - begin;
  });
  return kSuccess;
}

ACL_EXPORT aclError aclrtDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 7;
  *greatest = 0;
  return kSuccess;
}

}  // namespace ascsim
