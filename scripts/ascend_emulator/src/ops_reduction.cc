// Operators that combine the elements along dimensions: sums, extremes, softmax, losses.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "legacy.h"
#include "operator.h"

using namespace ascsim;

namespace {

std::vector<int64_t> axes_of(Integers axes, int64_t rank) {
  std::vector<int64_t> result = axes != nullptr ? axes->values : std::vector<int64_t>{};
  if (result.empty()) {
    result.resize(rank);
    std::iota(result.begin(), result.end(), 0);
  }
  for (int64_t &axis : result) axis = axis < 0 ? axis + rank : axis;
  return result;
}

// The tensor with the reduced axes last, and how many elements each result is made of.
struct Groups {
  Values values;
  int64_t size;
};

Groups grouped(const Tensor &tensor, const std::vector<int64_t> &axes) {
  Tensor moved = tensor;
  moved.shape.clear();
  moved.strides.clear();
  auto reduced = [&](int64_t axis) { return std::find(axes.begin(), axes.end(), axis) != axes.end(); };
  int64_t size = 1;
  for (bool last : {false, true}) {
    for (int64_t axis = 0; axis < tensor.rank(); ++axis) {
      if (reduced(axis) != last) continue;
      moved.shape.push_back(tensor.shape[axis]);
      moved.strides.push_back(tensor.strides[axis]);
      if (last) size *= tensor.shape[axis];
    }
  }
  return {read(moved), size};
}

// `combine(first, size)` makes one result of a group's elements.
template <class Combine>
void reduce_to(const Tensor &to, const Tensor &from, const std::vector<int64_t> &axes, Combine combine) {
  Groups groups = grouped(from, axes);
  Values result(to.size());
  for (size_t i = 0; i < result.size(); ++i) result[i] = combine(&groups.values[i * groups.size], groups.size);
  write(to, result);
}

template <class Combine>
aclError reduce(Operator op, In input, std::vector<int64_t> axes, Out output, Combine combine) {
  Tensor from = op.in(input), to = op.out(output);
  op.partial_results(2 * output->size());
  return op.run([=] { reduce_to(to, from, axes, combine); });
}

double sum(const double *values, int64_t size) { return std::accumulate(values, values + size, 0.0); }
double mean(const double *values, int64_t size) { return sum(values, size) / static_cast<double>(size); }
double greatest(const double *values, int64_t size) { return *std::max_element(values, values + size); }
double least(const double *values, int64_t size) { return *std::min_element(values, values + size); }
double position_of_greatest(const double *values, int64_t size) {
  return static_cast<double>(std::max_element(values, values + size) - values);
}
double product(const double *values, int64_t size) {
  return std::accumulate(values, values + size, 1.0, [](double x, double y) { return x * y; });
}
double length(const double *values, int64_t size) {
  double squares = 0;
  for (int64_t i = 0; i < size; ++i) squares += values[i] * values[i];
  return std::sqrt(squares);
}

// Calls `use(first, step, size)` for each line of elements along an axis of a dense tensor.
template <class Use>
void along(const Tensor &tensor, int64_t axis, Use use) {
  if (tensor.rank() == 0) return use(int64_t{0}, int64_t{1}, int64_t{1});
  axis = axis < 0 ? axis + tensor.rank() : axis;
  int64_t inner = 1, outer = 1, size = tensor.shape[axis];
  for (int64_t i = 0; i < axis; ++i) outer *= tensor.shape[i];
  for (int64_t i = axis + 1; i < tensor.rank(); ++i) inner *= tensor.shape[i];
  for (int64_t i = 0; i < outer; ++i) {
    for (int64_t j = 0; j < inner; ++j) use(i * size * inner + j, inner, size);
  }
}

aclError softmax(Operator op, In input, int64_t axis, Out output, bool logarithm) {
  Tensor from = op.in(input), to = op.out(output);
  return op.run([=] {
    Values v = read(from);
    along(from, axis, [&](int64_t first, int64_t step, int64_t size) {
      double top = -INFINITY, total = 0;
      for (int64_t i = 0; i < size; ++i) top = std::max(top, v[first + i * step]);
      for (int64_t i = 0; i < size; ++i) total += std::exp(v[first + i * step] - top);
      for (int64_t i = 0; i < size; ++i) {
        double &x = v[first + i * step];
        x = logarithm ? x - top - std::log(total) : std::exp(x - top) / total;
      }
    });
    write(to, v);
  });
}

aclError softmax_backward(Operator op, In gradient, In result, int64_t axis, Out output, bool logarithm) {
  Tensor g = op.in(gradient), y = op.in(result), to = op.out(output);
  return op.run([=] {
    Values dy = read(g), v = read(y);
    along(y, axis, [&](int64_t first, int64_t step, int64_t size) {
      double total = 0;
      for (int64_t i = first; i < first + size * step; i += step) total += logarithm ? dy[i] : dy[i] * v[i];
      for (int64_t i = first; i < first + size * step; i += step) {
        dy[i] = logarithm ? dy[i] - std::exp(v[i]) * total : (dy[i] - total) * v[i];
      }
    });
    write(to, dy);
  });
}

}  // namespace

