// Batch normalisation of images [batch, channels, height, width], by channel.
#include <algorithm>
#include <cmath>

#include "legacy.h"
#include "operator.h"

using namespace ascsim;

namespace {

struct Statistics {
  Values mean, variance;  // of each channel
  double count;
};

Statistics statistics_of(const Values &v, int64_t channels, int64_t places) {
  double count = static_cast<double>(v.size()) / static_cast<double>(channels);
  Statistics result{Values(channels, 0.0), Values(channels, 0.0), count};
  for (size_t i = 0; i < v.size(); ++i) result.mean[i / places % channels] += v[i] / result.count;
  for (size_t i = 0; i < v.size(); ++i) {
    double distance = v[i] - result.mean[i / places % channels];
    result.variance[i / places % channels] += distance * distance / result.count;
  }
  return result;
}

// Moves the running mean and variance towards a batch's.
void follow(Values *mean, Values *variance, const Statistics &batch, double factor) {
  double unbiased = batch.count / std::max(1.0, batch.count - 1);
  for (size_t i = 0; i < mean->size(); ++i) {
    (*mean)[i] += factor * (batch.mean[i] - (*mean)[i]);
    (*variance)[i] += factor * (batch.variance[i] * unbiased - (*variance)[i]);
  }
}

int64_t places_of(const Tensor &tensor) { return tensor.size() / (tensor.dim(0) * tensor.dim(1)); }

Values normalised(const Values &v, const Values &mean, const Values &scale, const Values &gamma, const Values &beta,
                  int64_t places) {
  Values result(v.size());
  for (size_t i = 0; i < v.size(); ++i) {
    size_t channel = i / places % mean.size();
    result[i] = (v[i] - mean[channel]) * scale[channel] * gamma[channel] + beta[channel];
  }
  return result;
}

Values scales_of(const Values &variance, double epsilon) {
  Values result;
  for (double one : variance) result.push_back(1 / std::sqrt(one + epsilon));
  return result;
}

struct NormGradient {
  Values input, gamma, beta;
};

// With the batch's own mean and scale these depend on the input, too; with the running ones they don't.
NormGradient norm_gradient(const Values &dy, const Values &v, const Values &mean, const Values &scale,
                           const Values &gamma, int64_t places, bool own_statistics) {
  size_t channels = mean.size();
  NormGradient result{Values(v.size()), Values(channels, 0.0), Values(channels, 0.0)};
  for (size_t i = 0; i < v.size(); ++i) {
    size_t channel = i / places % channels;
    result.gamma[channel] += dy[i] * (v[i] - mean[channel]) * scale[channel];
    result.beta[channel] += dy[i];
  }
  double count = static_cast<double>(v.size()) / static_cast<double>(channels);
  for (size_t i = 0; i < v.size(); ++i) {
    size_t channel = i / places % channels;
    double normal = (v[i] - mean[channel]) * scale[channel];
    double shared = own_statistics ? (result.beta[channel] + normal * result.gamma[channel]) / count : 0;
    result.input[i] = gamma[channel] * scale[channel] * (dy[i] - shared);
  }
  return result;
}

}  // namespace

OPERATOR(BatchNorm, In input, In weight, In bias, Out running_mean, Out running_variance, bool training,
         double momentum, double epsilon, Out output, Out saved_mean, Out saved_scale) {
  Operator op = OP;
  Tensor x = op.in(input), w{}, b{}, y = op.out(output), mean_out = op.out(saved_mean), scale_out = op.out(saved_scale);
  bool weighted = weight != nullptr, biased = bias != nullptr;
  if (weighted) w = op.in(weight);
  if (biased) b = op.in(bias);
  Tensor mean_kept = training ? op.in_out(running_mean) : op.in(running_mean);
  Tensor variance_kept = training ? op.in_out(running_variance) : op.in(running_variance);
  op.partial_results(2 * input->dim(1));
  return op.run([=] {
    Values v = read(x);
    int64_t channels = x.dim(1), places = places_of(x);
    Values gamma = weighted ? read(w) : Values(channels, 1.0), beta = biased ? read(b) : Values(channels, 0.0);
    Values kept_mean = read(mean_kept), kept_variance = read(variance_kept);
    if (!training) return write(y, normalised(v, kept_mean, scales_of(kept_variance, epsilon), gamma, beta, places));
    Statistics batch = statistics_of(v, channels, places);
    Values scale = scales_of(batch.variance, epsilon);
    follow(&kept_mean, &kept_variance, batch, momentum);
    write(y, normalised(v, batch.mean, scale, gamma, beta, places));
    write(mean_kept, kept_mean);
    write(variance_kept, kept_variance);
    write(mean_out, batch.mean);
    write(scale_out, scale);
  });
}
OPERATOR(BatchNormBackward, In gradient, In input, In weight, In running_mean, In running_variance, In saved_mean,
         In saved_scale, bool training, double epsilon, const aclBoolArray *, Out input_gradient, Out weight_gradient,
         Out bias_gradient) {
  Operator op = OP;
  Tensor dy = op.in(gradient), x = op.in(input), w{}, dx = op.out(input_gradient);
  bool weighted = weight != nullptr, wants_weight = weight_gradient != nullptr, wants_bias = bias_gradient != nullptr;
  if (weighted) w = op.in(weight);
  Tensor mean = op.in(training ? saved_mean : running_mean), spread = op.in(training ? saved_scale : running_variance);
  Tensor dw = wants_weight ? op.out(weight_gradient) : Tensor{}, db = wants_bias ? op.out(bias_gradient) : Tensor{};
  op.partial_results(2 * input->dim(1));
  return op.run([=] {
    Values scale = training ? read(spread) : scales_of(read(spread), epsilon);
    Values gamma = weighted ? read(w) : Values(x.dim(1), 1.0);
    NormGradient result = norm_gradient(read(dy), read(x), read(mean), scale, gamma, places_of(x), training);
    write(dx, result.input);
    if (wants_weight) write(dw, result.gamma);
    if (wants_bias) write(db, result.beta);
  });
}

