// Operators that move elements: copies, joins, parts, look-ups.
#include <algorithm>
#include <cmath>

#include "legacy.h"
#include "operator.h"

using namespace ascsim;

namespace {

int64_t positive(int64_t axis, int64_t rank) { return axis < 0 ? axis + rank : axis; }

// The part of `tensor` that begins at `begin` along `axis`.
Tensor part_of(Tensor tensor, int64_t axis, int64_t begin, int64_t length, int64_t step = 1) {
  tensor.offset += begin * tensor.strides[axis];
  tensor.strides[axis] *= step;
  tensor.shape[axis] = length;
  return tensor;
}

aclError split(Operator op, In input, const std::vector<int64_t> &sizes, int64_t axis, Tensors outputs) {
  Tensor from = op.in(input);
  axis = positive(axis, from.rank());
  std::vector<Tensor> to, parts;
  int64_t begin = 0;
  for (size_t i = 0; i < outputs->tensors.size(); ++i) {
    to.push_back(op.out(outputs->tensors[i]));
    parts.push_back(part_of(from, axis, begin, sizes[i]));
    begin += sizes[i];
  }
  return op.run([=] {
    for (size_t i = 0; i < to.size(); ++i) copy_elements(to[i], parts[i]);
  });
}

// One of the tensors that `tensor` is stacked of.
Tensor slot_of(const Tensor &tensor, int64_t axis, int64_t number) {
  Tensor part = part_of(tensor, axis, number, 1);
  part.shape.erase(part.shape.begin() + axis);
  part.strides.erase(part.strides.begin() + axis);
  return part;
}

// Zeros where `kept(column - row)` is false.
template <class Kept>
void keep_triangle(const Tensor &from, const Tensor &to, Kept kept) {
  Values v = read(from);
  int64_t columns = from.dim(-1), rows = from.dim(-2);
  for (size_t i = 0; i < v.size(); ++i) {
    int64_t column = static_cast<int64_t>(i) % columns, row = static_cast<int64_t>(i) / columns % rows;
    if (!kept(column - row)) v[i] = 0;
  }
  write(to, v);
}

aclError triangle(Operator op, In input, Out output, bool (*kept)(int64_t distance)) {
  Tensor from = op.in(input), to = op.out(output);
  return op.run([=] { keep_triangle(from, to, kept); });
}

void count_up(double first, double step, const Tensor &to) {
  Values v(to.size());
  for (size_t i = 0; i < v.size(); ++i) v[i] = first + static_cast<double>(i) * step;
  write(to, v);
}

// Rows of `from` along `axis`, as `chosen` says.
void pick_rows(const Tensor &from, int64_t axis, const Tensor &chosen, const Tensor &to) {
  axis = positive(axis, from.rank());
  std::vector<int64_t> numbers = read_integers(chosen);
  Values v = read(from), result;
  result.reserve(to.size());
  int64_t outer = 1, inner = 1, length = from.shape[axis];
  for (int64_t i = 0; i < axis; ++i) outer *= from.shape[i];
  for (int64_t i = axis + 1; i < from.rank(); ++i) inner *= from.shape[i];
  for (int64_t i = 0; i < outer; ++i) {
    for (int64_t number : numbers) {
      auto row = v.begin() + (i * length + positive(number, length)) * inner;
      result.insert(result.end(), row, row + inner);
    }
  }
  write(to, result);
}

aclError pick(Operator op, In input, int64_t axis, In index, Out output) {
  Tensor from = op.in(input), chosen = op.in(index), to = op.out(output);
  return op.run([=] { pick_rows(from, axis, chosen, to); });
}

// Rows of `from` added up where `chosen` says, but for those of `left_out` and of negative numbers.
void add_rows(const Tensor &from, const Tensor &chosen, const Tensor &to, int64_t left_out = -1) {
  Values v = read(from), result(to.size(), 0.0);
  std::vector<int64_t> numbers = read_integers(chosen);
  int64_t width = numbers.empty() ? 0 : static_cast<int64_t>(v.size() / numbers.size());
  for (size_t row = 0; row < numbers.size(); ++row) {
    if (numbers[row] < 0 || numbers[row] == left_out) continue;
    for (int64_t i = 0; i < width; ++i) result[numbers[row] * width + i] += v[row * width + i];
  }
  write(to, result);
}

void one_hot(const Tensor &chosen, double on, double off, const Tensor &to) {
  Values v(to.size(), off);
  int64_t width = to.dim(-1), row = 0;
  for (int64_t number : read_integers(chosen)) {
    if (number >= 0 && number < width) v[row * width + number] = on;
    ++row;
  }
  write(to, v);
}

// Calls `use(place in index, place in table)` for Gather and Scatter: the index replaces one coordinate.
template <class Use>
void each_indexed(const Tensor &index, const std::vector<int64_t> &numbers, const Tensor &table, int64_t axis,
                  Use use) {
  Shape strides = dense_strides(table.shape), own = dense_strides(index.shape);
  for (size_t i = 0; i < numbers.size(); ++i) {
    int64_t place = 0;
    for (int64_t j = 0; j < index.rank(); ++j) {
      int64_t coordinate = static_cast<int64_t>(i) / own[j] % index.shape[j];
      place += (j == axis ? positive(numbers[i], table.shape[axis]) : coordinate) * strides[j];
    }
    use(static_cast<int64_t>(i), place);
  }
}

}  // namespace

