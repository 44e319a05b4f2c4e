// The host's own reads and writes of pinned memory, which no ACL call tells of.
//
// Note: [Closed pages]
// From the call of an asynchronous copy until the host has synchronised with it, the pages of the copy's pinned memory
// are closed to the host: against writing if the copy reads them, against everything if it writes them. A touch is a
// fault of the processor; the handler reports it as a race, opens the pages, and lets the program go on. The copy
// itself goes through a second mapping (own_view). Only pages that belong to the copy entirely are closed: memory
// beside it, on the same page, is nobody's mistake. A system call that is given closed memory (writing it to a file)
// fails with EFAULT.
#pragma once
#include "acl.h"

namespace ascsim {

class Clock;

// Closes a pinned range that the work `tick` of a timeline uses.
void close_to_host(Range range, bool written, size_t timeline, uint64_t tick);
// Opens what the host is ordered after by now.
void open_to_host(const Clock &host);
// Opens what is closed for a read that has ended, see [Pinned sources].
void open_read(const Clock &released);
// Forgets a block that is freed.
void forget_closed(Range block);

}  // namespace ascsim
