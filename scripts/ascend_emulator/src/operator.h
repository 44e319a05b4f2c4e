// How an operator is written: its GetWorkspaceSize function says what it reads and writes and hands over its body; the
// second phase (the same for all operators) puts the body on the stream.
//
//   OPERATOR(Neg, In input, Out output) { return unary(OP, input, output, [](double x) { return -x; }); }
//
// defines aclnnNegGetWorkspaceSize.
#pragma once
#include <cmath>
#include <functional>
#include <string>
#include <utility>

#include "record.h"
#include "tensor.h"

struct aclOpExecutor {
  std::string name;
  std::vector<ascsim::Range> reads, writes;
  std::function<void()> body;
};

namespace ascsim {

using In = const aclTensor *;
using Out = const aclTensor *;
using Number = const aclScalar *;
using Integers = const aclIntArray *;
using Tensors = const aclTensorList *;

// The first phase of one operator.
//
// Note: [Workspaces]
// Real operators ask for memory to work in, and MindSpore's pool gives it: without it peaks would look better than they
// are. What CANN asks for isn't public; this is the rule here. A tensor that isn't dense is made so first: its size.
// Operators that keep partial results in fp32 (matrix products, reductions, normalisations, convolutions) say so with
// `partial_results`. Each size is rounded up to 512 bytes.
class Operator {
 public:
  Operator(const char *function, uint64_t *workspace, aclOpExecutor **executor);
  // Declares an argument; the copies of it (by value) outlive MindSpore's.
  Tensor in(In tensor);
  Tensor out(Out tensor);
  Tensor in_out(Out tensor);
  void partial_results(int64_t floats) { bytes_ += static_cast<size_t>(floats) * sizeof(float); }
  aclError run(std::function<void()> body);
  aclError refuse(const std::string &reason) const;

 private:
  uint64_t *workspace_;
  aclOpExecutor **executor_;
  aclOpExecutor *made_;
  size_t bytes_ = 0;
};

#define OPERATOR(name, ...)                                                                      \
  ACL_EXPORT aclError aclnn##name##GetWorkspaceSize(__VA_ARGS__, uint64_t *workspace, aclOpExecutor **executor)
#define OP ascsim::Operator(__func__, workspace, executor)

// Puts an operator's work on a stream.
void launch(void *stream, const std::string &name, const std::vector<Range> &reads, const std::vector<Range> &writes,
            std::function<void()> body);

template <class Function>
aclError unary(Operator op, In input, Out output, Function function) {
  Tensor from = op.in(input), to = op.out(output);
  return op.run([=] {
    Values values = read(from, to.shape);
    for (double &value : values) value = function(value);
    write(to, values);
  });
}

template <class Function>
aclError binary(Operator op, In left, In right, Out output, Function function) {
  Tensor a = op.in(left), b = op.in(right), to = op.out(output);
  return op.run([=] {
    Values x = read(a, to.shape), y = read(b, to.shape);
    for (size_t i = 0; i < x.size(); ++i) x[i] = function(x[i], y[i]);
    write(to, x);
  });
}

// What a loss makes of its elements; otherwise their sum.
constexpr int64_t kReduceNone = 0, kReduceMean = 1;

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// The number of the i-th draw from a generator in [0, 1).
double uniform(uint64_t seed, uint64_t offset, uint64_t i);

}  // namespace ascsim
