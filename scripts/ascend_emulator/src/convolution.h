// Convolutions and pooling windows over dense images [batch, channels, height, width].
#pragma once
#include <cstdint>
#include <vector>

namespace ascsim {

struct Window {
  int64_t height, width;                              // of the kernel
  int64_t step_y, step_x, top, left;                  // strides and padding
  int64_t spread_y, spread_x;                         // dilation
  int64_t input_height, input_width, output_height, output_width;

  // Calls `use(kernel place, input place)` for the places of one output that lie within the input.
  template <class Use>
  void each(int64_t y, int64_t x, Use use) const {
    for (int64_t i = 0; i < height; ++i) {
      int64_t row = y * step_y - top + i * spread_y;
      if (row < 0 || row >= input_height) continue;
      for (int64_t j = 0; j < width; ++j) {
        int64_t column = x * step_x - left + j * spread_x;
        if (column >= 0 && column < input_width) use(i * width + j, row * input_width + column);
      }
    }
  }
};

struct Convolution {
  Window window;
  int64_t batch, inputs, outputs, groups;  // channels

  int64_t patch() const { return inputs / groups * window.height * window.width; }
  int64_t places() const { return window.output_height * window.output_width; }
  int64_t input_size() const { return batch * inputs * window.input_height * window.input_width; }
  int64_t output_size() const { return batch * outputs * places(); }
  int64_t weight_size() const { return outputs * patch(); }

  std::vector<float> forward(const std::vector<float> &input, const std::vector<float> &weight) const;
  std::vector<float> input_gradient(const std::vector<float> &output_gradient, const std::vector<float> &weight) const;
  std::vector<float> weight_gradient(const std::vector<float> &output_gradient, const std::vector<float> &input) const;

 private:
  // The patches that the outputs of one group of one image see: [patch, places].
  std::vector<float> patches(const float *image) const;
};

}  // namespace ascsim
