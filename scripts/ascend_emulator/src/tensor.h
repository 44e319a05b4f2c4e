// Tensors as aclnn operators are given them, and reading and writing their elements.
#pragma once
#include <cstdint>
#include <vector>

#include "acl.h"

namespace ascsim {

enum DataType {
  kFloat = 0, kFloat16 = 1, kInt8 = 2, kInt32 = 3, kUint8 = 4, kInt16 = 6, kUint16 = 7, kUint32 = 8, kInt64 = 9,
  kUint64 = 10, kDouble = 11, kBool = 12, kComplex64 = 16, kComplex128 = 17, kBfloat16 = 27,
};

size_t size_of(int type);  // bytes of an element
bool is_floating(int type);

using Shape = std::vector<int64_t>;
using Values = std::vector<double>;  // elements in C order

int64_t elements(const Shape &shape);
Shape dense_strides(const Shape &shape);

}  // namespace ascsim

// The opaque types of AscendCL's C interface.
struct aclTensor {
  ascsim::Shape shape, strides;
  int64_t offset;
  int type;
  char *data;

  int64_t rank() const { return static_cast<int64_t>(shape.size()); }
  int64_t size() const { return ascsim::elements(shape); }
  int64_t dim(int64_t axis) const { return shape[axis < 0 ? axis + rank() : axis]; }
  size_t bytes() const { return static_cast<size_t>(size()) * ascsim::size_of(type); }
  char *begin() const { return data + offset * static_cast<int64_t>(ascsim::size_of(type)); }
  bool dense() const;
};

struct aclScalar {
  int type;
  char value[16];
};

struct aclIntArray {
  std::vector<int64_t> values;
};

struct aclFloatArray {
  std::vector<float> values;
};

struct aclBoolArray {
  std::vector<char> values;
};

struct aclTensorList {
  std::vector<aclTensor *> tensors;
};

namespace ascsim {

using Tensor = ::aclTensor;

double value_of(const aclScalar *scalar, double standard = 0);

// The addresses that a tensor's elements take: exact if it is dense or has few rows, else from the first to the last.
std::vector<Range> ranges_of(const Tensor &tensor);

// `tensor` as if it had the given shape: dimensions of length 1, and missing ones in front, repeat.
Tensor broadcast(const Tensor &tensor, const Shape &shape);

Values read(const Tensor &tensor);
Values read(const Tensor &tensor, const Shape &broadcast_to);
std::vector<float> read_floats(const Tensor &tensor);
std::vector<int64_t> read_integers(const Tensor &tensor);
void write(const Tensor &tensor, const Values &values);
void write_floats(const Tensor &tensor, const std::vector<float> &values);
void write_integers(const Tensor &tensor, const std::vector<int64_t> &values);
// Bit by bit where the types are the same, else with conversion; `from` is broadcast.
void copy_elements(const Tensor &to, const Tensor &from);

}  // namespace ascsim
