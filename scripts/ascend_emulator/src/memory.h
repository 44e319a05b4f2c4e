// Device memory and pinned host memory, both of them memory of this machine.
#pragma once
#include "acl.h"

namespace ascsim {

enum class Space { kDevice, kPinned, kPageable };

// Which memory an address belongs to.
Space space_of(const void *pointer);
Space space_of(uintptr_t address);

// Where the emulator itself reaches a byte: pinned memory has a second mapping, since the first is closed to the host
// while a copy uses it (see host_access.h).
char *own_view(const void *pointer);

}  // namespace ascsim
