// Functions of CANN that the emulator doesn't have. MindSpore must find every one of them when it is loaded; the build
// makes a stub for each, which comes here with its name.
#include <cstdio>
#include <cstring>
#include <string>

#include "record.h"
#include "settings.h"

namespace ascsim {
namespace {

constexpr char kAskWorkspace[] = "GetWorkspaceSize";

bool begins_with(const std::string &name, const char *begin) { return name.rfind(begin, 0) == 0; }

bool ends_with(const std::string &name, const char *end) {
  size_t length = strlen(end);
  return name.size() >= length && name.compare(name.size() - length, length, end) == 0;
}

}  // namespace

// Returns what the missing function answers. What would compute or communicate fails by its name; the rest (logging,
// profiling, settings of the device) has nothing to do here and answers 0.
extern "C" aclError ascsim_missing(const char *function) {
  std::string name = function;
  if (begins_with(name, "_Z")) return kSuccess;  // C++ of the graph engine: nobody uses what it would make
  Calling call(function);
  if (settings().dry_run) return kSuccess;
  // MindSpore sets HCCL's determinism at every start, with one device, too.
  if (begins_with(name, "Hccl") && name != "HcclSetConfig") {
    constexpr aclError kHcclNotSupported = 5;
    return fail(kHcclNotSupported,
                "%s is not emulated: the emulated device has no collective communication; use the dry run "
                "(MS_SIMULATION_LEVEL=1) or MindSpore's CPU back end", function);
  }
  if (begins_with(name, "aclnn") && ends_with(name, kAskWorkspace)) {
    name.resize(name.size() - strlen(kAskWorkspace));
    return fail(kMissingOperator,
                "the operator %s is not emulated; add it in scripts/ascend_emulator/src, or use another", name.c_str());
  }
  if (begins_with(name, "aclmdl") || begins_with(name, "aclopExecute") || begins_with(name, "aclopCompileAndExecute")) {
    return fail(kNotSupported, "%s is not emulated", function);
  }
  if (begins_with(name, "rtKernelLaunch")) {
    return fail(kNotSupported, "%s is not emulated: it runs a kernel that MindSpore has made, as those into which the jit "
                "level O1 joins operators; use O0", function);
  }
  return kSuccess;
}

}  // namespace ascsim