OPERATOR(InplaceCopy, Out to_tensor, In from_tensor) {
  Operator op = OP;
  Tensor to = op.out(to_tensor), from = op.in(from_tensor);
  return op.run([=] { copy_elements(to, from); });
}
OPERATOR(Permute, In input, Integers order, Out output) {
  Operator op = OP;
  Tensor from = op.in(input), to = op.out(output), moved = from;
  for (size_t i = 0; i < order->values.size(); ++i) {
    int64_t axis = positive(order->values[i], from.rank());
    moved.shape[i] = from.shape[axis];
    moved.strides[i] = from.strides[axis];
  }
  return op.run([=] { copy_elements(to, moved); });
}
OPERATOR(Cat, Tensors inputs, int64_t axis, Out output) {
  Operator op = OP;
  Tensor to = op.out(output);
  axis = positive(axis, to.rank());
  std::vector<Tensor> from, parts;
  int64_t begin = 0;
  for (const aclTensor *input : inputs->tensors) {
    if (input->size() == 0) continue;
    from.push_back(op.in(input));
    parts.push_back(part_of(to, axis, begin, input->shape[axis]));
    begin += input->shape[axis];
  }
  return op.run([=] {
    for (size_t i = 0; i < from.size(); ++i) copy_elements(parts[i], from[i]);
  });
}
OPERATOR(Stack, Tensors inputs, int64_t axis, Out output) {
  Operator op = OP;
  Tensor to = op.out(output);
  axis = positive(axis, to.rank());
  std::vector<Tensor> from, parts;
  for (const aclTensor *input : inputs->tensors) {
    parts.push_back(slot_of(to, axis, static_cast<int64_t>(from.size())));
    from.push_back(op.in(input));
  }
  return op.run([=] {
    for (size_t i = 0; i < from.size(); ++i) copy_elements(parts[i], from[i]);
  });
}
OPERATOR(SplitTensor, In input, uint64_t size, int64_t axis, Tensors outputs) {
  int64_t at = positive(axis, input->rank()), left = input->shape[at];
  std::vector<int64_t> sizes;
  for (; left > 0; left -= sizes.back()) sizes.push_back(std::min(left, static_cast<int64_t>(size)));
  return split(OP, input, sizes, axis, outputs);
}
OPERATOR(SplitWithSize, In input, Integers sizes, int64_t axis, Tensors outputs) {
  return split(OP, input, sizes->values, axis, outputs);
}
OPERATOR(Slice, In input, int64_t axis, int64_t begin, int64_t, int64_t step, Out output) {
  Operator op = OP;
  Tensor from = op.in(input), to = op.out(output);
  axis = positive(axis, from.rank());
  begin = std::min(positive(begin, from.shape[axis]), from.shape[axis]);
  Tensor part = part_of(from, axis, begin, to.shape[axis], step);  // where it ends, the output's length says
  return op.run([=] { copy_elements(to, part); });
}
OPERATOR(Repeat, In input, Integers, Out output) {
  Operator op = OP;
  Tensor from = op.in(input), to = op.out(output);
  return op.run([=] {
    Values v = read(from), result(to.size());
    Shape strides = dense_strides(from.shape), own = dense_strides(to.shape);
    int64_t missing = to.rank() - from.rank();
    for (size_t i = 0; i < result.size(); ++i) {
      int64_t place = 0;
      for (int64_t j = 0; j < from.rank(); ++j) {
        int64_t coordinate = static_cast<int64_t>(i) / own[j + missing] % to.shape[j + missing];
        place += coordinate % from.shape[j] * strides[j];
      }
      result[i] = v[place];
    }
    write(to, result);
  });
}
OPERATOR(Expand, In input, Integers, Out output) {
  Operator op = OP;
  Tensor from = op.in(input), to = op.out(output);
  return op.run([=] { copy_elements(to, from); });
}
OPERATOR(Tril, In input, int64_t diagonal, Out output) {
  if (diagonal != 0) return OP.refuse("a diagonal other than 0");
  return triangle(OP, input, output, [](int64_t distance) { return distance <= 0; });
}
OPERATOR(Triu, In input, int64_t diagonal, Out output) {
  if (diagonal == 1) return triangle(OP, input, output, [](int64_t distance) { return distance >= 1; });
  if (diagonal != 0) return OP.refuse("a diagonal other than 0 and 1");
  return triangle(OP, input, output, [](int64_t distance) { return distance >= 0; });
}
OPERATOR(Arange, Number begin, Number, Number step, Out output) {
  Operator op = OP;
  Tensor to = op.out(output);
  double first = value_of(begin), by = value_of(step, 1);
  return op.run([=] { count_up(first, by, to); });
}
OPERATOR(Embedding, In table, In index, Out output) { return pick(OP, table, 0, index, output); }
OPERATOR(IndexSelect, In input, int64_t axis, In index, Out output) { return pick(OP, input, axis, index, output); }
OPERATOR(GatherV2, In input, int64_t axis, In index, Out output) { return pick(OP, input, axis, index, output); }
OPERATOR(EmbeddingDenseBackward, In gradient, In index, uint64_t, int64_t padding, bool by_frequency, Out output) {
  Operator op = OP;
  if (by_frequency) return op.refuse("scaling by frequency");
  Tensor g = op.in(gradient), chosen = op.in(index), to = op.out(output);
  return op.run([=] { add_rows(g, chosen, to, padding); });
}
OPERATOR(Gather, In input, int64_t axis, In index, Out output) {
  Operator op = OP;
  Tensor from = op.in(input), chosen = op.in(index), to = op.out(output);
  return op.run([=] {
    Values v = read(from), result(to.size());
    each_indexed(chosen, read_integers(chosen), from, positive(axis, from.rank()),
                 [&](int64_t i, int64_t place) { result[i] = v[place]; });
    write(to, result);
  });
}
OPERATOR(ScatterAdd, In input, int64_t axis, In index, In updates, Out output) {
  Operator op = OP;
  Tensor from = op.in(input), chosen = op.in(index), added = op.in(updates), to = op.out(output);
  return op.run([=] {
    Values result = read(from), more = read(added, chosen.shape);
    each_indexed(chosen, read_integers(chosen), from, positive(axis, from.rank()),
                 [&](int64_t i, int64_t place) { result[place] += more[i]; });
    write(to, result);
  });
}
OPERATOR(OneHot, In index, int64_t, In on, In off, int64_t axis, Out output) {
  Operator op = OP;
  if (axis != -1 && axis != output->rank() - 1) return op.refuse("an axis other than the last");
  Tensor chosen = op.in(index), one = op.in(on), other = op.in(off), to = op.out(output);
  return op.run([=] { one_hot(chosen, read(one)[0], read(other)[0], to); });
}

