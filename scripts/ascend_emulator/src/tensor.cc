#include "tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace ascsim {
namespace {

struct Half {
  uint16_t bits;
  explicit operator double() const {
    _Float16 value;
    memcpy(&value, &bits, sizeof bits);
    return static_cast<double>(value);
  }
  static Half from(double number) {
    auto value = static_cast<_Float16>(static_cast<float>(number));
    Half result;
    memcpy(&result.bits, &value, sizeof result.bits);
    return result;
  }
};

struct Bfloat {
  uint16_t bits;
  explicit operator double() const {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof wide);
    return value;
  }
  static Bfloat from(double number) {
    auto value = static_cast<float>(number);
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    if (std::isnan(value)) return {static_cast<uint16_t>((wide >> 16) | 0x40)};
    wide += 0x7fff + ((wide >> 16) & 1);  // to the nearest, ties to even
    return {static_cast<uint16_t>(wide >> 16)};
  }
};

struct Truth {
  uint8_t byte;
};

template <class Stored>
double load(Stored stored) {
  return static_cast<double>(stored);
}
template <>
double load(Truth stored) {
  return stored.byte != 0;
}

template <class Stored, class Value>
Stored stored(Value value) {
  if constexpr (std::is_same_v<Stored, Truth>) {
    return {static_cast<uint8_t>(value != 0)};
  } else if constexpr (std::is_arithmetic_v<Stored>) {
    return static_cast<Stored>(value);
  } else {
    return Stored::from(static_cast<double>(value));
  }
}

// Calls `use` with a pointer to the first element, of the element's own C++ type.
template <class Use>
void with_type(const Tensor &tensor, Use use) {
  char *begin = tensor.begin();
  switch (tensor.type) {
    case kFloat: return use(reinterpret_cast<float *>(begin));
    case kDouble: return use(reinterpret_cast<double *>(begin));
    case kFloat16: return use(reinterpret_cast<Half *>(begin));
    case kBfloat16: return use(reinterpret_cast<Bfloat *>(begin));
    case kInt8: return use(reinterpret_cast<int8_t *>(begin));
    case kUint8: return use(reinterpret_cast<uint8_t *>(begin));
    case kInt16: return use(reinterpret_cast<int16_t *>(begin));
    case kUint16: return use(reinterpret_cast<uint16_t *>(begin));
    case kInt32: return use(reinterpret_cast<int32_t *>(begin));
    case kUint32: return use(reinterpret_cast<uint32_t *>(begin));
    case kInt64: return use(reinterpret_cast<int64_t *>(begin));
    case kUint64: return use(reinterpret_cast<uint64_t *>(begin));
    case kBool: return use(reinterpret_cast<Truth *>(begin));
    default: fail(kNotSupported, "elements of ACL type %d are not emulated", tensor.type);
  }
}

// Calls `use(position, place)` for all elements in C order, `place` counted in elements from the first.
template <class Use>
void walk(const Tensor &tensor, Use use) {
  int64_t size = tensor.size();
  if (tensor.dense()) {
    for (int64_t i = 0; i < size; ++i) use(i, i);
    return;
  }
  int64_t rank = tensor.rank();
  int64_t row = rank > 0 ? tensor.shape[rank - 1] : 1, step = rank > 0 ? tensor.strides[rank - 1] : 0;
  Shape index(rank, 0);
  int64_t place = 0;
  for (int64_t position = 0; position < size;) {
    for (int64_t i = 0; i < row; ++i) use(position + i, place + i * step);
    position += row;
    for (int64_t axis = rank - 2; axis >= 0; --axis) {
      place += tensor.strides[axis];
      if (++index[axis] < tensor.shape[axis]) break;
      place -= tensor.strides[axis] * tensor.shape[axis];
      index[axis] = 0;
    }
  }
}

template <class Value>
std::vector<Value> read_as(const Tensor &tensor) {
  std::vector<Value> result(tensor.size());
  with_type(tensor, [&](auto *elements) {
    Value *out = result.data();
    if constexpr (std::is_integral_v<Value> && std::is_integral_v<std::decay_t<decltype(*elements)>>) {
      walk(tensor, [=](int64_t to, int64_t from) { out[to] = static_cast<Value>(elements[from]); });
    } else {
      walk(tensor, [=](int64_t to, int64_t from) { out[to] = static_cast<Value>(load(elements[from])); });
    }
  });
  return result;
}

