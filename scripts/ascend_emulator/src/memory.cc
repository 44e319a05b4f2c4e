#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <mutex>

#include "races.h"
#include "record.h"
#include "settings.h"

namespace ascsim {
namespace {

constexpr size_t kPage = 4096;

struct Block {
  size_t bytes;
  Space space;
  char *view;  // of pinned memory: its second mapping
};

struct Blocks {
  std::mutex mutex;
  std::map<uintptr_t, Block> all;
  std::map<void *, size_t> mapped;  // physical pieces, in reserved addresses

  const std::pair<const uintptr_t, Block> *find(uintptr_t address) const {
    auto next = all.upper_bound(address);
    if (next == all.begin()) return nullptr;
    --next;
    return address < next->first + next->second.bytes ? &*next : nullptr;
  }
};

Blocks &blocks() {
  static auto *one = new Blocks();
  return *one;
}

size_t whole_pages(size_t bytes) { return bytes == 0 ? kPage : (bytes + kPage - 1) / kPage * kPage; }

void *map_anonymous(size_t bytes) {
  void *result = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return result == MAP_FAILED ? nullptr : result;
}

// Takes device memory from the limit; false: there isn't as much left.
bool take_device(size_t bytes) {
  std::lock_guard<std::mutex> lock(blocks().mutex);
  if (counted(Counter::kDeviceUsed) + static_cast<int64_t>(bytes) > hbm_bytes()) {
    fprintf(stderr, "ascend emulator: out of device memory: %zu bytes asked for, %lld of %lld in use (ASCSIM_HBM_MB)\n",
            bytes, static_cast<long long>(counted(Counter::kDeviceUsed)), static_cast<long long>(hbm_bytes()));
    return false;
  }
  count_used(Counter::kDeviceUsed, Counter::kDevicePeak, static_cast<int64_t>(bytes));
  return true;
}

void give_device(size_t bytes) { count(Counter::kDeviceUsed, -static_cast<int64_t>(bytes)); }

void add_block(void *pointer, Block block) {
  std::lock_guard<std::mutex> lock(blocks().mutex);
  blocks().all[reinterpret_cast<uintptr_t>(pointer)] = block;
}

// Takes the block that begins at `pointer` out of the table.
bool remove_block(const void *pointer, Block *out) {
  std::lock_guard<std::mutex> lock(blocks().mutex);
  auto found = blocks().all.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == blocks().all.end()) return false;
  *out = found->second;
  blocks().all.erase(found);
  return true;
}

// A pinned block: one piece of memory, mapped twice.
void *map_pinned(size_t bytes, char **view) {
  int file = memfd_create("ascsim_pinned", MFD_CLOEXEC);
  if (file < 0) return nullptr;
  void *result = MAP_FAILED;
  if (ftruncate(file, static_cast<off_t>(bytes)) == 0) {
    result = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    void *second = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    *view = static_cast<char *>(second);
    if (result == MAP_FAILED || second == MAP_FAILED) result = MAP_FAILED;
  }
  close(file);
  return result == MAP_FAILED ? nullptr : result;
}

aclError free_block(Calling &call, void *pointer) {
  call.locate();
  Block block{};
  if (pointer == nullptr) return kSuccess;
  {
    std::lock_guard<std::mutex> lock(blocks().mutex);
    auto found = blocks().all.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == blocks().all.end()) {
      return fail(kInvalidParameter, "%s: %p is not the begin of an allocated block", call->site->name.c_str(),
                  pointer);
    }
    block = found->second;
  }
  races().released(call->site, range_of(pointer, block.bytes));
  remove_block(pointer, &block);
  call->bytes = block.bytes;
  munmap(pointer, block.bytes);
  if (block.view != nullptr) munmap(block.view, block.bytes);
  if (block.space == Space::kPinned) {
    count(Counter::kPinnedUsed, -static_cast<int64_t>(block.bytes));
  } else {
    give_device(block.bytes);
  }
  return kSuccess;
}

aclError allocate_device(Calling &call, void **out, size_t bytes) {
  bytes = whole_pages(bytes);
  call->bytes = bytes;
  if (!take_device(bytes)) return kOutOfMemory;
  *out = map_anonymous(bytes);
  if (*out == nullptr) {
    give_device(bytes);
    return fail(kOutOfMemory, "this machine has no %zu bytes for emulated device memory", bytes);
  }
  add_block(*out, {bytes, Space::kDevice, nullptr});
  return kSuccess;
}

struct Physical {
  size_t bytes;
};

}  // namespace

Space space_of(uintptr_t address) {
  std::lock_guard<std::mutex> lock(blocks().mutex);
  auto *block = blocks().find(address);
  return block != nullptr ? block->second.space : Space::kPageable;
}

Space space_of(const void *pointer) { return space_of(reinterpret_cast<uintptr_t>(pointer)); }

