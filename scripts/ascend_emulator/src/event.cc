// Events: marks on a stream that another stream, or the host, waits for.
//
// Note: [Two kinds of events]
// An event of aclrtCreateEventExWithFlag (MindSpore's runtime.Event) is what CUDA has: a wait means the last record
// before it, whatever is recorded later, on whichever stream; one that was never recorded makes nobody wait. An event of
// aclrtCreateEventWithFlag (MindSpore's own, in its memory pools) is a flag: a wait means the record since the last
// reset, or the next one if there is none yet.
#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "races.h"
#include "stream.h"

namespace ascsim {
namespace {

// One record of an event: the streams that wait hold it, whatever is recorded afterwards.
struct Record {
  bool is_asked_for = false, is_reached = false;
  double time = 0;
  Clock clock;
};
using RecordPtr = std::shared_ptr<Record>;

struct State {
  const bool is_flag;
  const int64_t number;
  std::mutex mutex;
  std::condition_variable changed;
  RecordPtr last, next = std::make_shared<Record>();
  bool armed = false;  // of a flag: recorded since the last reset

  State(bool flag, int64_t count) : is_flag(flag), number(count) {}

  // The record that a wait from now on is for; null: none.
  RecordPtr target() const { return is_flag && !armed ? next : last; }
  bool is_idle() const { return last == nullptr || last->is_reached; }
};

// Streams still hold an event that its owner has destroyed.
struct Event {
  std::shared_ptr<State> state;
};

aclError create(const char *name, void **out, bool is_flag) {
  static std::atomic<int64_t> next{0};
  Calling call(name);
  auto *event = new Event{std::make_shared<State>(is_flag, next++)};
  call->event = event->state->number;
  *out = event;
  return kSuccess;
}

// The event that a call is about, noted in the call.
std::shared_ptr<State> event_of(Calling &call, void *handle) {
  auto &event = static_cast<Event *>(handle)->state;
  call->event = event->number;
  return event;
}

}  // namespace

ACL_EXPORT aclError aclrtCreateEvent(void **out) { return create("aclrtCreateEvent", out, true); }

ACL_EXPORT aclError aclrtCreateEventWithFlag(void **out, uint32_t) {
  return create("aclrtCreateEventWithFlag", out, true);
}

ACL_EXPORT aclError aclrtCreateEventExWithFlag(void **out, uint32_t) {
  return create("aclrtCreateEventExWithFlag", out, false);
}

ACL_EXPORT aclError aclrtDestroyEvent(void *handle) {
  Calling call("aclrtDestroyEvent");
  auto *event = static_cast<Event *>(handle);
  if (event != nullptr) call->event = event->state->number;
  delete event;
  return kSuccess;
}

ACL_EXPORT aclError aclrtRecordEvent(void *handle, void *stream_handle) {
  Calling call("aclrtRecordEvent");
  auto event = event_of(call, handle);
  Stream &stream = stream_of(call, stream_handle);
  RecordPtr record;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    record = event->last = std::exchange(event->next, std::make_shared<Record>());
    record->is_asked_for = event->armed = true;
    record->clock = races().clock_of(stream.number());
  }
  stream.push(call.shared(), [event, record](double start) {
    {
      std::lock_guard<std::mutex> lock(event->mutex);
      record->is_reached = true;
      record->time = start;
    }
    event->changed.notify_all();
    return start;
  });
  return kSuccess;
}

ACL_EXPORT aclError aclrtStreamWaitEvent(void *stream_handle, void *handle) {
  Calling call("aclrtStreamWaitEvent");
  auto event = event_of(call, handle);
  Stream &stream = stream_of(call, stream_handle);
  RecordPtr target;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    target = event->target();
    if (target != nullptr && target->is_asked_for) races().stream_joins(stream.number(), target->clock);
  }
  if (target == nullptr) return kSuccess;
  stream.push(call.shared(), [event, target](double start) {
    std::unique_lock<std::mutex> lock(event->mutex);
    event->changed.wait(lock, [&] { return target->is_reached; });
    return std::max(start, target->time);
  });
  return kSuccess;
}

ACL_EXPORT aclError aclrtResetEvent(void *handle, void *stream_handle) {
  Calling call("aclrtResetEvent");
  auto event = event_of(call, handle);
  stream_of(call, stream_handle);
  if (!event->is_flag) return fail(kNotSupported, "aclrtResetEvent: not for an event of aclrtCreateEventExWithFlag");
  std::lock_guard<std::mutex> lock(event->mutex);
  event->armed = false;
  return kSuccess;
}

ACL_EXPORT aclError aclrtSynchronizeEvent(void *handle) {
  Calling call("aclrtSynchronizeEvent");
  call.locate();
  auto event = event_of(call, handle);
  count(Counter::kSyncEvent);
  std::unique_lock<std::mutex> lock(event->mutex);
  RecordPtr target = event->last;
  if (target == nullptr) return kSuccess;
  event->changed.wait(lock, [&] { return target->is_reached; });
  races().host_joins(target->clock);
  return kSuccess;
}

ACL_EXPORT aclError aclrtQueryEventStatus(void *handle, int *status) {
  Calling call("aclrtQueryEventStatus");
  auto event = event_of(call, handle);
  constexpr int kNotReady = 0, kComplete = 1;
  std::lock_guard<std::mutex> lock(event->mutex);
  *status = event->is_idle() ? kComplete : kNotReady;
  if (event->last != nullptr && *status == kComplete) races().host_joins(event->last->clock);
  return kSuccess;
}

ACL_EXPORT aclError aclrtEventElapsedTime(float *milliseconds, void *begin, void *end) {
  Calling call("aclrtEventElapsedTime");
  double times[2];
  void *handles[] = {begin, end};
  for (int i = 0; i < 2; ++i) {
    auto event = event_of(call, handles[i]);
    std::lock_guard<std::mutex> lock(event->mutex);
    if (event->last == nullptr || !event->is_idle()) {
      return fail(kInvalidParameter, "aclrtEventElapsedTime: event %lld is not recorded, or not reached yet",
                  static_cast<long long>(event->number));
    }
    times[i] = event->last->time;
  }
  *milliseconds = static_cast<float>((times[1] - times[0]) / 1e3);
  return kSuccess;
}

ACL_EXPORT aclError aclrtEventGetTimestamp(void *handle, uint64_t *microseconds) {
  Calling call("aclrtEventGetTimestamp");
  auto event = event_of(call, handle);
  std::lock_guard<std::mutex> lock(event->mutex);
  *microseconds = event->last != nullptr ? static_cast<uint64_t>(event->last->time) : 0;
  return kSuccess;
}

}  // namespace ascsim