template <class Value>
void write_as(const Tensor &tensor, const std::vector<Value> &values) {
  with_type(tensor, [&](auto *elements) {
    using Stored = std::decay_t<decltype(*elements)>;
    const Value *in = values.data();
    walk(tensor, [=](int64_t from, int64_t to) { elements[to] = stored<Stored>(in[from]); });
  });
}

template <class Bits>
void copy_bits(const Tensor &to, const Tensor &from) {
  std::vector<Bits> values(to.size());
  auto *source = reinterpret_cast<const Bits *>(from.begin());
  auto *target = reinterpret_cast<Bits *>(to.begin());
  walk(from, [&](int64_t position, int64_t place) { values[position] = source[place]; });
  walk(to, [&](int64_t position, int64_t place) { target[place] = values[position]; });
}

struct Wide {
  uint64_t parts[2];
};

}  // namespace

size_t size_of(int type) {
  switch (type) {
    case kFloat: case kInt32: case kUint32: return 4;
    case kFloat16: case kBfloat16: case kInt16: case kUint16: return 2;
    case kInt64: case kUint64: case kDouble: case kComplex64: return 8;
    case kComplex128: return 16;
    default: return 1;
  }
}

bool is_floating(int type) { return type == kFloat || type == kFloat16 || type == kBfloat16 || type == kDouble; }

int64_t elements(const Shape &shape) {
  int64_t result = 1;
  for (int64_t length : shape) result *= length;
  return result;
}

Shape dense_strides(const Shape &shape) {
  Shape result(shape.size(), 1);
  for (int64_t axis = static_cast<int64_t>(shape.size()) - 2; axis >= 0; --axis) {
    result[axis] = result[axis + 1] * shape[axis + 1];
  }
  return result;
}

double value_of(const aclScalar *scalar, double standard) {
  if (scalar == nullptr) return standard;
  Tensor one{{}, {}, 0, scalar->type, const_cast<char *>(scalar->value)};
  return read(one)[0];
}

std::vector<Range> ranges_of(const Tensor &tensor) {
  auto size = size_of(tensor.type);
  if (tensor.size() == 0) return {};
  if (tensor.dense()) return {range_of(tensor.begin(), tensor.bytes())};
  // The inner dimensions that lie densely are one piece; the outer ones say where the pieces begin.
  int64_t axis = tensor.rank() - 1, piece = 1;
  while (axis >= 0 && (tensor.shape[axis] == 1 || tensor.strides[axis] == piece)) piece *= tensor.shape[axis--];
  constexpr int64_t kMostPieces = 256;
  Shape outer(tensor.shape.begin(), tensor.shape.begin() + axis + 1);
  std::vector<Range> result;
  if (elements(outer) <= kMostPieces) {
    Tensor begins{outer, Shape(tensor.strides.begin(), tensor.strides.begin() + axis + 1), 0, tensor.type, nullptr};
    walk(begins, [&](int64_t, int64_t place) {
      result.push_back(range_of(tensor.begin() + place * static_cast<int64_t>(size), piece * size));
    });
    return result;
  }
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.rank(); ++i) last += (tensor.shape[i] - 1) * tensor.strides[i];
  return {range_of(tensor.begin(), (last + 1) * size)};
}

Tensor broadcast(const Tensor &tensor, const Shape &shape) {
  Tensor result = tensor;
  result.shape = shape;
  result.strides.assign(shape.size(), 0);
  auto missing = static_cast<int64_t>(shape.size()) - tensor.rank();
  for (int64_t axis = std::max<int64_t>(0, -missing); axis < tensor.rank(); ++axis) {
    result.strides[axis + missing] = tensor.shape[axis] == 1 ? 0 : tensor.strides[axis];
  }
  return result;
}

