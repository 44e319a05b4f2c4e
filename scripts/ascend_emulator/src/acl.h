// What AscendCL's own headers would say: the few codes and types that cross its C interface.
#pragma once
#include <cstddef>
#include <cstdint>

#define ACL_EXPORT extern "C" __attribute__((visibility("default")))

using aclError = int;

namespace ascsim {

constexpr aclError kSuccess = 0;
constexpr aclError kInvalidParameter = 100000;
constexpr aclError kNotSupported = 207000;
constexpr aclError kOutOfMemory = 207001;
constexpr aclError kMissingOperator = 561000;

enum MemcpyKind { kHostToHost = 0, kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3, kDefault = 4 };

// A half-open range of addresses.
struct Range {
  uintptr_t begin = 0;
  uintptr_t end = 0;
};

inline Range range_of(const void *pointer, size_t bytes) {
  auto begin = reinterpret_cast<uintptr_t>(pointer);
  return {begin, begin + bytes};
}

// Puts a message to stderr and keeps it for aclGetRecentErrMsg, from where MindSpore puts it into its exception.
aclError fail(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace ascsim