namespace {

void same_elements(const LegacyCall &call) {
  Tensor to = call.outputs[0];
  to.shape = call.inputs[0].shape;
  to.strides = dense_strides(to.shape);
  copy_elements(to, call.inputs[0]);
}

void pack(const LegacyCall &call) {
  const Tensor &to = call.outputs[0];
  int64_t axis = positive(static_cast<int64_t>(call.number("axis", 0)), to.rank()), number = 0;
  for (const Tensor &input : call.inputs) {
    copy_elements(slot_of(to, axis, number++), input);
  }
}

void lower_triangle(const LegacyCall &call) {
  auto diagonal = static_cast<int64_t>(call.number("diagonal", 0));
  keep_triangle(call.inputs[0], call.outputs[0], [=](int64_t distance) { return distance <= diagonal; });
}

const LegacyOperators kOperators{{
  {"Cast", {same_elements, {}}},
  {"GatherV2", {[](const LegacyCall &call) {
     pick_rows(call.inputs[0], read_integers(call.inputs[2])[0], call.inputs[1], call.outputs[0]);
   }, {}}},
  {"Identity", {same_elements, {}}},
  {"OneHot", {[](const LegacyCall &call) {
     one_hot(call.inputs[0], read(call.inputs[2])[0], read(call.inputs[3])[0], call.outputs[0]);
   }, {}}},
  {"Pack", {pack, {}}},
  {"Range", {[](const LegacyCall &call) {
     count_up(read(call.inputs[0])[0], read(call.inputs[2])[0], call.outputs[0]);
   }, {}}},
  {"Reshape", {same_elements, {}}},
  {"TensorMove", {same_elements, {}}},
  {"Tril", {lower_triangle, {}}},
  {"UnsortedSegmentSum", {[](const LegacyCall &call) {
     add_rows(call.inputs[0], call.inputs[1], call.outputs[0]);
   }, {}}},
}};

}  // namespace