Values read(const Tensor &tensor) { return read_as<double>(tensor); }
Values read(const Tensor &tensor, const Shape &shape) {
  return tensor.shape == shape ? read(tensor) : read_as<double>(broadcast(tensor, shape));
}
std::vector<float> read_floats(const Tensor &tensor) { return read_as<float>(tensor); }
std::vector<int64_t> read_integers(const Tensor &tensor) { return read_as<int64_t>(tensor); }
void write(const Tensor &tensor, const Values &values) { write_as(tensor, values); }
void write_floats(const Tensor &tensor, const std::vector<float> &values) { write_as(tensor, values); }
void write_integers(const Tensor &tensor, const std::vector<int64_t> &values) { write_as(tensor, values); }

void copy_elements(const Tensor &to, const Tensor &from) {
  Tensor source = from.shape == to.shape ? from : broadcast(from, to.shape);
  if (source.type != to.type) return write(to, read(source));
  if (source.dense() && to.dense()) {
    memmove(to.begin(), source.begin(), to.bytes());
    return;
  }
  switch (size_of(to.type)) {
    case 1: return copy_bits<uint8_t>(to, source);
    case 2: return copy_bits<uint16_t>(to, source);
    case 4: return copy_bits<uint32_t>(to, source);
    case 8: return copy_bits<uint64_t>(to, source);
    default: return copy_bits<Wide>(to, source);
  }
}

}  // namespace ascsim

bool aclTensor::dense() const {
  int64_t expected = 1;
  for (int64_t axis = rank() - 1; axis >= 0; --axis) {
    if (shape[axis] != 1 && strides[axis] != expected) return false;
    expected *= shape[axis];
  }
  return true;
}

ACL_EXPORT aclTensor *aclCreateTensor(const int64_t *shape, uint64_t rank, int type, const int64_t *strides,
                                      int64_t offset, int, const int64_t *, uint64_t, void *data) {
  auto *tensor = new aclTensor{{shape, shape + rank}, {}, offset, type, static_cast<char *>(data)};
  tensor->strides = strides != nullptr ? ascsim::Shape(strides, strides + rank) : ascsim::dense_strides(tensor->shape);
  return tensor;
}

ACL_EXPORT aclScalar *aclCreateScalar(void *value, int type) {
  auto *scalar = new aclScalar{type, {}};
  memcpy(scalar->value, value, ascsim::size_of(type));
  return scalar;
}

ACL_EXPORT aclIntArray *aclCreateIntArray(const int64_t *values, uint64_t size) {
  return new aclIntArray{{values, values + size}};
}

ACL_EXPORT aclFloatArray *aclCreateFloatArray(const float *values, uint64_t size) {
  return new aclFloatArray{{values, values + size}};
}

ACL_EXPORT aclBoolArray *aclCreateBoolArray(const bool *values, uint64_t size) {
  return new aclBoolArray{{values, values + size}};
}

ACL_EXPORT aclTensorList *aclCreateTensorList(aclTensor *const *tensors, uint64_t size) {
  return new aclTensorList{{tensors, tensors + size}};
}

template <class Object>
static aclError destroy(const Object *object) {
  delete object;
  return ascsim::kSuccess;
}

ACL_EXPORT aclError aclDestroyTensor(const aclTensor *tensor) { return destroy(tensor); }
ACL_EXPORT aclError aclDestroyScalar(const aclScalar *scalar) { return destroy(scalar); }
ACL_EXPORT aclError aclDestroyIntArray(const aclIntArray *array) { return destroy(array); }
ACL_EXPORT aclError aclDestroyFloatArray(const aclFloatArray *array) { return destroy(array); }
ACL_EXPORT aclError aclDestroyBoolArray(const aclBoolArray *array) { return destroy(array); }

ACL_EXPORT aclError aclDestroyTensorList(const aclTensorList *list) {
  if (list == nullptr) return ascsim::kSuccess;
  for (aclTensor *tensor : list->tensors) delete tensor;
  return destroy(list);
}

ACL_EXPORT aclError aclGetViewShape(const aclTensor *tensor, int64_t **shape, uint64_t *rank) {
  *rank = tensor->shape.size();
  *shape = new int64_t[*rank + 1];
  std::copy(tensor->shape.begin(), tensor->shape.end(), *shape);
  return ascsim::kSuccess;
}
