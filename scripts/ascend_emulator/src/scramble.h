// Random bits from a number, the same on every machine.
#pragma once
#include <cstdint>

namespace ascsim {

// The last step of splitmix64.
inline uint64_t scrambled(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
  return value ^ (value >> 31);
}

// In [0, 1).
inline double fraction(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1.0p-53; }

}  // namespace ascsim
