#include "matrix.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace ascsim {
namespace {

constexpr int64_t kTile = 64;      // columns kept in registers and first-level cache
constexpr int64_t kPartial = 128;  // terms summed before they are added to the total: keeps the rounding error small

// sums[4, width] += left[4 rows, terms] * right[terms, width]
template <int kRows>
void add_products(const float *left, int64_t left_step, const float *right, int64_t right_step, int64_t terms,
                  int64_t width, float sums[][kTile]) {
  for (int64_t k = 0; k < terms; ++k) {
    const float *line = right + k * right_step;
    for (int row = 0; row < kRows; ++row) {
      float factor = left[row * left_step + k];
      if (width == kTile) {
        for (int64_t j = 0; j < kTile; ++j) sums[row][j] += factor * line[j];
      } else {
        for (int64_t j = 0; j < width; ++j) sums[row][j] += factor * line[j];
      }
    }
  }
}

template <int kRows>
void multiply_rows(const float *left, const float *right, float *out, int64_t inner, int64_t columns) {
  float sums[kRows][kTile];
  for (int64_t column = 0; column < columns; column += kTile) {
    int64_t width = std::min(kTile, columns - column);
    for (int row = 0; row < kRows; ++row) memset(out + row * columns + column, 0, width * sizeof(float));
    for (int64_t k = 0; k < inner; k += kPartial) {
      memset(sums, 0, sizeof sums);
      add_products<kRows>(left + k, inner, right + k * columns + column, columns, std::min(kPartial, inner - k), width,
                          sums);
      for (int row = 0; row < kRows; ++row) {
        float *to = out + row * columns + column;
        for (int64_t j = 0; j < width; ++j) to[j] += sums[row][j];
      }
    }
  }
}

}  // namespace

void multiply(const float *left, const float *right, float *out, int64_t rows, int64_t inner, int64_t columns) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) multiply_rows<4>(left + row * inner, right, out + row * columns, inner, columns);
  for (; row < rows; ++row) multiply_rows<1>(left + row * inner, right, out + row * columns, inner, columns);
}

}  // namespace ascsim
