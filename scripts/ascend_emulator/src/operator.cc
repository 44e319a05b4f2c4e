#include "operator.h"

#include <cstring>

#include "races.h"
#include "scramble.h"
#include "settings.h"
#include "stream.h"

namespace ascsim {
namespace {

std::string name_of(const char *function) {
  std::string name = function;
  constexpr char kPhase[] = "GetWorkspaceSize";
  return name.substr(0, name.size() - strlen(kPhase));
}

void append(std::vector<Range> *to, const std::vector<Range> &more) { to->insert(to->end(), more.begin(), more.end()); }

}  // namespace

Operator::Operator(const char *function, uint64_t *workspace, aclOpExecutor **executor)
    : workspace_(workspace), executor_(executor), made_(new aclOpExecutor{name_of(function), {}, {}, {}}) {}

Tensor Operator::in(In tensor) {
  append(&made_->reads, ranges_of(*tensor));
  if (!tensor->dense()) bytes_ += tensor->bytes();
  return *tensor;
}

Tensor Operator::out(Out tensor) {
  append(&made_->writes, ranges_of(*tensor));
  if (!tensor->dense()) bytes_ += tensor->bytes();
  return *tensor;
}

Tensor Operator::in_out(Out tensor) {
  append(&made_->reads, ranges_of(*tensor));
  return out(tensor);
}

aclError Operator::run(std::function<void()> body) {
  constexpr size_t kUnit = 512;
  made_->body = std::move(body);
  *workspace_ = (bytes_ + kUnit - 1) / kUnit * kUnit;
  *executor_ = made_;
  return kSuccess;
}

aclError Operator::refuse(const std::string &reason) const {
  aclError code = fail(kMissingOperator, "%s: %s is not emulated", made_->name.c_str(), reason.c_str());
  delete made_;
  return code;
}

void launch(void *handle, const std::string &name, const std::vector<Range> &reads, const std::vector<Range> &writes,
            std::function<void()> body) {
  Calling call(name.c_str());
  call.locate();
  Stream &stream = stream_of(call, handle);
  call->reads = reads;
  call->writes = writes;
  for (auto &range : writes) call->bytes += range.end - range.begin;
  count(Counter::kOperators);
  races().stream_access(stream.number(), call->site, reads, writes);
  stream.push(call.shared(), operator_work(std::move(body)));
}

double uniform(uint64_t seed, uint64_t offset, uint64_t i) {
  uint64_t value = seed * 0x9e3779b97f4a7c15ull + offset * 0xd1342543de82ef95ull + i * 0xbf58476d1ce4e5b9ull;
  value += 0x94d049bb133111ebull;
  return fraction(scrambled(value));
}

// The second phase of every operator: the stubs named aclnn... come here.
extern "C" aclError ascsim_launch(void *workspace, uint64_t workspace_size, aclOpExecutor *executor, void *stream) {
  if (executor == nullptr) {
    return settings().dry_run ? kSuccess : fail(kInvalidParameter, "an operator without its first phase");
  }
  if (workspace_size > 0) executor->writes.push_back(range_of(workspace, workspace_size));
  launch(stream, executor->name, executor->reads, executor->writes, std::move(executor->body));
  delete executor;
  return kSuccess;
}

// MindSpore may keep executors and only give them new addresses; here it makes one for each call.
ACL_EXPORT aclError aclSetAclOpExecutorRepeatable(aclOpExecutor *) { return kNotSupported; }
ACL_EXPORT aclError aclDestroyAclOpExecutor(aclOpExecutor *) { return kSuccess; }

}  // namespace ascsim
