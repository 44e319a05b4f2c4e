// Normalisations over the last dimensions, and the gated activation beside them in transformers.
#include <cmath>

#include "legacy.h"
#include "operator.h"

using namespace ascsim;

namespace {

struct Optional {
  bool given;
  Tensor tensor;
  Values values(int64_t size, double standard) const { return given ? read(tensor) : Values(size, standard); }
};

Optional optional_in(Operator *op, In tensor) {
  return tensor != nullptr ? Optional{true, op->in(tensor)} : Optional{};
}
Optional optional_out(Operator *op, Out tensor) {
  return tensor != nullptr ? Optional{true, op->out(tensor)} : Optional{};
}
void write_if(const Optional &target, const Values &values) {
  if (target.given) write(target.tensor, values);
}

struct RowStatistics {
  Values mean, variance;
};

// Normalises rows of the length of `gamma` in place.
RowStatistics normalise_rows(Values *v, double epsilon, const Values &gamma, const Values &beta) {
  RowStatistics result;
  size_t width = gamma.size();
  for (size_t row = 0; row < v->size(); row += width) {
    double *x = &(*v)[row], mean = 0, squares = 0;
    for (size_t i = 0; i < width; ++i) mean += x[i];
    mean /= static_cast<double>(width);
    for (size_t i = 0; i < width; ++i) squares += (x[i] - mean) * (x[i] - mean);
    double variance = squares / static_cast<double>(width), scale = 1 / std::sqrt(variance + epsilon);
    for (size_t i = 0; i < width; ++i) x[i] = (x[i] - mean) * scale * gamma[i] + beta[i];
    result.mean.push_back(mean);
    result.variance.push_back(variance);
  }
  return result;
}

Values scales_of(Values variance, double epsilon) {
  for (double &one : variance) one = 1 / std::sqrt(one + epsilon);
  return variance;
}

struct RowGradient {
  Values input, gamma, beta;
};

RowGradient row_gradient(const Values &dy, const Values &v, const Values &mean, const Values &scale,
                         const Values &gamma) {
  size_t width = gamma.size();
  RowGradient result{Values(v.size()), Values(width, 0.0), Values(width, 0.0)};
  for (size_t row = 0; row < v.size() / width; ++row) {
    const double *y = &dy[row * width], *x = &v[row * width];
    double sum = 0, weighted = 0;
    for (size_t i = 0; i < width; ++i) {
      double normal = (x[i] - mean[row]) * scale[row];
      sum += y[i] * gamma[i];
      weighted += y[i] * gamma[i] * normal;
      result.gamma[i] += y[i] * normal;
      result.beta[i] += y[i];
    }
    for (size_t i = 0; i < width; ++i) {
      double normal = (x[i] - mean[row]) * scale[row];
      double shared = (sum + normal * weighted) / static_cast<double>(width);
      result.input[row * width + i] = scale[row] * (y[i] * gamma[i] - shared);
    }
  }
  return result;
}

}  // namespace

