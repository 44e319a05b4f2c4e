#include "convolution.h"

#include <cstddef>

#include "matrix.h"

namespace ascsim {
namespace {

std::vector<float> transposed(const float *matrix, int64_t rows, int64_t columns) {
  std::vector<float> result(rows * columns);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) result[j * rows + i] = matrix[i * columns + j];
  }
  return result;
}

}  // namespace

std::vector<float> Convolution::patches(const float *image) const {
  std::vector<float> result(patch() * places(), 0.0f);
  int64_t area = window.height * window.width, size = window.input_height * window.input_width, at = 0;
  for (int64_t y = 0; y < window.output_height; ++y) {
    for (int64_t x = 0; x < window.output_width; ++x, ++at) {
      window.each(y, x, [&](int64_t kernel, int64_t place) {
        for (int64_t channel = 0; channel < inputs / groups; ++channel) {
          result[(channel * area + kernel) * places() + at] = image[channel * size + place];
        }
      });
    }
  }
  return result;
}

std::vector<float> Convolution::forward(const std::vector<float> &input, const std::vector<float> &weight) const {
  std::vector<float> result(output_size());
  int64_t group_inputs = inputs / groups, group_outputs = outputs / groups;
  for (int64_t image = 0; image < batch; ++image) {
    for (int64_t group = 0; group < groups; ++group) {
      int64_t first = image * inputs + group * group_inputs;
      std::vector<float> seen = patches(&input[first * window.input_height * window.input_width]);
      multiply(&weight[group * group_outputs * patch()], seen.data(),
               &result[(image * outputs + group * group_outputs) * places()], group_outputs, patch(), places());
    }
  }
  return result;
}

std::vector<float> Convolution::input_gradient(const std::vector<float> &output_gradient,
                                               const std::vector<float> &weight) const {
  std::vector<float> result(input_size(), 0.0f), spread(patch() * places());
  int64_t group_inputs = inputs / groups, group_outputs = outputs / groups;
  int64_t area = window.height * window.width, size = window.input_height * window.input_width;
  for (int64_t group = 0; group < groups; ++group) {
    std::vector<float> turned = transposed(&weight[group * group_outputs * patch()], group_outputs, patch());
    for (int64_t image = 0; image < batch; ++image) {
      multiply(turned.data(), &output_gradient[(image * outputs + group * group_outputs) * places()], spread.data(),
               patch(), group_outputs, places());
      float *to = &result[(image * inputs + group * group_inputs) * size];
      int64_t at = 0;
      for (int64_t y = 0; y < window.output_height; ++y) {
        for (int64_t x = 0; x < window.output_width; ++x, ++at) {
          window.each(y, x, [&](int64_t kernel, int64_t place) {
            for (int64_t channel = 0; channel < group_inputs; ++channel) {
              to[channel * size + place] += spread[(channel * area + kernel) * places() + at];
            }
          });
        }
      }
    }
  }
  return result;
}

std::vector<float> Convolution::weight_gradient(const std::vector<float> &output_gradient,
                                                const std::vector<float> &input) const {
  std::vector<float> result(weight_size(), 0.0f);
  int64_t group_inputs = inputs / groups, group_outputs = outputs / groups;
  std::vector<float> part(group_outputs * patch());
  for (int64_t image = 0; image < batch; ++image) {
    for (int64_t group = 0; group < groups; ++group) {
      int64_t first = image * inputs + group * group_inputs;
      std::vector<float> seen = patches(&input[first * window.input_height * window.input_width]);
      std::vector<float> turned = transposed(seen.data(), patch(), places());
      multiply(&output_gradient[(image * outputs + group * group_outputs) * places()], turned.data(), part.data(),
               group_outputs, places(), patch());
      float *to = &result[group * group_outputs * patch()];
      for (std::size_t i = 0; i < part.size(); ++i) to[i] += part[i];
    }
  }
  return result;
}

}  // namespace ascsim
