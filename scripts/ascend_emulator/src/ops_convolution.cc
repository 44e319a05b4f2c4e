// Convolutions and pooling.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "convolution.h"
#include "legacy.h"
#include "operator.h"

using namespace ascsim;

namespace {

using Pair = std::pair<int64_t, int64_t>;

Pair pair_of(const std::vector<int64_t> &values, int64_t standard = 1) {
  if (values.empty()) return {standard, standard};
  return {values[0], values.size() > 1 ? values[1] : values[0]};
}

Window window_of(Pair kernel, Pair step, Pair padding, Pair spread, const Tensor &input, const Tensor &output) {
  return {kernel.first,  kernel.second, step.first,    step.second,   padding.first,  padding.second,
          spread.first,  spread.second, input.dim(-2), input.dim(-1), output.dim(-2), output.dim(-1)};
}

Convolution convolution_of(const Tensor &input, const Tensor &weight, const Tensor &output, Pair step, Pair padding,
                           Pair spread, int64_t groups) {
  Window window = window_of({weight.dim(-2), weight.dim(-1)}, step, padding, spread, input, output);
  return {window, input.dim(0), input.dim(1), weight.dim(0), groups};
}

void add_bias(std::vector<float> *values, const Values &bias, int64_t places) {
  for (size_t i = 0; i < values->size(); ++i) (*values)[i] += static_cast<float>(bias[i / places % bias.size()]);
}

Values channel_sums(const Tensor &gradient) {
  Values v = read(gradient), result(gradient.dim(1), 0.0);
  int64_t places = gradient.dim(-1) * gradient.dim(-2);
  for (size_t i = 0; i < v.size(); ++i) result[i / places % result.size()] += v[i];
  return result;
}

}  // namespace

OPERATOR(Convolution, In input, In weight, In bias, Integers stride, Integers padding, Integers dilation,
         bool transposed, Integers, int64_t groups, Out output, int8_t) {
  Operator op = OP;
  if (transposed || input->rank() != 4) return op.refuse("a convolution that is transposed or not of two dimensions");
  Tensor x = op.in(input), w = op.in(weight), y = op.out(output), b{};
  bool biased = bias != nullptr;
  if (biased) b = op.in(bias);
  Convolution how = convolution_of(x, w, y, pair_of(stride->values), pair_of(padding->values, 0),
                                   pair_of(dilation->values), groups);
  op.partial_results(how.patch() * how.places());
  return op.run([=] {
    std::vector<float> result = how.forward(read_floats(x), read_floats(w));
    if (biased) add_bias(&result, read(b), how.places());
    write_floats(y, result);
  });
}
OPERATOR(ConvolutionBackward, In gradient, In input, In weight, Integers, Integers stride, Integers padding,
         Integers dilation, bool transposed, Integers, int groups, const aclBoolArray *wanted, int8_t,
         Out input_gradient, Out weight_gradient, Out bias_gradient) {
  Operator op = OP;
  if (transposed || input->rank() != 4) return op.refuse("a convolution that is transposed or not of two dimensions");
  Tensor dy = op.in(gradient), x = op.in(input), w = op.in(weight), outputs[3];
  Out given[] = {input_gradient, weight_gradient, bias_gradient};
  bool wants[3];
  for (size_t i = 0; i < 3; ++i) {
    wants[i] = given[i] != nullptr && wanted->values[i] != 0;
    if (wants[i]) outputs[i] = op.out(given[i]);
  }
  Convolution how = convolution_of(x, w, dy, pair_of(stride->values), pair_of(padding->values, 0),
                                   pair_of(dilation->values), groups);
  op.partial_results(how.patch() * how.places() + how.weight_size());
  bool wants_input = wants[0], wants_weight = wants[1], wants_bias = wants[2];
  Tensor dx = outputs[0], dw = outputs[1], db = outputs[2];
  return op.run([=] {
    std::vector<float> g = read_floats(dy);
    if (wants_input) write_floats(dx, how.input_gradient(g, read_floats(w)));
    if (wants_weight) write_floats(dw, how.weight_gradient(g, read_floats(x)));
    if (wants_bias) write(db, channel_sums(dy));
  });
}