OPERATOR(ReduceSum, In input, Integers axes, bool, int, Out output) {
  return reduce(OP, input, axes_of(axes, input->rank()), output, sum);
}
OPERATOR(Mean, In input, Integers axes, bool, int, Out output) {
  return reduce(OP, input, axes_of(axes, input->rank()), output, mean);
}
OPERATOR(MeanV2, In input, Integers axes, bool, bool, Out output) {
  return reduce(OP, input, axes_of(axes, input->rank()), output, mean);
}
OPERATOR(Amax, In input, Integers axes, bool, Out output) {
  return reduce(OP, input, axes_of(axes, input->rank()), output, greatest);
}
OPERATOR(Amin, In input, Integers axes, bool, Out output) {
  return reduce(OP, input, axes_of(axes, input->rank()), output, least);
}
OPERATOR(Max, In input, Out output) { return reduce(OP, input, axes_of(nullptr, input->rank()), output, greatest); }
OPERATOR(Min, In input, Out output) { return reduce(OP, input, axes_of(nullptr, input->rank()), output, least); }
OPERATOR(ArgMax, In input, int64_t axis, bool, Out output) {
  return reduce(OP, input, {axis < 0 ? axis + input->rank() : axis}, output, position_of_greatest);
}
OPERATOR(Prod, In input, int, Out output) {
  return reduce(OP, input, axes_of(nullptr, input->rank()), output, product);
}
OPERATOR(Any, In input, Integers axes, bool, Out output) {
  return reduce(OP, input, axes_of(axes, input->rank()), output, [](const double *values, int64_t size) {
    return static_cast<double>(std::any_of(values, values + size, [](double x) { return x != 0; }));
  });
}
OPERATOR(All, In input, Integers axes, bool, Out output) {
  return reduce(OP, input, axes_of(axes, input->rank()), output, [](const double *values, int64_t size) {
    return static_cast<double>(std::all_of(values, values + size, [](double x) { return x != 0; }));
  });
}
OPERATOR(Var, In input, Integers axes, bool unbiased, bool, Out output) {
  return reduce(OP, input, axes_of(axes, input->rank()), output, [=](const double *values, int64_t size) {
    double middle = mean(values, size), squares = 0;
    for (int64_t i = 0; i < size; ++i) squares += (values[i] - middle) * (values[i] - middle);
    return squares / static_cast<double>(size - unbiased);
  });
}
OPERATOR(Norm, In input, Number order, Integers axes, bool, Out output) {
  if (value_of(order, 2) != 2) return OP.refuse("an order other than 2");
  return reduce(OP, input, axes_of(axes, input->rank()), output, length);
}

OPERATOR(Softmax, In input, int64_t axis, Out output) { return softmax(OP, input, axis, output, false); }
OPERATOR(SoftmaxBackward, In gradient, In result, int64_t axis, Out output) {
  return softmax_backward(OP, gradient, result, axis, output, false);
}
OPERATOR(LogSoftmax, In input, int64_t axis, Out output) { return softmax(OP, input, axis, output, true); }
OPERATOR(LogSoftmaxBackward, In gradient, In result, int64_t axis, Out output) {
  return softmax_backward(OP, gradient, result, axis, output, true);
}

OPERATOR(Cumsum, In input, int64_t axis, int, Out output) {
  Operator op = OP;
  Tensor from = op.in(input), to = op.out(output);
  return op.run([=] {
    Values v = read(from);
    along(from, axis, [&](int64_t first, int64_t step, int64_t size) {
      for (int64_t i = 1; i < size; ++i) v[first + i * step] += v[first + (i - 1) * step];
    });
    write(to, v);
  });
}

