// Copies: between host and device over one link for each direction, and within the device.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "memory.h"
#include "races.h"
#include "settings.h"
#include "stream.h"

namespace ascsim {
namespace {

// One direction of the connection between host and device. Its copies share its bandwidth: one waits for the other.
class Link {
 public:
  explicit Link(const std::atomic<double> &gbps) : gbps_(gbps) {}
  // The nominal end of a copy that may start at `start`.
  double reserve(double start, size_t bytes) {
    double gbps = gbps_;
    if (gbps <= 0) return start + settings().copy_delay_us;
    std::lock_guard<std::mutex> lock(mutex_);
    free_at_ = std::max(start, free_at_) + static_cast<double>(bytes) / gbps / 1e3;
    return free_at_ + settings().copy_delay_us;
  }

 private:
  const std::atomic<double> &gbps_;
  std::mutex mutex_;
  double free_at_ = 0;
};

Link &link(MemcpyKind kind) {
  static auto *to_device = new Link(settings().h2d_gbps);
  static auto *to_host = new Link(settings().d2h_gbps);
  return kind == kHostToDevice ? *to_device : *to_host;
}

const char *text(MemcpyKind kind) {
  const char *names[] = {"H2H", "H2D", "D2H", "D2D"};
  return names[kind];
}

// ACL_MEMCPY_DEFAULT: the addresses say it.
MemcpyKind resolved(int kind, const void *to, const void *from) {
  if (kind != kDefault) return static_cast<MemcpyKind>(kind);
  bool to_device = space_of(to) == Space::kDevice, from_device = space_of(from) == Space::kDevice;
  if (from_device) return to_device ? kDeviceToDevice : kDeviceToHost;
  return to_device ? kHostToDevice : kHostToHost;
}

// Moves the bytes at the end of the time that the copy takes: what is overwritten too early, or read too early, shows.
double copy_now(double start, MemcpyKind kind, char *to, const char *from, size_t bytes) {
  double end = start;
  if (kind == kHostToDevice || kind == kDeviceToHost) {
    end = link(kind).reserve(start, bytes);
    sleep_until_us(end);
  }
  double begin = now_us();
  memmove(to, from, bytes);
  return std::max(end, start + now_us() - begin);
}

void count_copy(MemcpyKind kind, size_t bytes, bool async) {
  auto amount = static_cast<int64_t>(bytes);
  if (kind == kHostToDevice) {
    count(async ? Counter::kH2dAsync : Counter::kH2dSync);
    count(async ? Counter::kH2dAsyncBytes : Counter::kH2dSyncBytes, amount);
  } else if (kind == kDeviceToHost) {
    count(async ? Counter::kD2hAsync : Counter::kD2hSync);
    count(async ? Counter::kD2hAsyncBytes : Counter::kD2hSyncBytes, amount);
  } else {
    count(Counter::kD2d);
    count(Counter::kD2dBytes, amount);
  }
}

void describe(Calling &call, MemcpyKind kind, const void *to, const void *from, size_t bytes) {
  call.locate();
  call->site->name += std::string(" ") + text(kind);
  call->kind = text(kind);
  call->bytes = bytes;
  call->reads = {range_of(from, bytes)};
  call->writes = {range_of(to, bytes)};
}

void copy_on_host(Calling &call, MemcpyKind kind, void *to, const void *from, size_t bytes) {
  races().host_access(call->site, call->reads, call->writes);
  copy_now(now_us(), kind, own_view(to), own_view(from), bytes);
}

}  // namespace

ACL_EXPORT aclError aclrtMemcpy(void *to, size_t, const void *from, size_t bytes, int kind_code) {
  Calling call("aclrtMemcpy");
  if (settings().dry_run) return kSuccess;
  MemcpyKind kind = resolved(kind_code, to, from);
  describe(call, kind, to, from, bytes);
  count_copy(kind, bytes, false);
  count(Counter::kSyncCopy);
  copy_on_host(call, kind, to, from, bytes);
  return kSuccess;
}

ACL_EXPORT aclError aclrtMemcpyAsync(void *to, size_t, const void *from, size_t bytes, int kind_code, void *handle) {
  Calling call("aclrtMemcpyAsync");
  if (settings().dry_run) return kSuccess;
  MemcpyKind kind = resolved(kind_code, to, from);
  describe(call, kind, to, from, bytes);
  Stream &stream = stream_of(call, handle);
  // Memory that isn't pinned is copied before the call returns, after what the stream has still to do.
  bool pageable = (kind == kHostToDevice && space_of(from) == Space::kPageable) ||
                  (kind == kDeviceToHost && space_of(to) == Space::kPageable);
  count_copy(kind, bytes, !pageable);
  if (pageable) {
    count(Counter::kPageableAsync);
    count(Counter::kSyncPageable);
    host_waits_for(stream);
    copy_on_host(call, kind, to, from, bytes);
    return kSuccess;
  }
  races().stream_access(stream.number(), call->site, call->reads, call->writes);
  char *own_to = own_view(to);
  const char *own_from = own_view(from);
  stream.push(call.shared(), [=](double start) { return copy_now(start, kind, own_to, own_from, bytes); });
  return kSuccess;
}

ACL_EXPORT aclError aclrtMemset(void *to, size_t, int value, size_t bytes) {
  Calling call("aclrtMemset");
  if (settings().dry_run) return kSuccess;
  call.locate();
  call->bytes = bytes;
  call->writes = {range_of(to, bytes)};
  count(Counter::kSyncCopy);
  races().host_access(call->site, {}, call->writes);
  memset(own_view(to), value, bytes);
  return kSuccess;
}

ACL_EXPORT aclError aclrtMemsetAsync(void *to, size_t, int value, size_t bytes, void *handle) {
  Calling call("aclrtMemsetAsync");
  if (settings().dry_run) return kSuccess;
  call.locate();
  Stream &stream = stream_of(call, handle);
  call->bytes = bytes;
  call->writes = {range_of(to, bytes)};
  races().stream_access(stream.number(), call->site, {}, call->writes);
  char *own_to = own_view(to);
  stream.push(call.shared(), operator_work([=] { memset(own_to, value, bytes); }));
  return kSuccess;
}

}  // namespace ascsim