namespace {

// Attributes are given for all four dimensions, padding as top, bottom, left, right.
Convolution convolution_of(const LegacyCall &call, const Tensor &input, const Tensor &weight, const Tensor &output) {
  std::vector<int64_t> strides = call.integers("strides"), pads = call.integers("pads");
  std::vector<int64_t> spread = call.integers("dilations");
  return convolution_of(input, weight, output, {strides[2], strides[3]}, {pads[0], pads[2]}, {spread[2], spread[3]},
                        static_cast<int64_t>(call.number("groups", 1)));
}

void convolve(const LegacyCall &call) {
  const Tensor &x = call.inputs[0], &w = call.inputs[1], &y = call.outputs[0];
  Convolution how = convolution_of(call, x, w, y);
  std::vector<float> result = how.forward(read_floats(x), read_floats(w));
  if (call.inputs.size() > 2 && call.inputs[2].data != nullptr) add_bias(&result, read(call.inputs[2]), how.places());
  write_floats(y, result);
}

// Inputs: the input's sizes, weight, gradient.
void convolve_input_gradient(const LegacyCall &call) {
  const Tensor &w = call.inputs[1], &dy = call.inputs[2], &dx = call.outputs[0];
  write_floats(dx, convolution_of(call, dx, w, dy).input_gradient(read_floats(dy), read_floats(w)));
}

// Inputs: input, the weight's sizes, gradient.
void convolve_weight_gradient(const LegacyCall &call) {
  const Tensor &x = call.inputs[0], &dy = call.inputs[2], &dw = call.outputs[0];
  write_floats(dw, convolution_of(call, x, dw, dy).weight_gradient(read_floats(dy), read_floats(x)));
}

int64_t images(const Tensor &tensor) { return tensor.size() / std::max<int64_t>(1, tensor.dim(-1) * tensor.dim(-2)); }

// Pooling: `use(output place, window's input places)` over all images and channels.
template <class Use>
void pool(const Window &window, int64_t count, Use use) {
  int64_t input_size = window.input_height * window.input_width, at = 0;
  std::vector<int64_t> places;
  for (int64_t image = 0; image < count; ++image) {
    for (int64_t y = 0; y < window.output_height; ++y) {
      for (int64_t x = 0; x < window.output_width; ++x, ++at) {
        places.clear();
        window.each(y, x, [&](int64_t, int64_t place) { places.push_back(image * input_size + place); });
        use(at, places);
      }
    }
  }
}

int64_t place_of_greatest(const Values &v, const std::vector<int64_t> &places) {
  return *std::max_element(places.begin(), places.end(), [&](int64_t a, int64_t b) { return v[a] < v[b]; });
}

// The greatest of each window, and where it was in its image.
void max_pool(const Window &window, const Tensor &x, const Tensor &y, const Tensor *index) {
  Values v = read(x), result(y.size());
  std::vector<int64_t> where(y.size());
  int64_t size = window.input_height * window.input_width;
  pool(window, images(x), [&](int64_t at, const std::vector<int64_t> &places) {
    int64_t best = place_of_greatest(v, places);
    result[at] = v[best];
    where[at] = best % size;
  });
  write(y, result);
  if (index != nullptr) write_integers(*index, where);
}

// What was the greatest is found again from the input: the index between may be of any layout.
void max_pool_gradient(const Window &window, const Tensor &dy, const Tensor &x, const Tensor &dx) {
  Values g = read(dy), v = read(x), result(dx.size(), 0.0);
  pool(window, images(x), [&](int64_t at, const std::vector<int64_t> &places) {
    result[place_of_greatest(v, places)] += g[at];
  });
  write(dx, result);
}

struct Averaging {
  Window window;
  bool counts_padding;
  int64_t divisor;  // 0: the window's size
  double divide_by(const std::vector<int64_t> &places) const {
    if (divisor != 0) return static_cast<double>(divisor);
    return static_cast<double>(counts_padding ? window.height * window.width : static_cast<int64_t>(places.size()));
  }
};

void average_pool(const Averaging &how, const Tensor &x, const Tensor &y) {
  Values v = read(x), result(y.size());
  pool(how.window, images(x), [&](int64_t at, const std::vector<int64_t> &places) {
    double sum = 0;
    for (int64_t place : places) sum += v[place];
    result[at] = sum / how.divide_by(places);
  });
  write(y, result);
}

void average_pool_gradient(const Averaging &how, const Tensor &dy, const Tensor &dx) {
  Values g = read(dy), result(dx.size(), 0.0);
  pool(how.window, images(dx), [&](int64_t at, const std::vector<int64_t> &places) {
    for (int64_t place : places) result[place] += g[at] / how.divide_by(places);
  });
  write(dx, result);
}

Window window_of(Integers kernel, Integers stride, Integers padding, Integers dilation, const Tensor &x,
                 const Tensor &y) {
  Pair size = pair_of(kernel->values), step = stride->values.empty() ? size : pair_of(stride->values);
  Pair spread = dilation != nullptr ? pair_of(dilation->values) : Pair{1, 1};
  return window_of(size, step, pair_of(padding->values, 0), spread, x, y);
}

aclError max_pool(Operator op, In input, Integers kernel, Integers stride, Integers padding, Integers dilation,
                  Out output, Out index) {
  Tensor x = op.in(input), y = op.out(output), where = op.out(index);
  Window window = window_of(kernel, stride, padding, dilation, x, y);
  // The operator "with mask" has an index of its own layout, which only its gradient reads.
  bool plain_index = where.shape == y.shape && (where.type == kInt32 || where.type == kInt64);
  return op.run([=] { max_pool(window, x, y, plain_index ? &where : nullptr); });
}

aclError max_pool_gradient(Operator op, In gradient, In input, In index, Integers kernel, Integers stride,
                           Integers padding, Integers dilation, Out input_gradient) {
  Tensor dy = op.in(gradient), x = op.in(input), dx = op.out(input_gradient);
  op.in(index);
  Window window = window_of(kernel, stride, padding, dilation, x, dy);
  return op.run([=] { max_pool_gradient(window, dy, x, dx); });
}

}  // namespace