char *own_view(const void *pointer) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(blocks().mutex);
  auto *block = blocks().find(address);
  if (block == nullptr || block->second.view == nullptr) return const_cast<char *>(static_cast<const char *>(pointer));
  return block->second.view + (address - block->first);
}

ACL_EXPORT aclError aclrtGetMemInfo(int, size_t *free_bytes, size_t *total) {
  Calling call("aclrtGetMemInfo");
  auto limit = static_cast<size_t>(hbm_bytes());
  if (total != nullptr) *total = limit;
  if (free_bytes != nullptr) *free_bytes = limit - static_cast<size_t>(counted(Counter::kDeviceUsed));
  return kSuccess;
}

ACL_EXPORT aclError aclrtMalloc(void **out, size_t bytes, int) {
  Calling call("aclrtMalloc");
  return allocate_device(call, out, bytes);
}

ACL_EXPORT aclError aclrtMallocAlign32(void **out, size_t bytes, int) {
  Calling call("aclrtMallocAlign32");
  return allocate_device(call, out, bytes);
}

ACL_EXPORT aclError aclrtFree(void *pointer) {
  Calling call("aclrtFree");
  return free_block(call, pointer);
}

ACL_EXPORT aclError aclrtMallocHost(void **out, size_t bytes) {
  Calling call("aclrtMallocHost");
  call.locate();
  bytes = whole_pages(bytes);
  call->bytes = bytes;
  char *view = nullptr;
  *out = map_pinned(bytes, &view);
  if (*out == nullptr) return fail(kOutOfMemory, "aclrtMallocHost: this machine cannot pin %zu bytes", bytes);
  add_block(*out, {bytes, Space::kPinned, view});
  count_used(Counter::kPinnedUsed, Counter::kPinnedPeak, static_cast<int64_t>(bytes));
  count(Counter::kPinnedAllocations);
  return kSuccess;
}

ACL_EXPORT aclError aclrtFreeHost(void *pointer) {
  Calling call("aclrtFreeHost");
  return free_block(call, pointer);
}

// MindSpore's virtual memory: it reserves addresses, and maps physical pieces into them. Here the addresses are memory
// from the begin; a physical piece is only its size, which counts against the device's limit.
ACL_EXPORT aclError aclrtReserveMemAddress(void **out, size_t bytes, size_t, void *, uint64_t) {
  Calling call("aclrtReserveMemAddress");
  call->bytes = bytes;
  *out = map_anonymous(bytes);
  if (*out == nullptr) return fail(kOutOfMemory, "aclrtReserveMemAddress: no %zu bytes of addresses", bytes);
  add_block(*out, {bytes, Space::kDevice, nullptr});
  return kSuccess;
}

ACL_EXPORT aclError aclrtReleaseMemAddress(void *pointer) {
  Calling call("aclrtReleaseMemAddress");
  Block block{};
  if (!remove_block(pointer, &block)) return fail(kInvalidParameter, "aclrtReleaseMemAddress: %p is unknown", pointer);
  munmap(pointer, block.bytes);
  return kSuccess;
}

ACL_EXPORT aclError aclrtMallocPhysical(void **out, size_t bytes, const void *, uint64_t) {
  Calling call("aclrtMallocPhysical");
  call->bytes = bytes;
  if (!take_device(bytes)) return kOutOfMemory;
  *out = new Physical{bytes};
  return kSuccess;
}

ACL_EXPORT aclError aclrtFreePhysical(void *handle) {
  Calling call("aclrtFreePhysical");
  auto *piece = static_cast<Physical *>(handle);
  if (piece == nullptr) return kSuccess;
  give_device(piece->bytes);
  delete piece;
  return kSuccess;
}

ACL_EXPORT aclError aclrtMapMem(void *pointer, size_t bytes, size_t, void *, uint64_t) {
  Calling call("aclrtMapMem");
  call->bytes = bytes;
  std::lock_guard<std::mutex> lock(blocks().mutex);
  blocks().mapped[pointer] = bytes;
  return kSuccess;
}

ACL_EXPORT aclError aclrtUnmapMem(void *pointer) {
  Calling call("aclrtUnmapMem");
  call.locate();
  {
    std::lock_guard<std::mutex> lock(blocks().mutex);
    auto found = blocks().mapped.find(pointer);
    if (found == blocks().mapped.end()) {
      return fail(kInvalidParameter, "aclrtUnmapMem: nothing is mapped at %p", pointer);
    }
    call->bytes = found->second;
    blocks().mapped.erase(found);
  }
  races().released(call->site, range_of(pointer, call->bytes));
  return kSuccess;
}

ACL_EXPORT int halHostRegister(void *pointer, uint64_t, uint32_t, uint32_t, void **out) {
  Calling call("halHostRegister");
  if (out != nullptr) *out = pointer;
  return 0;
}

}  // namespace ascsim
