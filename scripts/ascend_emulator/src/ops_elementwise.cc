// Operators that compute each element from the elements at the same place.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "legacy.h"
#include "operator.h"

using namespace ascsim;

namespace {

// How `approximate` of GELU and its gradient is computed.
struct Gelu {
  bool tanh;
  static constexpr double kScale = 0.7978845608028654;  // sqrt(2 / pi)
  static constexpr double kCubic = 0.044715;

  double value(double x) const {
    if (tanh) return 0.5 * x * (1 + std::tanh(kScale * (x + kCubic * x * x * x)));
    return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
  }
  double slope(double x) const {
    if (!tanh) {
      return 0.5 * (1 + std::erf(x / std::sqrt(2.0))) + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
    }
    double t = std::tanh(kScale * (x + kCubic * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * kScale * (1 + 3 * kCubic * x * x);
  }
};

double silu_slope(double x) { return sigmoid(x) * (1 + x * (1 - sigmoid(x))); }

// The remainder that has the sign of the divisor.
double remainder_of(double x, double y) { return x - y * std::floor(x / y); }

double rounded(double x) { return std::nearbyint(x); }

template <class Function>
aclError ternary(Operator op, In first, In second, In third, Out output, Function function) {
  Tensor a = op.in(first), b = op.in(second), c = op.in(third), to = op.out(output);
  return op.run([=] {
    Values x = read(a, to.shape), y = read(b, to.shape), z = read(c, to.shape);
    for (size_t i = 0; i < x.size(); ++i) x[i] = function(x[i], y[i], z[i]);
    write(to, x);
  });
}

aclError fill(Operator op, Out output, double value) {
  Tensor to = op.out(output);
  return op.run([=] { write(to, Values(to.size(), value)); });
}

}  // namespace

OPERATOR(Add, In left, In right, Number alpha, Out output) {
  double scale = value_of(alpha, 1);
  return binary(OP, left, right, output, [=](double x, double y) { return x + scale * y; });
}
OPERATOR(Adds, In left, Number right, Number alpha, Out output) {
  double term = value_of(alpha, 1) * value_of(right);
  return unary(OP, left, output, [=](double x) { return x + term; });
}
OPERATOR(InplaceAdd, Out left, In right, Number alpha) {
  double scale = value_of(alpha, 1);
  return binary(OP, left, right, left, [=](double x, double y) { return x + scale * y; });
}
OPERATOR(InplaceAdds, Out left, Number right, Number alpha) {
  double term = value_of(alpha, 1) * value_of(right);
  return unary(OP, left, left, [=](double x) { return x + term; });
}
OPERATOR(Sub, In left, In right, Number alpha, Out output) {
  double scale = value_of(alpha, 1);
  return binary(OP, left, right, output, [=](double x, double y) { return x - scale * y; });
}
OPERATOR(Subs, In left, Number right, Number alpha, Out output) {
  double term = value_of(alpha, 1) * value_of(right);
  return unary(OP, left, output, [=](double x) { return x - term; });
}
OPERATOR(InplaceSub, Out left, In right, Number alpha) {
  double scale = value_of(alpha, 1);
  return binary(OP, left, right, left, [=](double x, double y) { return x - scale * y; });
}
OPERATOR(InplaceSubs, Out left, Number right, Number alpha) {
  double term = value_of(alpha, 1) * value_of(right);
  return unary(OP, left, left, [=](double x) { return x - term; });
}

// A function pointer rather than a lambda of its own type: one instance of the loops serves them all, which compiles
// fast.
using Two = double (*)(double x, double y);

#define BINARY(name, expression) \
  OPERATOR(name, In left, In right, Out output) { \
    return binary(OP, left, right, output, Two{[](double x, double y) -> double { return expression; }}); \
  }
#define BINARY_SCALAR(name, expression) \
  OPERATOR(name, In left, Number right, Out output) { \
    return with_scalar(OP, left, right, output, [](double x, double y) -> double { return expression; }); \
  }
#define INPLACE(name, expression) \
  OPERATOR(name, Out left, In right) { \
    return binary(OP, left, right, left, Two{[](double x, double y) -> double { return expression; }}); \
  }
#define INPLACE_SCALAR(name, expression) \
  OPERATOR(name, Out left, Number right) { \
    return with_scalar(OP, left, right, left, [](double x, double y) -> double { return expression; }); \
  }

static aclError with_scalar(Operator op, In left, Number right, Out output, Two function) {
  double y = value_of(right);
  // Beside a tensor of 32 bits or fewer CANN computes in 32 bits, whatever type the scalar comes in.
  if (is_floating(left->type) && left->type != kDouble) y = static_cast<float>(y);
  return unary(std::move(op), left, output, [=](double x) { return function(x, y); });
}

BINARY(Mul, x * y) BINARY_SCALAR(Muls, x * y) INPLACE(InplaceMul, x * y) INPLACE_SCALAR(InplaceMuls, x * y)
BINARY(Div, x / y) BINARY_SCALAR(Divs, x / y) INPLACE(InplaceDiv, x / y) INPLACE_SCALAR(InplaceDivs, x / y)
BINARY(FloorDivide, std::floor(x / y)) BINARY_SCALAR(FloorDivides, std::floor(x / y))
BINARY(RemainderTensorTensor, remainder_of(x, y)) BINARY_SCALAR(RemainderTensorScalar, remainder_of(x, y))
BINARY(Maximum, std::max(x, y)) BINARY(Minimum, std::min(x, y))
BINARY(PowTensorTensor, std::pow(x, y)) BINARY_SCALAR(PowTensorScalar, std::pow(x, y))
BINARY(EqTensor, x == y) BINARY_SCALAR(EqScalar, x == y)
BINARY(NeTensor, x != y) BINARY_SCALAR(NeScalar, x != y)
BINARY(GtTensor, x > y) BINARY_SCALAR(GtScalar, x > y)
BINARY(GeTensor, x >= y) BINARY_SCALAR(GeScalar, x >= y)
BINARY(LtTensor, x < y) BINARY_SCALAR(LtScalar, x < y)
BINARY(LeTensor, x <= y) BINARY_SCALAR(LeScalar, x <= y)
BINARY(LogicalAnd, x != 0 && y != 0) BINARY(LogicalOr, x != 0 || y != 0) BINARY(LogicalXor, (x != 0) != (y != 0))
BINARY(BitwiseAndTensor, static_cast<double>(static_cast<int64_t>(x) & static_cast<int64_t>(y)))

OPERATOR(PowScalarTensor, Number left, In right, Out output) {
  double x = value_of(left);
  return unary(OP, right, output, [=](double y) { return std::pow(x, y); });
}

using One = double (*)(double x);

#define UNARY(name, expression) \
  OPERATOR(name, In input, Out output) { \
    return unary(OP, input, output, One{[](double x) -> double { return expression; }}); \
  }
UNARY(Abs, std::fabs(x)) UNARY(Neg, -x) UNARY(Exp, std::exp(x)) UNARY(Expm1, std::expm1(x)) UNARY(Log, std::log(x))
UNARY(Log1p, std::log1p(x)) UNARY(Sqrt, std::sqrt(x)) UNARY(Rsqrt, 1 / std::sqrt(x)) UNARY(Reciprocal, 1 / x)
UNARY(Sin, std::sin(x)) UNARY(Cos, std::cos(x)) UNARY(Tanh, std::tanh(x)) UNARY(Erf, std::erf(x))
UNARY(Sigmoid, sigmoid(x)) UNARY(Relu, x > 0 ? x : 0) UNARY(Silu, x * sigmoid(x)) UNARY(Gelu, Gelu{true}.value(x))
UNARY(Floor, std::floor(x)) UNARY(Ceil, std::ceil(x)) UNARY(Round, rounded(x)) UNARY(Sign, (x > 0) - (x < 0))
UNARY(Square, x * x) UNARY(LogicalNot, x == 0) UNARY(IsFinite, std::isfinite(x))

#define INPLACE_UNARY(name, expression) \
  OPERATOR(name, Out tensor) { \
    return unary(OP, tensor, tensor, One{[](double x) -> double { return expression; }}); \
  }
INPLACE_UNARY(InplaceRelu, x > 0 ? x : 0) INPLACE_UNARY(InplaceExp, std::exp(x))
INPLACE_UNARY(InplaceSqrt, std::sqrt(x)) INPLACE_UNARY(InplaceNeg, -x)
INPLACE_UNARY(InplaceSigmoid, sigmoid(x)) INPLACE_UNARY(InplaceTanh, std::tanh(x))

// Without a version number, GELU is the approximation by tanh. Gradients: x is the gradient of the output, y what the
// operator keeps.
BINARY(GeluBackward, x * Gelu{true}.slope(y)) BINARY(SiluBackward, x * silu_slope(y))
BINARY(SigmoidBackward, x * y * (1 - y)) BINARY(TanhBackward, x * (1 - y * y))

OPERATOR(GeluV2, In input, int64_t approximate, Out output) {
  Gelu gelu{approximate != 0};
  return unary(OP, input, output, [=](double x) { return gelu.value(x); });
}
OPERATOR(GeluBackwardV2, In gradient, In input, const char *approximate, Out output) {
  Gelu gelu{approximate != nullptr && strcmp(approximate, "tanh") == 0};
  return binary(OP, gradient, input, output, [=](double g, double x) { return g * gelu.slope(x); });
}
OPERATOR(ThresholdBackward, In gradient, In input, Number threshold, Out output) {
  double limit = value_of(threshold);
  return binary(OP, gradient, input, output, [=](double g, double x) { return x > limit ? g : 0; });
}
OPERATOR(LeakyRelu, In input, Number slope, Out output) {
  double factor = value_of(slope);
  return unary(OP, input, output, [=](double x) { return x > 0 ? x : factor * x; });
}
OPERATOR(LeakyReluBackward, In gradient, In input, Number slope, bool, Out output) {
  double factor = value_of(slope);
  return binary(OP, gradient, input, output, [=](double g, double x) { return x > 0 ? g : factor * g; });
}

OPERATOR(Cast, In input, int, Out output) {
  Operator op = OP;
  Tensor from = op.in(input), to = op.out(output);
  return op.run([=] { copy_elements(to, from); });
}
OPERATOR(Clamp, In input, Number low, Number high, Out output) {
  double least = value_of(low, -INFINITY), most = value_of(high, INFINITY);
  return unary(OP, input, output, [=](double x) { return std::min(std::max(x, least), most); });
}
OPERATOR(ClampMin, In input, Number low, Out output) {
  double least = value_of(low);
  return unary(OP, input, output, [=](double x) { return std::max(x, least); });
}

OPERATOR(InplaceZero, Out output) { return fill(OP, output, 0); }
OPERATOR(InplaceOne, Out output) { return fill(OP, output, 1); }
OPERATOR(InplaceFillScalar, Out output, Number value) { return fill(OP, output, value_of(value)); }
OPERATOR(InplaceFillTensor, Out output, In value) {
  return binary(OP, output, value, output, [](double, double y) { return y; });
}

OPERATOR(SWhere, In condition, In left, In right, Out output) {
  return ternary(OP, condition, left, right, output, [](double c, double x, double y) { return c != 0 ? x : y; });
}
OPERATOR(InplaceMaskedFillScalar, Out tensor, In mask, Number value) {
  double filler = value_of(value);
  return binary(OP, tensor, mask, tensor, [=](double x, double m) { return m != 0 ? filler : x; });
}
OPERATOR(InplaceMaskedFillTensor, Out tensor, In mask, In value) {
  return ternary(OP, tensor, mask, value, tensor, [](double x, double m, double v) { return m != 0 ? v : x; });
}
OPERATOR(Addcmul, In base, In left, In right, Number value, Out output) {
  double scale = value_of(value, 1);
  return ternary(OP, base, left, right, output, [=](double b, double x, double y) { return b + scale * x * y; });
}
OPERATOR(Addcdiv, In base, In left, In right, Number value, Out output) {
  double scale = value_of(value, 1);
  return ternary(OP, base, left, right, output, [=](double b, double x, double y) { return b + scale * x / y; });
}
OPERATOR(Lerp, In begin, In end, In weight, Out output) {
  return ternary(OP, begin, end, weight, output, [](double x, double y, double w) { return x + w * (y - x); });
}
OPERATOR(Lerps, In begin, In end, Number weight, Out output) {
  double w = value_of(weight);
  return binary(OP, begin, end, output, [=](double x, double y) { return x + w * (y - x); });
}

OPERATOR(MseLoss, In input, In target, int64_t reduction, Out output) {
  Operator op = OP;
  Tensor a = op.in(input), b = op.in(target), to = op.out(output);
  return op.run([=] {
    const Shape &shape = a.rank() >= b.rank() ? a.shape : b.shape;
    Values x = read(a, shape), y = read(b, shape);
    for (size_t i = 0; i < x.size(); ++i) x[i] = (x[i] - y[i]) * (x[i] - y[i]);
    if (reduction == kReduceNone) return write(to, x);
    double sum = 0;
    for (double one : x) sum += one;
    write(to, {reduction == kReduceMean ? sum / static_cast<double>(x.size()) : sum});
  });
}
OPERATOR(MseLossBackward, In gradient, In input, In target, int64_t reduction, Out output) {
  double scale = reduction == kReduceMean ? 2.0 / static_cast<double>(output->size()) : 2;
  return ternary(OP, gradient, input, target, output,
                 [=](double g, double x, double y) { return scale * g * (x - y); });
}

namespace {

// Bias on the channel axis: 1 in NCHW, the last in NHWC.
void bias_add(const LegacyCall &call) {
  Tensor to = call.outputs[0], bias = call.inputs[1];
  Shape shape(to.rank(), 1);
  bool channels_last = call.text("data_format", "NCHW") == "NHWC";
  shape[channels_last ? to.rank() - 1 : 1] = bias.size();
  bias.shape = shape;
  bias.strides = dense_strides(shape);
  Values x = read(call.inputs[0]), b = read(bias, to.shape);
  for (size_t i = 0; i < x.size(); ++i) x[i] += b[i];
  write(to, x);
}

LegacyBody each(One function) {
  return [=](const LegacyCall &call) {
    Values x = read(call.inputs[0]);
    for (double &value : x) value = function(value);
    write(call.outputs[0], x);
  };
}

LegacyBody each(Two function) {
  return [=](const LegacyCall &call) {
    const Shape &shape = call.outputs[0].shape;
    Values x = read(call.inputs[0], shape), y = read(call.inputs[1], shape);
    for (size_t i = 0; i < x.size(); ++i) x[i] = function(x[i], y[i]);
    write(call.outputs[0], x);
  };
}

void add_all(const LegacyCall &call) {
  Values sum(call.outputs[0].size(), 0.0);
  for (const Tensor &input : call.inputs) {
    Values values = read(input, call.outputs[0].shape);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
  }
  write(call.outputs[0], sum);
}

void add_product(const LegacyCall &call) {
  const Shape &shape = call.outputs[0].shape;
  Values base = read(call.inputs[0], shape), x = read(call.inputs[1], shape), y = read(call.inputs[2], shape);
  double scale = read(call.inputs[3])[0];
  for (size_t i = 0; i < base.size(); ++i) base[i] += scale * x[i] * y[i];
  write(call.outputs[0], base);
}

void fill_with(const LegacyCall &call) {
  write(call.outputs[0], Values(call.outputs[0].size(), read(call.inputs[1])[0]));
}

void update(const LegacyCall &call, bool adds) {
  const Tensor &variable = call.inputs[0];
  Values values = read(call.inputs[1], variable.shape);
  if (adds) {
    Values before = read(variable);
    for (size_t i = 0; i < values.size(); ++i) values[i] += before[i];
  }
  write(variable, values);
  if (!call.outputs.empty() && call.outputs[0].data != variable.data) write(call.outputs[0], values);
}

const LegacyOperators kOperators{{
  {"Add", {add_all, {}}},
  {"Addcmul", {add_product, {}}},
  {"AddN", {add_all, {}}},
  {"Assign", {[](const LegacyCall &call) { update(call, false); }, {0}}},
  {"AssignAdd", {[](const LegacyCall &call) { update(call, true); }, {0}}},
  {"BiasAdd", {bias_add, {}}},
  {"Fill", {fill_with, {}}},
  {"OnesLike", {each(One{[](double) { return 1.0; }}), {}}},
  {"Mul", {each(Two{[](double x, double y) { return x * y; }}), {}}},
  {"RealDiv", {each(Two{[](double x, double y) { return x / y; }}), {}}},
  {"Relu6", {each(One{[](double x) { return std::min(std::max(x, 0.0), 6.0); }}), {}}},
  {"Square", {each(One{[](double x) { return x * x; }}), {}}},
  {"Sub", {each(Two{[](double x, double y) { return x - y; }}), {}}},
  {"ZerosLike", {each(One{[](double) { return 0.0; }}), {}}},
}};

}  // namespace
