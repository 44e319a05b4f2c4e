#include "legacy.h"

#include <cstdio>
#include <cstring>
#include <memory>

#include "memory.h"
#include "operator.h"
#include "settings.h"

namespace {

struct Description {
  int type;
  ascsim::Shape shape;
};

struct Buffer {
  void *data;
  size_t bytes;
};

struct Attributes {
  std::map<std::string, ascsim::Attribute> values;
};

ascsim::Tensor tensor_of(const Description *description, const Buffer *buffer) {
  ascsim::Shape shape = description->shape;
  if (shape.size() == 1 && shape[0] == -2) shape.clear();  // AscendCL's "rank unknown"
  return {shape, ascsim::dense_strides(shape), 0, description->type, static_cast<char *>(buffer->data)};
}

// Shapes and attributes of a call, for the message about an operator that isn't there.
std::string describe(const ascsim::LegacyCall &call) {
  std::string out;
  for (const ascsim::Tensor &tensor : call.inputs) {
    out += out.empty() ? "of [" : ", [";
    for (int64_t length : tensor.shape) out += (out.back() == '[' ? "" : ", ") + std::to_string(length);
    out += "]";
  }
  for (auto &one : call.attributes) {
    out += ", " + one.first + "=";
    if (auto *integer = std::get_if<int64_t>(&one.second)) out += std::to_string(*integer);
    if (auto *real = std::get_if<double>(&one.second)) {
      char number[32];
      snprintf(number, sizeof number, "%g", *real);
      out += number;
    }
    if (auto *text = std::get_if<std::string>(&one.second)) out += *text;
    if (auto *list = std::get_if<std::vector<int64_t>>(&one.second)) {
      for (int64_t value : *list) out += std::to_string(value) + " ";
    }
  }
  return out;
}

template <class Value>
aclError set(Attributes *attributes, const char *name, Value value) {
  attributes->values[name] = std::move(value);
  return ascsim::kSuccess;
}

}  // namespace

