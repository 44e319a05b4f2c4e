// The device as a whole: what MindSpore asks before it creates anything.
#include <unistd.h>

#include "record.h"
#include "settings.h"

namespace ascsim {
namespace {

int the_context;

}  // namespace

ACL_EXPORT aclError aclInit(const char *) {
  settings();  // a wrong setting is told before anything runs
  Calling call("aclInit");
  return kSuccess;
}

ACL_EXPORT aclError aclFinalize() { return kSuccess; }
ACL_EXPORT const char *aclrtGetSocName() { return "Ascend910B2"; }

ACL_EXPORT aclError aclrtSetDevice(int) { return kSuccess; }
ACL_EXPORT aclError aclrtResetDevice(int) { return kSuccess; }

ACL_EXPORT aclError aclrtGetDevice(int *device) {
  *device = 0;
  return kSuccess;
}

ACL_EXPORT aclError aclrtGetDeviceCount(uint32_t *count) {
  *count = 1;
  return kSuccess;
}

ACL_EXPORT aclError aclrtGetRunMode(int *mode) {
  constexpr int kHost = 1;
  *mode = kHost;
  return kSuccess;
}

ACL_EXPORT aclError aclrtCreateContext(void **context, int) {
  *context = &the_context;
  return kSuccess;
}

ACL_EXPORT aclError aclrtGetCurrentContext(void **context) {
  *context = &the_context;
  return kSuccess;
}

// MindSpore calls this in a loop of a thread of its own: it must take its time, or the thread spins.
ACL_EXPORT aclError aclrtProcessReport(int milliseconds) {
  usleep(1000 * static_cast<useconds_t>(milliseconds > 0 ? milliseconds : 1));
  return kSuccess;
}

// Numbers of compute cores.
ACL_EXPORT aclError aclrtGetDeviceResLimit(int, int, uint32_t *value) {
  *value = 24;
  return kSuccess;
}

ACL_EXPORT aclError aclrtGetStreamResLimit(void *, int, uint32_t *value) {
  *value = 24;
  return kSuccess;
}

ACL_EXPORT aclError aclrtGetResInCurrentThread(int, uint32_t *value) {
  *value = 24;
  return kSuccess;
}

}  // namespace ascsim