OPERATOR(MaxPool2dWithMask, In input, Integers kernel, Integers stride, Integers padding, Integers dilation, bool,
         Out output, Out index) {
  return max_pool(OP, input, kernel, stride, padding, dilation, output, index);
}
OPERATOR(MaxPool2dWithIndices, In input, Integers kernel, Integers stride, Integers padding, Integers dilation, bool,
         Out output, Out index) {
  return max_pool(OP, input, kernel, stride, padding, dilation, output, index);
}
OPERATOR(MaxPool2dWithMaskBackward, In gradient, In input, In index, Integers kernel, Integers stride, Integers padding,
         Integers dilation, bool, Out input_gradient) {
  return max_pool_gradient(OP, gradient, input, index, kernel, stride, padding, dilation, input_gradient);
}
OPERATOR(MaxPool2dWithIndicesBackward, In gradient, In input, In index, Integers kernel, Integers stride,
         Integers padding, Integers dilation, bool, Out input_gradient) {
  return max_pool_gradient(OP, gradient, input, index, kernel, stride, padding, dilation, input_gradient);
}
OPERATOR(AvgPool2d, In input, Integers kernel, Integers stride, Integers padding, bool, bool counts_padding,
         int64_t divisor, int8_t, Out output) {
  Operator op = OP;
  Tensor x = op.in(input), y = op.out(output);
  Averaging how{window_of(kernel, stride, padding, nullptr, x, y), counts_padding, divisor};
  return op.run([=] { average_pool(how, x, y); });
}
OPERATOR(AvgPool2dBackward, In gradient, In, Integers kernel, Integers stride, Integers padding, bool,
         bool counts_padding, int64_t divisor, int8_t, Out input_gradient) {
  Operator op = OP;
  Tensor dy = op.in(gradient), dx = op.out(input_gradient);
  Averaging how{window_of(kernel, stride, padding, nullptr, dx, dy), counts_padding, divisor};
  return op.run([=] { average_pool_gradient(how, dy, dx); });
}