namespace ascsim {

static std::map<std::string, LegacyOperator> &table() {
  static auto *all = new std::map<std::string, LegacyOperator>();
  return *all;
}

LegacyOperators::LegacyOperators(const std::map<std::string, LegacyOperator> &operators) {
  table().insert(operators.begin(), operators.end());
}

const LegacyOperator *legacy_operator(const std::string &name) {
  auto found = table().find(name);
  return found != table().end() ? &found->second : nullptr;
}

double LegacyCall::number(const std::string &name, double standard) const {
  auto found = attributes.find(name);
  if (found == attributes.end()) return standard;
  if (auto *integer = std::get_if<int64_t>(&found->second)) return static_cast<double>(*integer);
  if (auto *real = std::get_if<double>(&found->second)) return *real;
  return standard;
}

std::string LegacyCall::text(const std::string &name, const std::string &standard) const {
  auto found = attributes.find(name);
  if (found == attributes.end()) return standard;
  auto *value = std::get_if<std::string>(&found->second);
  return value != nullptr ? *value : standard;
}

std::vector<int64_t> LegacyCall::integers(const std::string &name) const {
  auto found = attributes.find(name);
  if (found == attributes.end()) return {};
  auto *value = std::get_if<std::vector<int64_t>>(&found->second);
  return value != nullptr ? *value : std::vector<int64_t>{};
}

ACL_EXPORT aclError aclopCompileAndExecuteV2(const char *name, int input_count, Description **input_descriptions,
                                             Buffer **inputs, int output_count, Description **output_descriptions,
                                             Buffer **outputs, Attributes *attributes, int, int, const char *,
                                             void *stream) {
  if (settings().dry_run) return kSuccess;
  const LegacyOperator *found = legacy_operator(name);
  LegacyCall call;
  std::vector<Range> reads, writes;
  auto add = [](std::vector<Range> *to, const Tensor &tensor) {
    if (tensor.data == nullptr) return;  // an optional tensor that isn't given
    for (Range range : ranges_of(tensor)) to->push_back(range);
  };
  for (int i = 0; i < input_count; ++i) {
    call.inputs.push_back(tensor_of(input_descriptions[i], inputs[i]));
    Tensor &input = call.inputs.back();
    add(&reads, input);
    // Constants (axes, sizes) lie in the host's own memory, which the caller takes back after the call.
    if (input.data != nullptr && space_of(input.data) == Space::kPageable) {
      auto copy = std::make_shared<std::vector<char>>(input.data, input.data + input.bytes());
      input.data = copy->data();
      call.kept.push_back(std::move(copy));
    }
  }
  for (int i = 0; i < output_count; ++i) {
    call.outputs.push_back(tensor_of(output_descriptions[i], outputs[i]));
    add(&writes, call.outputs.back());
  }
  if (attributes != nullptr) call.attributes = attributes->values;
  if (found == nullptr) {
    return fail(kMissingOperator,
                "the operator %s (aclop) is not emulated, here %s; add it in scripts/ascend_emulator/src, or use "
                "another",
                name, describe(call).c_str());
  }
  for (size_t input : found->updated) add(&writes, call.inputs.at(input));
  launch(stream, name, reads, writes, [found, call = std::move(call)] { found->body(call); });
  return kSuccess;
}

ACL_EXPORT aclError aclopCompileAndExecute(const char *name, int input_count, Description **input_descriptions,
                                           Buffer **inputs, int output_count, Description **output_descriptions,
                                           Buffer **outputs, Attributes *attributes, int engine, int flag,
                                           const char *path, void *stream) {
  return aclopCompileAndExecuteV2(name, input_count, input_descriptions, inputs, output_count, output_descriptions,
                                  outputs, attributes, engine, flag, path, stream);
}

ACL_EXPORT Attributes *aclopCreateAttr() { return new Attributes(); }
ACL_EXPORT void aclopDestroyAttr(const Attributes *attributes) { delete attributes; }
ACL_EXPORT aclError aclopSetAttrBool(Attributes *to, const char *name, uint8_t value) {
  return set(to, name, static_cast<int64_t>(value));
}
ACL_EXPORT aclError aclopSetAttrInt(Attributes *to, const char *name, int64_t value) { return set(to, name, value); }
ACL_EXPORT aclError aclopSetAttrFloat(Attributes *to, const char *name, float value) {
  return set(to, name, static_cast<double>(value));
}
ACL_EXPORT aclError aclopSetAttrDataType(Attributes *to, const char *name, int value) {
  return set(to, name, static_cast<int64_t>(value));
}
ACL_EXPORT aclError aclopSetAttrString(Attributes *to, const char *name, const char *value) {
  return set(to, name, std::string(value));
}
ACL_EXPORT aclError aclopSetAttrListInt(Attributes *to, const char *name, int size, const int64_t *values) {
  return set(to, name, std::vector<int64_t>(values, values + size));
}
ACL_EXPORT aclError aclopSetAttrListFloat(Attributes *to, const char *name, int size, const float *values) {
  return set(to, name, std::vector<float>(values, values + size));
}
ACL_EXPORT aclError aclopSetAttrListBool(Attributes *to, const char *name, int size, const uint8_t *values) {
  return set(to, name, std::vector<int64_t>(values, values + size));
}

ACL_EXPORT Description *aclCreateTensorDesc(int type, int rank, const int64_t *shape, int) {
  return new Description{type, {shape, shape + rank}};
}
ACL_EXPORT void aclDestroyTensorDesc(const Description *description) { delete description; }
ACL_EXPORT size_t aclGetTensorDescNumDims(const Description *description) { return description->shape.size(); }
ACL_EXPORT aclError aclGetTensorDescDimV2(const Description *description, size_t axis, int64_t *length) {
  *length = description->shape.at(axis);
  return kSuccess;
}

ACL_EXPORT Buffer *aclCreateDataBuffer(void *data, size_t bytes) { return new Buffer{data, bytes}; }
ACL_EXPORT aclError aclDestroyDataBuffer(const Buffer *buffer) {
  delete buffer;
  return kSuccess;
}
ACL_EXPORT aclError aclUpdateDataBuffer(Buffer *buffer, void *data, size_t bytes) {
  *buffer = {data, bytes};
  return kSuccess;
}
ACL_EXPORT void *aclGetDataBufferAddr(const Buffer *buffer) { return buffer->data; }
ACL_EXPORT size_t aclDataTypeSize(int type) { return size_of(type); }

// MindSpore makes this for its own allocator of workspaces; the handle is only handed back.
ACL_EXPORT void *aclrtAllocatorCreateDesc() { return new char; }
ACL_EXPORT aclError aclrtAllocatorDestroyDesc(void *handle) {
  delete static_cast<char *>(handle);
  return kSuccess;
}

}  // namespace ascsim
