#include "record.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>

#include "races.h"
#include "settings.h"

namespace ascsim {
namespace {

const timespec kBegin = [] {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time;
}();

struct Recorder {
  std::mutex mutex;
  std::map<std::string, int64_t> calls;
  std::string mark;
  FILE *trace = nullptr;
  std::atomic<uint64_t> index{0};
  std::array<std::atomic<int64_t>, static_cast<size_t>(Counter::kLast)> counters{};
};

void at_end();

Recorder &recorder() {
  static Recorder *one = [] {
    auto *result = new Recorder();
    if (!settings().trace_file.empty()) result->trace = open_for_writing(settings().trace_file);
    atexit(at_end);
    return result;
  }();
  return *one;
}

std::atomic<int64_t> &cell(Counter counter) { return recorder().counters[static_cast<size_t>(counter)]; }

struct Named {
  const char *name;
  Counter counter;
};
const Named kNames[] = {
  {"device_used", Counter::kDeviceUsed},         {"device_peak", Counter::kDevicePeak},
  {"pinned_used", Counter::kPinnedUsed},         {"pinned_peak", Counter::kPinnedPeak},
  {"pinned_allocations", Counter::kPinnedAllocations},
  {"h2d_async", Counter::kH2dAsync},             {"d2h_async", Counter::kD2hAsync},
  {"h2d_sync", Counter::kH2dSync},               {"d2h_sync", Counter::kD2hSync},
  {"d2d", Counter::kD2d},                        {"pageable_async", Counter::kPageableAsync},
  {"h2d_async_bytes", Counter::kH2dAsyncBytes},  {"d2h_async_bytes", Counter::kD2hAsyncBytes},
  {"h2d_sync_bytes", Counter::kH2dSyncBytes},    {"d2h_sync_bytes", Counter::kD2hSyncBytes},
  {"d2d_bytes", Counter::kD2dBytes},             {"operators", Counter::kOperators},
};
const Named kSyncNames[] = {
  {"stream", Counter::kSyncStream}, {"event", Counter::kSyncEvent},      {"device", Counter::kSyncDevice},
  {"copy", Counter::kSyncCopy},     {"pageable_copy", Counter::kSyncPageable},
};

std::string counters_json() {
  std::string out = "{";
  for (auto &one : kNames) out += quoted(one.name) + ": " + std::to_string(counted(one.counter)) + ", ";
  out += "\"host_syncs\": {";
  const char *separator = "";
  for (auto &one : kSyncNames) {
    out += separator + quoted(one.name) + ": " + std::to_string(counted(one.counter));
    separator = ", ";
  }
  out += "}, \"races\": " + std::to_string(races().count()) + ", \"calls\": {";
  std::lock_guard<std::mutex> lock(recorder().mutex);
  separator = "";
  for (auto &one : recorder().calls) {
    out += separator + quoted(one.first) + ": " + std::to_string(one.second);
    separator = ", ";
  }
  return out + "}}";
}

void at_end() {
  if (!settings().counters_file.empty()) {
    FILE *file = open_for_writing(settings().counters_file);
    fprintf(file, "%s\n", counters_json().c_str());
    fclose(file);
  }
  {
    std::lock_guard<std::mutex> lock(recorder().mutex);
    if (recorder().trace != nullptr) fflush(recorder().trace);
  }
  races().report_at_end();
}

void write_line(const std::string &line) {
  std::lock_guard<std::mutex> lock(recorder().mutex);
  if (recorder().trace != nullptr) fprintf(recorder().trace, "%s\n", line.c_str());
}

// Python's own functions, found at run time: the emulator doesn't link against Python.
struct Python {
  int (*holds_gil)();
  void *(*frame)();
  void *(*code_of)(void *);
  void *(*back_of)(void *);
  int (*line_of)(void *);
  void *(*attribute)(void *, const char *);
  const char *(*text)(void *);
  void (*release)(void *);
  bool usable;
  Python() {
    auto find = [](auto &function, const char *name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(RTLD_DEFAULT, name));
      return function != nullptr;
    };
    usable = find(holds_gil, "PyGILState_Check") & find(frame, "PyEval_GetFrame") & find(code_of, "PyFrame_GetCode") &
             find(back_of, "PyFrame_GetBack") & find(line_of, "PyFrame_GetLineNumber") &
             find(attribute, "PyObject_GetAttrString") & find(text, "PyUnicode_AsUTF8") & find(release, "Py_DecRef");
  }
  std::string string_of(void *object, const char *name) const {
    void *value = attribute(object, name);
    const char *utf8 = value != nullptr ? text(value) : nullptr;
    std::string result = utf8 != nullptr ? utf8 : "?";
    if (value != nullptr) release(value);
    return result;
  }
};

// The innermost line of Python outside MindSpore and numpy, if this thread is running Python just now. MindSpore
// dispatches most operators from threads of its own, which know no line.
std::string python_site() {
  static const Python python;
  if (!python.usable || python.holds_gil() == 0) return "";
  void *borrowed = python.frame();
  std::string first;
  void *owned = nullptr;
  for (void *frame = borrowed; frame != nullptr;) {
    void *code = python.code_of(frame);
    std::string file = python.string_of(code, "co_filename");
    std::string place = file + ":" + std::to_string(python.line_of(frame)) + " in " + python.string_of(code, "co_name");
    python.release(code);
    if (first.empty()) first = place;
    bool outside = file.find("/mindspore/") == std::string::npos && file.find("/numpy/") == std::string::npos;
    void *back = outside ? nullptr : python.back_of(frame);
    if (owned != nullptr) python.release(owned);
    owned = back;
    if (outside) return place;
    frame = back;
  }
  return first;
}

std::string last_error;
std::mutex error_mutex;

}  // namespace

