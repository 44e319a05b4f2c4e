#include "races.h"

#include <unistd.h>

#include <cstdio>

#include "host_access.h"
#include "memory.h"
#include "settings.h"

namespace ascsim {
namespace {

constexpr size_t kHost = 0;
constexpr int kRaceExitCode = 86;

size_t timeline_of(int stream) { return static_cast<size_t>(stream) + 1; }

const char *verb(AccessKind kind) {
  switch (kind) {
    case AccessKind::kRead: return "reads";
    case AccessKind::kWrite: return "writes";
    default: return "frees";
  }
}

std::string name_of(size_t timeline) {
  return timeline == kHost ? "the host" : "stream " + std::to_string(timeline - 1);
}

std::string describe(const Access &access) {
  std::string out = access.site->name + " (ACL call " + std::to_string(access.site->index) + ", " +
                    name_of(access.timeline) + ", thread " + std::to_string(access.site->thread);
  if (!access.site->thread_name.empty()) out += " " + access.site->thread_name;
  if (!access.site->where.empty()) out += ", " + access.site->where;
  if (!access.site->mark.empty()) out += ", mark '" + access.site->mark + "'";
  char range[64];
  snprintf(range, sizeof range, ") %s 0x%zx-0x%zx", verb(access.kind), static_cast<size_t>(access.range.begin),
           static_cast<size_t>(access.range.end));
  return out + range;
}

std::string json_of(const Access &access) {
  std::string out = json(*access.site);
  out.pop_back();
  return out + ", \"access\": " + quoted(verb(access.kind)) + ", \"timeline\": " + quoted(name_of(access.timeline)) +
         ", \"range\": [" + std::to_string(access.range.begin) + ", " + std::to_string(access.range.end) + "]}";
}

bool is_pinned(Range range) { return range.begin < range.end && space_of(range.begin) == Space::kPinned; }

bool watched(Range range) { return range.begin < range.end && space_of(range.begin) != Space::kPageable; }

}  // namespace

RaceChecker &races() {
  static auto *one = new RaceChecker();
  return *one;
}

RaceChecker::RaceChecker() : on_(settings().races != Races::kOff && !settings().dry_run) {}

Clock &RaceChecker::clock(size_t timeline) {
  if (clocks_.size() <= timeline) clocks_.resize(timeline + 1);
  return clocks_[timeline];
}

Clock RaceChecker::clock_of(int stream) {
  if (!on_) return {};
  std::lock_guard<std::mutex> lock(mutex_);
  clock(timeline_of(stream)).join(clock(kHost));
  return clock(timeline_of(stream));
}

void RaceChecker::stream_joins(int stream, const Clock &other) {
  if (!on_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  clock(timeline_of(stream)).join(other);
}

void RaceChecker::host_joins(const Clock &other) {
  if (!on_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  clock(kHost).join(other);
  open_to_host(clock(kHost));
}

uint64_t RaceChecker::tick_of(int stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  return clock(timeline_of(stream)).at(timeline_of(stream));
}

void RaceChecker::callback_done(int stream, uint64_t tick) {
  if (!on_ || settings().strict_pinned > 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  released_.reach(timeline_of(stream), tick);
  open_read(released_);
}

void RaceChecker::stream_access(int stream, const SitePtr &site, const std::vector<Range> &reads,
                                const std::vector<Range> &writes) {
  if (!on_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  size_t timeline = timeline_of(stream);
  clock(timeline).join(clock(kHost));
  access(timeline, site, reads, writes);
  uint64_t tick = clock(timeline).at(timeline);
  for (Range range : reads) {
    if (is_pinned(range)) close_to_host(range, false, timeline, tick);
  }
  for (Range range : writes) {
    if (is_pinned(range)) close_to_host(range, true, timeline, tick);
  }
}

void RaceChecker::host_access(const SitePtr &site, const std::vector<Range> &reads, const std::vector<Range> &writes) {
  if (!on_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  access(kHost, site, reads, writes);
}

void RaceChecker::access(size_t timeline, const SitePtr &site, const std::vector<Range> &reads,
                         const std::vector<Range> &writes) {
  uint64_t tick = clock(timeline).tick(timeline);
  const Clock &now = clock(timeline);
  for (Range range : reads) {
    if (watched(range)) read({timeline, tick, AccessKind::kRead, site, range}, now);
  }
  for (Range range : writes) {
    if (watched(range)) write({timeline, tick, AccessKind::kWrite, site, range}, now);
  }
}

void RaceChecker::split(uintptr_t address) {
  auto next = stretches_.upper_bound(address);
  if (next == stretches_.begin()) return;
  auto &before = *std::prev(next);
  if (before.first >= address || before.second.end <= address) return;
  Stretch rest = before.second;
  before.second.end = address;
  stretches_.emplace(address, std::move(rest));
}

// Makes stretches begin and end where the range does, without gaps in it.
void RaceChecker::fill(Range range) {
  split(range.begin);
  split(range.end);
  uintptr_t at = range.begin;
  while (at < range.end) {
    auto next = stretches_.lower_bound(at);
    if (next != stretches_.end() && next->first == at) {
      at = next->second.end;
      continue;
    }
    uintptr_t end = next == stretches_.end() ? range.end : std::min(range.end, next->first);
    stretches_[at].end = end;
    at = end;
  }
}

void RaceChecker::check(const Access &earlier, const Access &later, const Clock &now, Range overlap) {
  if (earlier.tick == 0 || earlier.before(now)) return;
  if (earlier.kind == AccessKind::kRead && earlier.before(released_) && is_pinned(earlier.range)) return;
  add(earlier, later, overlap);
}

void RaceChecker::read(const Access &access, const Clock &now) {
  fill(access.range);
  auto it = stretches_.lower_bound(access.range.begin);
  for (; it != stretches_.end() && it->first < access.range.end; ++it) {
    Stretch &stretch = it->second;
    check(stretch.write, access, now, {it->first, stretch.end});
    auto same = std::find_if(stretch.reads.begin(), stretch.reads.end(),
                             [&](const Access &other) { return other.timeline == access.timeline; });
    if (same != stretch.reads.end()) {
      *same = access;
    } else {
      stretch.reads.push_back(access);
    }
  }
}

void RaceChecker::write(const Access &access, const Clock &now) {
  fill(access.range);
  auto begin = stretches_.lower_bound(access.range.begin), end = begin;
  for (; end != stretches_.end() && end->first < access.range.end; ++end) {
    Range overlap{end->first, end->second.end};
    check(end->second.write, access, now, overlap);
    for (auto &read : end->second.reads) check(read, access, now, overlap);
  }
  stretches_.erase(begin, end);
  if (access.kind == AccessKind::kFree) return;
  stretches_[access.range.begin] = {access.range.end, access, {}};
}

void RaceChecker::released(const SitePtr &site, Range range) {
  if (!on_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t tick = clock(kHost).tick(kHost);
  write({kHost, tick, AccessKind::kFree, site, range}, clock(kHost));
  forget_closed(range);
}

void RaceChecker::host_touch(uintptr_t address, bool is_write, const SitePtr &site) {
  if (!on_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  auto next = stretches_.upper_bound(address);
  if (next == stretches_.begin()) return;
  --next;
  if (next->second.end <= address) return;
  const Clock &now = clock(kHost);
  AccessKind kind = is_write ? AccessKind::kWrite : AccessKind::kRead;
  Access access{kHost, now.at(kHost) + 1, kind, site, {address, address + 1}};
  check(next->second.write, access, now, access.range);
  if (is_write) {
    for (auto &read : next->second.reads) check(read, access, now, access.range);
  }
}

void RaceChecker::add(const Access &first, const Access &second, Range overlap) {
  std::string key;
  for (auto *access : {&first, &second}) {
    key += access->site->name + "|" + access->site->where + "|" + access->site->mark + "|" +
           std::to_string(access->timeline) + "|" + verb(access->kind) + "|";
  }
  auto known = found_.find(key);
  if (known != found_.end()) {
    ++known->second.times;
    return;
  }
  found_[key] = {first, second, overlap, is_pinned(overlap), 1};
  order_.push_back(key);
}

size_t RaceChecker::count() {
  std::lock_guard<std::mutex> lock(mutex_);
  return order_.size();
}

std::string RaceChecker::text(const Race &race) const {
  std::string out = "race on " + std::string(race.pinned ? "pinned" : "device") +
                    " memory: " + describe(race.second) + "\n  while nothing orders it after " + describe(race.first);
  if (race.times > 1) out += "\n  " + std::to_string(race.times) + " times";
  return out;
}

std::string RaceChecker::json(const Race &race) const {
  return "{\"kind\": " + quoted(std::string(verb(race.second.kind)) + " what another " + verb(race.first.kind)) +
         ", \"memory\": " + quoted(race.pinned ? "pinned" : "device") +
         ", \"first\": " + json_of(race.first) + ", \"second\": " + json_of(race.second) + ", \"overlap\": [" +
         std::to_string(race.overlap.begin) + ", " + std::to_string(race.overlap.end) +
         "], \"times\": " + std::to_string(race.times) + ", \"text\": " + quoted(text(race)) + "}";
}

std::string RaceChecker::json_of_all() const {
  std::string out = "[";
  for (auto &key : order_) out += (out.size() > 1 ? ",\n " : "") + json(found_.at(key));
  return out + "]";
}

std::string RaceChecker::json() {
  std::lock_guard<std::mutex> lock(mutex_);
  return json_of_all();
}

void RaceChecker::forget() {
  std::lock_guard<std::mutex> lock(mutex_);
  found_.clear();
  order_.clear();
}

void RaceChecker::report_at_end() {
  if (!on_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto &key : order_) fprintf(stderr, "ascend emulator: %s\n", text(found_[key]).c_str());
  if (!settings().races_file.empty()) {
    FILE *file = open_for_writing(settings().races_file);
    fprintf(file, "%s\n", json_of_all().c_str());
    fclose(file);
  }
  if (order_.empty()) return;
  fprintf(stderr, "ascend emulator: %zu races\n", order_.size());
  fflush(nullptr);
  if (settings().races == Races::kRaise) _exit(kRaceExitCode);
}

}  // namespace ascsim
