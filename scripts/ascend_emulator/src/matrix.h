// The product of two dense matrices in fp32.
#pragma once
#include <cstdint>

namespace ascsim {

// out[rows, columns] = left[rows, inner] * right[inner, columns], always in the same order of additions.
void multiply(const float *left, const float *right, float *out, int64_t rows, int64_t inner, int64_t columns);

}  // namespace ascsim
