#include "host_access.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "races.h"
#include "record.h"
#include "settings.h"

namespace ascsim {
namespace {

constexpr uintptr_t kPage = 4096;

struct Closed {
  Range pages;
  bool written;
  size_t timeline;
  uint64_t tick;
  bool holds(uintptr_t address) const { return pages.begin <= address && address < pages.end; }
  bool overlaps(Range range) const { return pages.begin < range.end && range.begin < pages.end; }
};

struct Table {
  std::mutex mutex;
  std::vector<Closed> all;
};

Table &table() {
  static auto *one = new Table();
  return *one;
}

void protect(Range pages, int protection) {
  mprotect(reinterpret_cast<void *>(pages.begin), pages.end - pages.begin, protection);
}

void close_pages(const Closed &closed) { protect(closed.pages, closed.written ? PROT_NONE : PROT_READ); }

// Takes out of the table what `done` names, opens it, and closes again what others still hold of it.
template <class Done>
size_t open_pages(Done done) {
  auto &all = table().all;
  auto first = std::stable_partition(all.begin(), all.end(), [&](const Closed &closed) { return !done(closed); });
  std::vector<Closed> gone(first, all.end());
  all.erase(first, all.end());
  for (const Closed &closed : gone) protect(closed.pages, PROT_READ | PROT_WRITE);
  for (bool written : {false, true}) {  // the stricter last
    for (const Closed &closed : all) {
      bool again = closed.written == written &&
                   std::any_of(gone.begin(), gone.end(), [&](const Closed &one) { return one.overlaps(closed.pages); });
      if (again) close_pages(closed);
    }
  }
  return gone.size();
}

struct sigaction former_handler;

void hand_on(int number, siginfo_t *information, void *context) {
  if ((former_handler.sa_flags & SA_SIGINFO) != 0 && former_handler.sa_sigaction != nullptr) {
    former_handler.sa_sigaction(number, information, context);
  } else if (former_handler.sa_handler != SIG_DFL && former_handler.sa_handler != SIG_IGN) {
    former_handler.sa_handler(number);
  } else {
    signal(number, SIG_DFL);  // the instruction is tried again, and ends the program
  }
}

// A fault comes from the host's own instruction, never from inside the emulator, which uses its own view: none of the
// locks taken here can be held by this thread.
void on_fault(int number, siginfo_t *information, void *context) {
  auto address = reinterpret_cast<uintptr_t>(information->si_addr);
  {
    std::lock_guard<std::mutex> lock(table().mutex);
    auto &all = table().all;
    bool ours = std::any_of(all.begin(), all.end(), [&](const Closed &one) { return one.holds(address); });
    if (!ours) return hand_on(number, information, context);
  }
  constexpr long kWriteBit = 2;
  bool is_write = (static_cast<ucontext_t *>(context)->uc_mcontext.gregs[REG_ERR] & kWriteBit) != 0;
  {
    Calling call(is_write ? "the program's write" : "the program's read");
    call.locate();
    call->reads = {{address, address + 1}};
    races().host_touch(address, is_write, call->site);
  }
  std::lock_guard<std::mutex> lock(table().mutex);
  open_pages([&](const Closed &one) { return one.holds(address); });
}

void install_handler() {
  static const bool done = [] {
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    return sigaction(SIGSEGV, &action, &former_handler) == 0;
  }();
  (void)done;
}

}  // namespace

void close_to_host(Range range, bool written, size_t timeline, uint64_t tick) {
  if (!settings().host_access) return;
  Closed closed{{(range.begin + kPage - 1) / kPage * kPage, range.end / kPage * kPage}, written, timeline, tick};
  if (closed.pages.begin >= closed.pages.end) return;
  install_handler();
  std::lock_guard<std::mutex> lock(table().mutex);
  table().all.push_back(closed);
  bool stricter = std::any_of(table().all.begin(), table().all.end(), [&](const Closed &one) {
    return one.written && !written && one.overlaps(closed.pages);
  });
  if (!stricter) {
    close_pages(closed);
    return;
  }
  for (const Closed &one : table().all) {
    if (one.written && one.overlaps(closed.pages)) close_pages(one);
  }
}

void open_to_host(const Clock &host) {
  std::lock_guard<std::mutex> lock(table().mutex);
  if (table().all.empty()) return;
  open_pages([&](const Closed &one) { return one.tick <= host.at(one.timeline); });
}

void open_read(const Clock &released) {
  std::lock_guard<std::mutex> lock(table().mutex);
  open_pages([&](const Closed &one) { return !one.written && one.tick <= released.at(one.timeline); });
}

void forget_closed(Range block) {
  std::lock_guard<std::mutex> lock(table().mutex);
  open_pages([&](const Closed &one) { return one.overlaps(block); });
}

}  // namespace ascsim