// Rows of log-probabilities [rows, classes], one target class each.
OPERATOR(NLLLoss, In input, In target, In weight, int64_t reduction, int64_t ignored, Out output, Out total_weight) {
  Operator op = OP;
  Tensor from = op.in(input), classes = op.in(target), weights = op.in(weight), to = op.out(output);
  Tensor total = op.out(total_weight);
  return op.run([=] {
    Values v = read(from), w = read(weights), losses;
    double sum_of_weights = 0, sum_of_losses = 0;
    int64_t width = from.dim(-1), row = 0;
    for (int64_t chosen : read_integers(classes)) {
      double factor = chosen == ignored ? 0 : w[chosen];
      losses.push_back(factor == 0 ? 0 : -factor * v[row * width + chosen]);
      sum_of_weights += factor;
      sum_of_losses += losses.back();
      ++row;
    }
    write(total, {sum_of_weights});
    if (reduction == kReduceNone) return write(to, losses);
    write(to, {reduction == kReduceMean ? sum_of_losses / sum_of_weights : sum_of_losses});
  });
}
OPERATOR(NLLLossBackward, In gradient, In, In target, In weight, int64_t reduction, int64_t ignored,
         In total_weight, Out output) {
  Operator op = OP;
  Tensor g = op.in(gradient), classes = op.in(target), weights = op.in(weight), total = op.in(total_weight);
  Tensor to = op.out(output);
  return op.run([=] {
    Values w = read(weights), dy = read(g, classes.shape), result(to.size(), 0.0);
    double divisor = reduction == kReduceMean ? read(total)[0] : 1;
    int64_t width = to.dim(-1), row = 0;
    for (int64_t chosen : read_integers(classes)) {
      if (chosen != ignored) result[row * width + chosen] = -w[chosen] * dy[row] / divisor;
      ++row;
    }
    write(to, result);
  });
}

namespace {

LegacyBody reduction(double (*combine)(const double *, int64_t)) {
  return [=](const LegacyCall &call) {
    const Tensor &from = call.inputs[0];
    aclIntArray given{call.inputs.size() > 1 ? read_integers(call.inputs[1]) : std::vector<int64_t>{}};
    reduce_to(call.outputs[0], from, axes_of(&given, from.rank()), combine);
  };
}

// Sums over all axes but the channels'.
void bias_gradient(const LegacyCall &call) {
  const Tensor &from = call.inputs[0];
  int64_t channels = call.text("data_format", "NCHW") == "NHWC" ? from.rank() - 1 : 1;
  std::vector<int64_t> axes;
  for (int64_t axis = 0; axis < from.rank(); ++axis) {
    if (axis != channels) axes.push_back(axis);
  }
  reduce_to(call.outputs[0], from, axes, sum);
}

// Losses of rows of logits against rows of probabilities, and their gradients.
void softmax_cross_entropy(const LegacyCall &call) {
  const Tensor &logits = call.inputs[0];
  Values v = read(logits), labels = read(call.inputs[1], logits.shape), losses;
  int64_t width = logits.dim(-1);
  for (size_t row = 0; row < v.size(); row += width) {
    double top = greatest(&v[row], width), total = 0, loss = 0;
    for (int64_t i = 0; i < width; ++i) total += std::exp(v[row + i] - top);
    for (int64_t i = 0; i < width; ++i) {
      double logarithm = v[row + i] - top - std::log(total);
      loss -= labels[row + i] * logarithm;
      v[row + i] = std::exp(logarithm) - labels[row + i];
    }
    losses.push_back(loss);
  }
  write(call.outputs[0], losses);
  write(call.outputs[1], v);
}

const LegacyOperators kOperators{{
  {"ArgMaxV2", {reduction(position_of_greatest), {}}},
  {"BiasAddGrad", {bias_gradient, {}}},
  {"ReduceMax", {reduction(greatest), {}}},
  {"ReduceMean", {reduction(mean), {}}},
  {"ReduceSum", {reduction(sum), {}}},
  {"SoftmaxCrossEntropyWithLogits", {softmax_cross_entropy, {}}},
}};

}  // namespace
