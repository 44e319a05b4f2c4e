"""The Ascend back end: copy streams and events, pinned host memory, copies that nobody waits for on the host."""
