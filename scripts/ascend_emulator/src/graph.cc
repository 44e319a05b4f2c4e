#include "graph.h"

#include <cstring>

namespace ge {
namespace {

std::string text_of(const char *text) { return text != nullptr ? text : ""; }

std::shared_ptr<OperatorData> operator_data(std::string name, std::string type) {
  return std::make_shared<OperatorData>(OperatorData{std::move(name), std::move(type), {}});
}

}  // namespace

StatusFactory *StatusFactory::Instance() {
  static auto *one = new StatusFactory();
  return one;
}

AscendString::AscendString(const char *text) {
  if (text != nullptr) text_ = std::make_shared<std::string>(text);
}
const char *AscendString::GetString() const { return text_ ? text_->c_str() : ""; }
bool AscendString::operator<(const AscendString &other) const { return strcmp(GetString(), other.GetString()) < 0; }

Shape::Shape() : Shape(std::vector<int64_t>{}) {}
Shape::Shape(const std::vector<int64_t> &lengths) : lengths_(std::make_shared<std::vector<int64_t>>(lengths)) {}
size_t Shape::GetDimNum() const { return lengths_->size(); }
graphStatus Shape::SetDim(size_t axis, int64_t length) {
  if (axis >= lengths_->size()) return kGraphFailed;
  (*lengths_)[axis] = length;
  return kGraphSuccess;
}
int64_t Shape::GetDim(size_t axis) const { return axis < lengths_->size() ? (*lengths_)[axis] : 0; }
std::vector<int64_t> Shape::GetDims() const { return *lengths_; }
int64_t Shape::GetShapeSize() const {
  int64_t result = 1;
  for (int64_t length : *lengths_) result *= length;
  return result;
}

TensorDesc::TensorDesc() : data_(std::make_shared<DescriptionData>()) {}
TensorDesc::TensorDesc(Shape shape, Format format, DataType type) : TensorDesc() {
  data_->shape = data_->origin_shape = shape;
  data_->format = data_->origin_format = format;
  data_->type = type;
}
TensorDesc::TensorDesc(const TensorDesc &other) : data_(std::make_shared<DescriptionData>(*other.data_)) {}
TensorDesc::TensorDesc(TensorDesc &&other) : data_(other.data_) {}
TensorDesc &TensorDesc::operator=(const TensorDesc &other) {
  data_ = std::make_shared<DescriptionData>(*other.data_);
  return *this;
}
TensorDesc &TensorDesc::operator=(TensorDesc &&other) {
  data_ = other.data_;
  return *this;
}
void TensorDesc::SetDataType(DataType type) { data_->type = type; }
void TensorDesc::SetPlacement(Placement) {}
void TensorDesc::SetRealDimCnt(int64_t count) { data_->real_count = count; }
void TensorDesc::SetShape(const Shape &shape) { data_->shape = shape; }
void TensorDesc::SetOriginShape(const Shape &shape) { data_->origin_shape = shape; }
void TensorDesc::SetOriginFormat(Format format) { data_->origin_format = format; }
void TensorDesc::SetFormat(Format format) { data_->format = format; }
graphStatus TensorDesc::SetShapeRange(const std::vector<std::pair<int64_t, int64_t>> &range) {
  data_->range = range;
  return kGraphSuccess;
}
graphStatus TensorDesc::GetShapeRange(std::vector<std::pair<int64_t, int64_t>> &range) const {
  range = data_->range;
  return kGraphSuccess;
}
DataType TensorDesc::GetDataType() const { return data_->type; }
int64_t TensorDesc::GetRealDimCnt() const { return data_->real_count; }
Shape TensorDesc::GetShape() const { return data_->shape; }
Shape TensorDesc::GetOriginShape() const { return data_->origin_shape; }
Format TensorDesc::GetFormat() const { return data_->format; }
Format TensorDesc::GetOriginFormat() const { return data_->origin_format; }

Tensor::Tensor() : data_(std::make_shared<TensorData>()) {}
Tensor::Tensor(const TensorDesc &description) : Tensor() { data_->description = description; }
Tensor::Tensor(const TensorDesc &description, const uint8_t *bytes, size_t size) : Tensor(description) {
  SetData(bytes, size);
}
TensorDesc Tensor::GetTensorDesc() const { return data_->description; }
const uint8_t *Tensor::GetData() const { return data_->bytes.data(); }
uint8_t *Tensor::GetData() { return data_->bytes.data(); }
size_t Tensor::GetSize() const { return data_->bytes.size(); }
graphStatus Tensor::SetData(const uint8_t *bytes, size_t size) {
  data_->bytes.assign(bytes, bytes + size);
  return kGraphSuccess;
}
graphStatus Tensor::SetData(uint8_t *bytes, size_t size, const std::function<void(uint8_t *)> &release) {
  data_->bytes.assign(bytes, bytes + size);
  if (release) release(bytes);
  return kGraphSuccess;
}
graphStatus Tensor::SetData(const std::string &text) {
  data_->bytes.assign(text.begin(), text.end());
  return kGraphSuccess;
}
graphStatus Tensor::SetData(const std::vector<std::string> &) { return kGraphFailed; }

Operator::Operator() = default;
Operator::Operator(const std::string &type) : data_(operator_data("", type)) {}
Operator::Operator(const char *type) : data_(operator_data("", text_of(type))) {}
Operator::Operator(const std::string &name, const std::string &type) : data_(operator_data(name, type)) {}
Operator::Operator(const AscendString &name, const AscendString &type)
    : data_(operator_data(name.GetString(), type.GetString())) {}
Operator::Operator(const char *name, const char *type) : data_(operator_data(text_of(name), text_of(type))) {}
std::string Operator::GetName() const { return data_ ? data_->name : std::string(); }
std::string Operator::GetOpType() const { return data_ ? data_->type : std::string(); }
graphStatus Operator::GetName(AscendString &name) const {
  name = AscendString(GetName().c_str());
  return kGraphSuccess;
}
graphStatus Operator::GetOpType(AscendString &type) const {
  type = AscendString(GetOpType().c_str());
  return kGraphSuccess;
}
TensorDesc Operator::GetInputDesc(const std::string &) const { return {}; }
TensorDesc Operator::GetInputDesc(uint32_t) const { return {}; }
TensorDesc Operator::GetOutputDesc(const std::string &) const { return {}; }
TensorDesc Operator::GetOutputDesc(uint32_t) const { return {}; }
TensorDesc Operator::GetInputDescByName(const char *) const { return {}; }
TensorDesc Operator::GetOutputDescByName(const char *) const { return {}; }
TensorDesc Operator::GetDynamicInputDesc(const char *, uint32_t) const { return {}; }
std::shared_ptr<InferenceContext> Operator::GetInferenceContext() const { return nullptr; }
Operator &Operator::SetInput(const char *, const Operator &) { return *this; }
Operator &Operator::SetInput(const char *, uint32_t, const Operator &) { return *this; }
Operator &Operator::SetInput(const char *, uint32_t, const Operator &, const char *) { return *this; }
Operator &Operator::SetInput(const std::string &, const Operator &) { return *this; }
Operator &Operator::SetInput(const std::string &, const Operator &, const std::string &) { return *this; }
Operator &Operator::AddControlInput(const Operator &) { return *this; }

template <class Value>
Operator &Operator::put(const std::string &key, const Value &value) {
  if (!data_) data_ = std::make_shared<OperatorData>();
  data_->attributes[key] = value;
  return *this;
}

// An attribute may be put as one kind of integer and asked for as another.
template <class Value>
graphStatus Operator::get(const std::string &key, Value &value) const {
  if (!data_) return kGraphFailed;
  auto found = data_->attributes.find(key);
  if (found == data_->attributes.end()) return kGraphFailed;
  if (auto *same = std::any_cast<Value>(&found->second)) {
    value = *same;
    return kGraphSuccess;
  }
  if constexpr (std::is_same_v<Value, int64_t> || std::is_same_v<Value, int>) {
    if (auto *wide = std::any_cast<int64_t>(&found->second)) {
      value = static_cast<Value>(*wide);
      return kGraphSuccess;
    }
    if (auto *narrow = std::any_cast<int>(&found->second)) {
      value = *narrow;
      return kGraphSuccess;
    }
    if (auto *natural = std::any_cast<uint32_t>(&found->second)) {
      value = static_cast<Value>(*natural);
      return kGraphSuccess;
    }
  }
  return kGraphFailed;
}

Operator &Operator::SetAttr(const char *key, const char *value) { return put(text_of(key), text_of(value)); }
#define GE_DEFINE(Key, Value)                                                                             \
  Operator &Operator::SetAttr(Key key, Value value) { return put(std::string(key), std::decay_t<Value>(value)); } \
  graphStatus Operator::GetAttr(Key key, std::decay_t<Value> &value) const { return get(std::string(key), value); }
GE_ATTRIBUTES(GE_DEFINE)

Operator OperatorFactory::CreateOperator(const char *name, const char *type) { return Operator(name, type); }
Operator OperatorFactory::CreateOperator(const std::string &name, const std::string &type) {
  return Operator(name, type);
}
bool OperatorFactory::IsExistOp(const char *) { return true; }
bool OperatorFactory::IsExistOp(const std::string &) { return true; }

}  // namespace ge