namespace {

// Inputs: input, gamma, beta, running mean, running variance.
void normalise_for_inference(const LegacyCall &call) {
  const Tensor &x = call.inputs[0];
  Values scale = scales_of(read(call.inputs[4]), call.number("epsilon", 1e-5));
  write(call.outputs[0], normalised(read(x), read(call.inputs[3]), scale, read(call.inputs[1]), read(call.inputs[2]),
                                    places_of(x)));
}

// Training is in two operators: sums of each channel first, then everything else.
void sum_channels(const LegacyCall &call) {
  const Tensor &x = call.inputs[0];
  Values v = read(x), sums(x.dim(1), 0.0), squares(x.dim(1), 0.0);
  int64_t places = places_of(x);
  for (size_t i = 0; i < v.size(); ++i) {
    sums[i / places % sums.size()] += v[i];
    squares[i / places % sums.size()] += v[i] * v[i];
  }
  write(call.outputs[0], sums);
  write(call.outputs[1], squares);
}

// Inputs: input, sums, sums of squares, gamma, beta, running mean, running variance.
void normalise_for_training(const LegacyCall &call) {
  const Tensor &x = call.inputs[0];
  Values v = read(x), gamma = read(call.inputs[3]), beta = read(call.inputs[4]);
  Values mean = read(call.inputs[5]), variance = read(call.inputs[6]);
  int64_t places = places_of(x);
  Statistics batch = statistics_of(v, x.dim(1), places);
  follow(&mean, &variance, batch, call.number("factor", 0.1));
  Values scale = scales_of(batch.variance, call.number("epsilon", 1e-5));
  write(call.outputs[0], normalised(v, batch.mean, scale, gamma, beta, places));
  write(call.outputs[1], mean);
  write(call.outputs[2], variance);
  write(call.outputs[3], batch.mean);
  write(call.outputs[4], batch.variance);
}

// Inputs: gradient, input, mean, variance. Outputs: gradients of gamma and beta.
void norm_weight_gradients(const LegacyCall &call) {
  const Tensor &x = call.inputs[1];
  Values mean = read(call.inputs[2]), scale = scales_of(read(call.inputs[3]), call.number("epsilon", 1e-4));
  Values gamma(mean.size(), 1.0);
  NormGradient result = norm_gradient(read(call.inputs[0]), read(x), mean, scale, gamma, places_of(x), true);
  write(call.outputs[0], result.gamma);
  write(call.outputs[1], result.beta);
}

// Inputs: gradient, input, gradients of gamma and beta, gamma, mean, variance.
void norm_input_gradient(const LegacyCall &call) {
  const Tensor &x = call.inputs[1];
  Values scale = scales_of(read(call.inputs[6]), call.number("epsilon", 1e-4));
  NormGradient result = norm_gradient(read(call.inputs[0]), read(x), read(call.inputs[5]), scale, read(call.inputs[4]),
                                      places_of(x), true);
  write(call.outputs[0], result.input);
}

// Inputs: gradient, gamma, running variance.
void inference_input_gradient(const LegacyCall &call) {
  Values g = read(call.inputs[0]), gamma = read(call.inputs[1]);
  Values scale = scales_of(read(call.inputs[2]), call.number("epsilon", 1e-4));
  int64_t places = places_of(call.inputs[0]);
  for (size_t i = 0; i < g.size(); ++i) g[i] *= gamma[i / places % gamma.size()] * scale[i / places % gamma.size()];
  write(call.outputs[0], g);
}

const LegacyOperators kOperators{{
  {"BNInfer", {normalise_for_inference, {}}},
  {"BNInferGrad", {inference_input_gradient, {}}},
  {"BNTrainingReduce", {sum_channels, {}}},
  {"BNTrainingReduceGrad", {norm_input_gradient, {}}},
  {"BNTrainingUpdate", {normalise_for_training, {}}},
  {"BNTrainingUpdateGrad", {norm_weight_gradients, {}}},
}};

}  // namespace
