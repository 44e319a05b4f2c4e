// Matrix products.
#include <algorithm>

#include "matrix.h"
#include "operator.h"

using namespace ascsim;

namespace {

// Batched, with the batch dimensions broadcast; vectors as numpy's matmul takes them.
aclError product(Operator op, In left, In right, Out output, const aclTensor *base, double beta, double alpha) {
  Tensor a = op.in(left), b = op.in(right), to = op.out(output);
  Tensor added{};
  bool adds = base != nullptr;
  if (adds) added = op.in(base);
  op.partial_results(output->size());
  return op.run([=] {
    Tensor x = a, y = b;
    bool left_vector = x.rank() == 1, right_vector = y.rank() == 1;
    if (left_vector) {
      x.shape.insert(x.shape.begin(), 1);
      x.strides.insert(x.strides.begin(), 0);
    }
    if (right_vector) {
      y.shape.push_back(1);
      y.strides.push_back(0);
    }
    int64_t rows = x.dim(-2), inner = x.dim(-1), columns = y.dim(-1);
    size_t own = 2 - left_vector - right_vector;
    Shape batch(to.shape.begin(), to.shape.end() - static_cast<int64_t>(std::min(to.shape.size(), own)));
    Shape left_shape = batch, right_shape = batch;
    left_shape.insert(left_shape.end(), {rows, inner});
    right_shape.insert(right_shape.end(), {inner, columns});
    std::vector<float> p = read_floats(broadcast(x, left_shape)), q = read_floats(broadcast(y, right_shape));
    std::vector<float> result(elements(batch) * rows * columns);
    for (int64_t i = 0; i < elements(batch); ++i) {
      multiply(&p[i * rows * inner], &q[i * inner * columns], &result[i * rows * columns], rows, inner, columns);
    }
    if (!adds) return write_floats(to, result);
    Values sum = read(added, to.shape);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] = beta * sum[i] + alpha * static_cast<double>(result[i]);
    write(to, sum);
  });
}

}  // namespace

OPERATOR(Matmul, In left, In right, Out output, int8_t) { return product(OP, left, right, output, nullptr, 0, 1); }
OPERATOR(Mm, In left, In right, Out output, int8_t) { return product(OP, left, right, output, nullptr, 0, 1); }
OPERATOR(BatchMatMul, In left, In right, Out output, int8_t) { return product(OP, left, right, output, nullptr, 0, 1); }
OPERATOR(Mv, In left, In right, Out output, int8_t) { return product(OP, left, right, output, nullptr, 0, 1); }
OPERATOR(Dot, In left, In right, Out output) { return product(OP, left, right, output, nullptr, 0, 1); }
OPERATOR(Addmm, In base, In left, In right, Number beta, Number alpha, Out output, int8_t) {
  return product(OP, left, right, output, base, value_of(beta, 1), value_of(alpha, 1));
}
OPERATOR(Baddbmm, In base, In left, In right, Number beta, Number alpha, Out output, int8_t) {
  return product(OP, left, right, output, base, value_of(beta, 1), value_of(alpha, 1));
}
