// Operators that draw numbers: the same seed and offset give the same numbers.
#include <atomic>
#include <cmath>

#include "legacy.h"
#include "operator.h"

using namespace ascsim;

namespace {

void draw_uniform(const Tensor &to, double low, double high, uint64_t seed, uint64_t offset) {
  Values v(to.size());
  for (size_t i = 0; i < v.size(); ++i) v[i] = low + (high - low) * uniform(seed, offset, i);
  write(to, v);
}

void draw_normal(const Tensor &to, double mean, double deviation, uint64_t seed, uint64_t offset) {
  Values v(to.size());
  for (size_t i = 0; i < v.size(); ++i) {  // Box-Muller
    double radius = std::sqrt(-2 * std::log(1 - uniform(seed, offset, 2 * i)));
    v[i] = mean + deviation * radius * std::cos(2 * M_PI * uniform(seed, offset, 2 * i + 1));
  }
  write(to, v);
}

// One bit for each element, set where it is kept.
void draw_bits(const Tensor &to, double drop, uint64_t seed, uint64_t offset) {
  auto *bytes = reinterpret_cast<uint8_t *>(to.begin());
  for (int64_t i = 0; i < to.size(); ++i) {
    uint8_t bits = 0;
    for (int64_t bit = 0; bit < 8; ++bit) {
      if (uniform(seed, offset, i * 8 + bit) >= drop) bits |= static_cast<uint8_t>(1 << bit);
    }
    bytes[i] = bits;
  }
}

void keep_by_bits(const Tensor &from, const Tensor &mask, double drop, const Tensor &to) {
  Values v = read(from);
  auto *bytes = reinterpret_cast<const uint8_t *>(mask.begin());
  for (size_t i = 0; i < v.size(); ++i) v[i] = (bytes[i / 8] >> (i % 8)) & 1 ? v[i] / (1 - drop) : 0;
  write(to, v);
}

aclError draw_mask(Operator op, double drop, uint64_t seed, uint64_t offset, Out output) {
  Tensor to = op.out(output);
  return op.run([=] { draw_bits(to, drop, seed, offset); });
}

}  // namespace

OPERATOR(InplaceUniform, Out output, double low, double high, uint64_t seed, uint64_t offset) {
  Operator op = OP;
  Tensor to = op.out(output);
  return op.run([=] { draw_uniform(to, low, high, seed, offset); });
}
OPERATOR(InplaceNormal, Out output, float mean, float deviation, int64_t seed, int64_t offset) {
  Operator op = OP;
  Tensor to = op.out(output);
  return op.run([=] { draw_normal(to, mean, deviation, seed, offset); });
}
OPERATOR(DropoutGenMask, Integers, double drop, int64_t seed, int64_t offset, Out output) {
  return draw_mask(OP, drop, seed, offset, output);
}
OPERATOR(DropoutGenMaskV2, Integers, double drop, int64_t seed, int64_t offset, int, Out output) {
  return draw_mask(OP, drop, seed, offset, output);
}
OPERATOR(DropoutDoMask, In input, In mask, double drop, Out output) {
  Operator op = OP;
  Tensor from = op.in(input), kept = op.in(mask), to = op.out(output);
  return op.run([=] { keep_by_bits(from, kept, drop, to); });
}

namespace {

// The older operators keep no state on the device: each call draws anew.
uint64_t next_draw() {
  static std::atomic<uint64_t> draws{0};
  return draws++;
}

uint64_t seed_of(const LegacyCall &call) {
  return static_cast<uint64_t>(call.number("seed", 0) * 1000003 + call.number("seed2", 0));
}

const LegacyOperators kOperators{{
  {"DropOutDoMask", {[](const LegacyCall &call) {
     keep_by_bits(call.inputs[0], call.inputs[1], 1 - read(call.inputs[2])[0], call.outputs[0]);
   }, {}}},
  {"DropOutGenMask", {[](const LegacyCall &call) {
     draw_bits(call.outputs[0], 1 - read(call.inputs[1])[0], seed_of(call), next_draw());
   }, {}}},
  {"RandomStandardNormal", {[](const LegacyCall &call) {
     draw_normal(call.outputs[0], 0, 1, seed_of(call), next_draw());
   }, {}}},
  {"RandomUniform", {[](const LegacyCall &call) {
     draw_uniform(call.outputs[0], 0, 1, seed_of(call), next_draw());
   }, {}}},
}};

}  // namespace