double now_us() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (time.tv_sec - kBegin.tv_sec) * 1e6 + (time.tv_nsec - kBegin.tv_nsec) / 1e3;
}

void sleep_until_us(double when) {
  constexpr double kNotWorthIt = 5;
  if (when - now_us() < kNotWorthIt) return;
  double nanoseconds = when * 1e3 + kBegin.tv_nsec;
  timespec time{};
  time.tv_sec = kBegin.tv_sec + static_cast<time_t>(nanoseconds / 1e9);
  time.tv_nsec = static_cast<long>(nanoseconds - static_cast<double>(time.tv_sec - kBegin.tv_sec) * 1e9);
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, nullptr) == EINTR) {
  }
}

FILE *open_for_writing(const std::string &path) {
  FILE *file = fopen(path.c_str(), "w");
  if (file == nullptr) {
    fprintf(stderr, "ascend emulator: cannot write %s: %s\n", path.c_str(), strerror(errno));
    fflush(stderr);
    _exit(2);
  }
  return file;
}

Calling::Calling(const char *name) : call_(std::make_shared<Call>()) {
  auto &record = recorder();
  call_->site = std::make_shared<Site>();
  call_->site->index = record.index++;
  call_->site->name = name;
  call_->site->thread = syscall(SYS_gettid);
  call_->called = now_us();
  std::lock_guard<std::mutex> lock(record.mutex);
  ++record.calls[name];
  call_->site->mark = record.mark;
}

Calling::~Calling() { call_->returned = now_us(); }

void Calling::locate() const {
  if (settings().races == Races::kOff && settings().trace_file.empty()) return;
  call_->site->where = python_site();
  char name[32] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  call_->site->thread_name = name;
}

Call::~Call() {
  if (recorder().trace == nullptr) return;
  char times[160];
  snprintf(times, sizeof times,
           ", \"called\": %.1f, \"returned\": %.1f, \"start\": %.1f, \"end\": %.1f, \"bytes\": %zu", called,
           returned, start < 0 ? called : start, end < 0 ? returned : end, bytes);
  std::string line = json(*site);
  line.pop_back();
  line += std::string(times) + ", \"kind\": " + quoted(kind) + ", \"event\": " + std::to_string(event);
  write_line(line + ", \"reads\": " + json(reads) + ", \"writes\": " + json(writes) + "}");
}

void count(Counter counter, int64_t by) { cell(counter) += by; }

void count_used(Counter used, Counter peak, int64_t by) {
  int64_t now = cell(used) += by;
  int64_t seen = cell(peak);
  while (now > seen && !cell(peak).compare_exchange_weak(seen, now)) {
  }
}

int64_t counted(Counter counter) { return cell(counter); }

std::string quoted(const std::string &text) {
  std::string out = "\"";
  for (unsigned char character : text) {
    if (character == '"' || character == '\\') {
      out += '\\';
      out += static_cast<char>(character);
    } else if (character < 0x20) {
      char escaped[8];
      snprintf(escaped, sizeof escaped, "\\u%04x", character);
      out += escaped;
    } else {
      out += static_cast<char>(character);
    }
  }
  return out + "\"";
}

std::string json(const Site &site) {
  return "{\"index\": " + std::to_string(site.index) + ", \"name\": " + quoted(site.name) +
         ", \"stream\": " + std::to_string(site.stream) + ", \"thread\": " + std::to_string(site.thread) +
         ", \"thread_name\": " + quoted(site.thread_name) + ", \"where\": " + quoted(site.where) +
         ", \"mark\": " + quoted(site.mark) + "}";
}

std::string json(const std::vector<Range> &ranges) {
  std::string out = "[";
  for (auto &range : ranges) {
    if (out.size() > 1) out += ", ";
    out += "[" + std::to_string(range.begin) + ", " + std::to_string(range.end) + "]";
  }
  return out + "]";
}

aclError fail(aclError code, const char *format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  fprintf(stderr, "ascend emulator: %s\n", text);
  std::lock_guard<std::mutex> lock(error_mutex);
  last_error = std::string("ascend emulator: ") + text;
  return code;
}

ACL_EXPORT const char *aclGetRecentErrMsg() {
  thread_local std::string mine;
  std::lock_guard<std::mutex> lock(error_mutex);
  mine.swap(last_error);
  last_error.clear();
  return mine.c_str();
}

// JSON into `out`, cut off at `size`; returns the size that all of it needs.
static size_t hand_out(const std::string &text, char *out, size_t size) {
  if (out != nullptr && size > 0) snprintf(out, size, "%s", text.c_str());
  return text.size() + 1;
}

ACL_EXPORT size_t ascsim_counters_json(char *out, size_t size) { return hand_out(counters_json(), out, size); }
ACL_EXPORT size_t ascsim_races_json(char *out, size_t size) { return hand_out(races().json(), out, size); }
ACL_EXPORT void ascsim_races_reset() { races().forget(); }

// Counts begin again at 0; what is in use stays, and is the new peak.
ACL_EXPORT void ascsim_counters_reset() {
  auto &record = recorder();
  int64_t device = counted(Counter::kDeviceUsed), pinned = counted(Counter::kPinnedUsed);
  for (auto &counter : record.counters) counter = 0;
  count_used(Counter::kDeviceUsed, Counter::kDevicePeak, device);
  count_used(Counter::kPinnedUsed, Counter::kPinnedPeak, pinned);
  std::lock_guard<std::mutex> lock(record.mutex);
  record.calls.clear();
}

// Writes a mark into the trace; calls that follow carry it.
ACL_EXPORT void ascsim_mark(const char *text) {
  {
    std::lock_guard<std::mutex> lock(recorder().mutex);
    recorder().mark = text != nullptr ? text : "";
  }
  Calling call("mark");
}

}  // namespace ascsim
