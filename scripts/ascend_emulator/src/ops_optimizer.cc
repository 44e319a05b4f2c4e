// Optimizer steps: they update the parameter and its state in place.
#include <cmath>

#include "legacy.h"
#include "operator.h"

using namespace ascsim;

namespace {

struct AdamW {
  double rate, beta1, beta2, decay, epsilon;
  bool amsgrad, maximize;
};

}  // namespace

OPERATOR(ApplyAdamWV2, Out variable, Out mean, Out square, Out greatest, In gradient, In step, float rate, float beta1,
         float beta2, float decay, float epsilon, bool amsgrad, bool maximize) {
  Operator op = OP;
  Tensor p = op.in_out(variable), m = op.in_out(mean), v = op.in_out(square), g = op.in(gradient), t = op.in(step);
  Tensor top{};
  if (amsgrad) top = op.in_out(greatest);
  AdamW how{rate, beta1, beta2, decay, epsilon, amsgrad, maximize};
  return op.run([=] {
    Values x = read(p), first = read(m), second = read(v), dx = read(g), most = how.amsgrad ? read(top) : Values{};
    double number = read(t)[0] + 1;  // MindSpore counts steps from 0
    double correction1 = 1 - std::pow(how.beta1, number), correction2 = 1 - std::pow(how.beta2, number);
    for (size_t i = 0; i < x.size(); ++i) {
      double slope = how.maximize ? -dx[i] : dx[i];
      x[i] *= 1 - how.rate * how.decay;
      first[i] = how.beta1 * first[i] + (1 - how.beta1) * slope;
      second[i] = how.beta2 * second[i] + (1 - how.beta2) * slope * slope;
      if (how.amsgrad) most[i] = std::max(most[i], second[i]);
      double spread = how.amsgrad ? most[i] : second[i];
      x[i] -= how.rate / correction1 * first[i] / (std::sqrt(spread / correction2) + how.epsilon);
    }
    write(p, x);
    write(m, first);
    write(v, second);
    if (how.amsgrad) write(top, most);
  });
}

namespace {

// Inputs: parameter, gradient, rate, accumulated, momentum, whether the first step is done.
void sgd(const LegacyCall &call) {
  const Tensor &parameter = call.inputs[0], &accumulated = call.inputs[3], &first_done = call.inputs[5];
  Values x = read(parameter), g = read(call.inputs[1]), a = read(accumulated), fresh = read(first_done);
  double rate = read(call.inputs[2])[0], momentum = read(call.inputs[4])[0];
  double dampening = call.number("dampening", 0), decay = call.number("weight_decay", 0);
  bool nesterov = call.number("nesterov", 0) != 0;
  for (size_t i = 0; i < x.size(); ++i) {
    double slope = g[i] + decay * x[i];
    if (momentum != 0) {
      a[i] = fresh[i] > 0 ? slope : a[i] * momentum + (1 - dampening) * slope;
      fresh[i] = 0;
      slope = nesterov ? slope + momentum * a[i] : a[i];
    }
    x[i] -= rate * slope;
  }
  write(parameter, x);
  write(accumulated, a);
  write(first_done, fresh);
  if (call.outputs[0].data != parameter.data) write(call.outputs[0], x);
}

// Inputs: parameter, accumulated, rate, gradient, momentum.
void momentum(const LegacyCall &call) {
  const Tensor &parameter = call.inputs[0], &accumulated = call.inputs[1];
  Values x = read(parameter), a = read(accumulated), g = read(call.inputs[3]);
  double rate = read(call.inputs[2])[0], factor = read(call.inputs[4])[0];
  bool nesterov = call.number("use_nesterov", 0) != 0;
  for (size_t i = 0; i < x.size(); ++i) {
    a[i] = a[i] * factor + g[i];
    x[i] -= nesterov ? rate * (g[i] + factor * a[i]) : rate * a[i];
  }
  write(parameter, x);
  write(accumulated, a);
  if (!call.outputs.empty() && call.outputs[0].data != parameter.data) write(call.outputs[0], x);
}

// Inputs: parameter, mean, square, beta1^t, beta2^t, rate, beta1, beta2, epsilon, gradient.
void adam(const LegacyCall &call) {
  const Tensor &parameter = call.inputs[0], &mean = call.inputs[1], &square = call.inputs[2];
  Values x = read(parameter), m = read(mean), v = read(square), g = read(call.inputs[9]);
  auto scalar = [&](size_t input) { return read(call.inputs[input])[0]; };
  double beta1 = scalar(6), beta2 = scalar(7), epsilon = scalar(8);
  double rate = scalar(5) * std::sqrt(1 - scalar(4)) / (1 - scalar(3));
  bool nesterov = call.number("use_nesterov", 0) != 0;
  for (size_t i = 0; i < x.size(); ++i) {
    m[i] += (g[i] - m[i]) * (1 - beta1);
    v[i] += (g[i] * g[i] - v[i]) * (1 - beta2);
    double direction = nesterov ? m[i] * beta1 + (1 - beta1) * g[i] : m[i];
    x[i] -= rate * direction / (std::sqrt(v[i]) + epsilon);
  }
  write(parameter, x);
  write(mean, m);
  write(square, v);
  for (size_t i = 0; i < call.outputs.size() && i < 3; ++i) {
    if (call.outputs[i].data != call.inputs[i].data) copy_elements(call.outputs[i], call.inputs[i]);
  }
}

// Inputs: gradient, square, mean, parameter, rate, beta1, 1 - beta1, beta2, 1 - beta2, decay, epsilon.
void adam_with_decay(const LegacyCall &call) {
  const Tensor &square = call.inputs[1], &mean = call.inputs[2], &parameter = call.inputs[3];
  Values g = read(call.inputs[0]), v = read(square), m = read(mean), x = read(parameter);
  auto scalar = [&](size_t input) { return read(call.inputs[input])[0]; };
  double rate = scalar(4), decay = scalar(9), epsilon = scalar(10);
  double keep_mean = scalar(5), take_mean = scalar(6), keep_square = scalar(7), take_square = scalar(8);
  for (size_t i = 0; i < x.size(); ++i) {
    v[i] = v[i] * keep_square + g[i] * g[i] * take_square;
    m[i] = m[i] * keep_mean + g[i] * take_mean;
    x[i] -= rate * (m[i] / (std::sqrt(v[i]) + epsilon) + decay * x[i]);
  }
  write(square, v);
  write(mean, m);
  write(parameter, x);
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    if (call.outputs[i].data != call.inputs[i + 1].data) copy_elements(call.outputs[i], call.inputs[i + 1]);
  }
}

const LegacyOperators kOperators{{
  {"AdamApplyOneWithDecayAssign", {adam_with_decay, {1, 2, 3}}},
  {"ApplyAdam", {adam, {0, 1, 2}}},
  {"ApplyAdamD", {adam, {0, 1, 2}}},
  {"ApplyMomentum", {momentum, {0, 1}}},
  {"SGD", {sgd, {0, 3, 5}}},
}};

}  // namespace