OPERATOR(LayerNorm, In input, Integers normalized, In weight, In bias, double epsilon, Out output, Out means,
         Out scales) {
  Operator op = OP;
  Tensor from = op.in(input), to = op.out(output);
  Optional gamma = optional_in(&op, weight), beta = optional_in(&op, bias);
  Optional mean_out = optional_out(&op, means), scale_out = optional_out(&op, scales);
  int64_t width = elements(normalized->values);
  op.partial_results(2 * input->size() / width);
  return op.run([=] {
    Values v = read(from);
    RowStatistics rows = normalise_rows(&v, epsilon, gamma.values(width, 1), beta.values(width, 0));
    write(to, v);
    write_if(mean_out, rows.mean);
    write_if(scale_out, scales_of(rows.variance, epsilon));
  });
}
OPERATOR(LayerNormBackward, In gradient, In input, Integers normalized, In means, In scales, In weight, In,
         const aclBoolArray *, Out input_gradient, Out weight_gradient, Out bias_gradient) {
  Operator op = OP;
  Tensor g = op.in(gradient), from = op.in(input), mean_in = op.in(means), scale_in = op.in(scales);
  Optional gamma = optional_in(&op, weight);
  Optional dx_out = optional_out(&op, input_gradient), dg_out = optional_out(&op, weight_gradient);
  Optional db_out = optional_out(&op, bias_gradient);
  int64_t width = elements(normalized->values);
  op.partial_results(2 * width);
  return op.run([=] {
    RowGradient result = row_gradient(read(g), read(from), read(mean_in), read(scale_in), gamma.values(width, 1));
    write_if(dx_out, result.input);
    write_if(dg_out, result.gamma);
    write_if(db_out, result.beta);
  });
}
OPERATOR(RmsNorm, In input, In weight, double epsilon, Out output, Out scales) {
  Operator op = OP;
  Tensor from = op.in(input), gamma = op.in(weight), to = op.out(output);
  Optional scale_out = optional_out(&op, scales);
  int64_t width = weight->size();
  op.partial_results(input->size() / width);
  return op.run([=] {
    Values v = read(from), g = read(gamma), scale_values;
    for (size_t row = 0; row < v.size(); row += width) {
      double squares = 0;
      for (int64_t i = 0; i < width; ++i) squares += v[row + i] * v[row + i];
      double scale = 1 / std::sqrt(squares / static_cast<double>(width) + epsilon);
      for (int64_t i = 0; i < width; ++i) v[row + i] *= scale * g[i];
      scale_values.push_back(scale);
    }
    write(to, v);
    write_if(scale_out, scale_values);
  });
}
OPERATOR(RmsNormGrad, In gradient, In input, In scales, In weight, Out input_gradient, Out weight_gradient) {
  Operator op = OP;
  Tensor g = op.in(gradient), from = op.in(input), scale_in = op.in(scales), gamma = op.in(weight);
  Tensor dx_out = op.out(input_gradient), dg_out = op.out(weight_gradient);
  int64_t width = weight->size();
  op.partial_results(2 * width);
  return op.run([=] {
    Values dy = read(g), v = read(from), scale = read(scale_in), w = read(gamma), dx(v.size()), dg(width, 0.0);
    for (size_t row = 0; row < v.size() / width; ++row) {
      const double *y = &dy[row * width], *x = &v[row * width];
      double weighted = 0;
      for (int64_t i = 0; i < width; ++i) {
        weighted += y[i] * w[i] * x[i] * scale[row];
        dg[i] += y[i] * x[i] * scale[row];
      }
      for (int64_t i = 0; i < width; ++i) {
        dx[row * width + i] = scale[row] * (y[i] * w[i] - x[i] * scale[row] * weighted / static_cast<double>(width));
      }
    }
    write(dx_out, dx);
    write(dg_out, dg);
  });
}

// The input is two halves along the last dimension: silu(first) * second.
OPERATOR(SwiGlu, In input, int64_t axis, Out output) {
  Operator op = OP;
  if (axis != -1 && axis != input->rank() - 1) return op.refuse("an axis other than the last");
  Tensor from = op.in(input), to = op.out(output);
  return op.run([=] {
    Values v = read(from), result(to.size());
    int64_t width = to.dim(-1);
    for (size_t i = 0; i < result.size(); ++i) {
      const double *pair = &v[static_cast<int64_t>(i) / width * 2 * width + static_cast<int64_t>(i) % width];
      result[i] = pair[0] * sigmoid(pair[0]) * pair[width];
    }
    write(to, result);
  });
}
OPERATOR(SwiGluGrad, In gradient, In input, int64_t axis, Out output) {
  Operator op = OP;
  if (axis != -1 && axis != input->rank() - 1) return op.refuse("an axis other than the last");
  Tensor g = op.in(gradient), from = op.in(input), to = op.out(output);
  return op.run([=] {
    Values dy = read(g), v = read(from);
    int64_t width = g.dim(-1);
    for (size_t i = 0; i < dy.size(); ++i) {
      double *pair = &v[static_cast<int64_t>(i) / width * 2 * width + static_cast<int64_t>(i) % width];
      double s = sigmoid(pair[0]), silu = pair[0] * s;
      double first = dy[i] * pair[width] * s * (1 + pair[0] * (1 - s));
      pair[width] = dy[i] * silu;
      pair[0] = first;
    }
    write(to, v);
  });
}

namespace {

constexpr double kLegacyEpsilon = 1e-7;

// The older operator keeps the variance, not the scale.
void layer_norm(const LegacyCall &call) {
  Values v = read(call.inputs[0]);
  double epsilon = call.number("epsilon", kLegacyEpsilon);
  RowStatistics rows = normalise_rows(&v, epsilon, read(call.inputs[1]), read(call.inputs[2]));
  write(call.outputs[0], v);
  write(call.outputs[1], rows.mean);
  write(call.outputs[2], rows.variance);
}

// Inputs: gradient, input, variance, mean, weight.
void layer_norm_gradient(const LegacyCall &call) {
  Values scale = scales_of(read(call.inputs[2]), call.number("epsilon", kLegacyEpsilon));
  RowGradient result =
    row_gradient(read(call.inputs[0]), read(call.inputs[1]), read(call.inputs[3]), scale, read(call.inputs[4]));
  write(call.outputs[0], result.input);
  write(call.outputs[1], result.gamma);
  write(call.outputs[2], result.beta);
}

const LegacyOperators kOperators{{
  {"LayerNorm", {layer_norm, {}}},
  {"LayerNormGrad", {layer_norm_gradient, {}}},
}};

}  // namespace