namespace {

// For each output the mean over its share of the input, where shares divide the input evenly.
Averaging even_shares(const Tensor &x, const Tensor &y) {
  Pair size{x.dim(-2) / y.dim(-2), x.dim(-1) / y.dim(-1)};
  return {window_of(size, size, {0, 0}, {1, 1}, x, y), true, 0};
}

bool divides_evenly(In x, In y) { return x->dim(-2) % y->dim(-2) == 0 && x->dim(-1) % y->dim(-1) == 0; }

// Of an older pooling operator: kernel and stride for all four dimensions.
Window pooling_window(const LegacyCall &call, const Tensor &x, const Tensor &y) {
  std::vector<int64_t> kernel = call.integers("ksize"), stride = call.integers("strides");
  Pair padding{0, 0};
  if (call.text("padding", call.text("padding_mode", "VALID")) == "SAME") {
    auto before = [](int64_t input, int64_t output, int64_t size, int64_t step) {
      return std::max<int64_t>(0, (output - 1) * step + size - input) / 2;
    };
    padding = {before(x.dim(-2), y.dim(-2), kernel[2], stride[2]), before(x.dim(-1), y.dim(-1), kernel[3], stride[3])};
  }
  return window_of({kernel[2], kernel[3]}, {stride[2], stride[3]}, padding, {1, 1}, x, y);
}

}  // namespace

OPERATOR(AdaptiveAvgPool2d, In input, Integers, Out output) {
  Operator op = OP;
  if (!divides_evenly(input, output)) return op.refuse("adaptive pooling into unequal shares");
  Tensor x = op.in(input), y = op.out(output);
  return op.run([=] { average_pool(even_shares(x, y), x, y); });
}
OPERATOR(AdaptiveAvgPool2dBackward, In gradient, In input, Out input_gradient) {
  Operator op = OP;
  if (!divides_evenly(input, gradient)) return op.refuse("adaptive pooling into unequal shares");
  Tensor dy = op.in(gradient), dx = op.out(input_gradient);
  return op.run([=] { average_pool_gradient(even_shares(dx, dy), dy, dx); });
}
namespace {

const LegacyOperators kOperators{{
  {"AvgPool", {[](const LegacyCall &call) {
     const Tensor &x = call.inputs[0], &y = call.outputs[0];
     average_pool({pooling_window(call, x, y), false, 0}, x, y);
   }, {}}},
  {"AvgPoolGrad", {[](const LegacyCall &call) {
     const Tensor &dy = call.inputs[1], &dx = call.outputs[0];
     average_pool_gradient({pooling_window(call, dx, dy), false, 0}, dy, dx);
   }, {}}},
  {"Conv2D", {convolve, {}}},
  {"Conv2DBackpropFilter", {convolve_weight_gradient, {}}},
  {"Conv2DBackpropInput", {convolve_input_gradient, {}}},
  {"MaxPool", {[](const LegacyCall &call) {
     max_pool(pooling_window(call, call.inputs[0], call.outputs[0]), call.inputs[0], call.outputs[0], nullptr);
   }, {}}},
  {"MaxPoolGrad", {[](const LegacyCall &call) {
     max_pool_gradient(pooling_window(call, call.inputs[0], call.inputs[1]), call.inputs[2], call.inputs[0],
                       call.outputs[0]);
   }, {}}},
}};

}  // namespace
