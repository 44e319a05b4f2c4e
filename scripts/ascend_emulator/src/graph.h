// Stand-ins for CANN's graph classes (namespace ge, old C++ ABI). MindSpore builds such objects while it prepares an
// operator of the older interface; all they must do is to be made, copied and destroyed, and to give back what was put
// in.
#pragma once
#include <any>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#define GE_CLASS __attribute__((visibility("default")))

namespace ge {

enum DataType : int { DT_FLOAT = 0, DT_UNDEFINED = 28 };
enum Format : int { FORMAT_ND = 2 };
enum Placement : int { kPlacementHost = 0 };
using graphStatus = uint32_t;
constexpr graphStatus kGraphSuccess = 0, kGraphFailed = 1;

// Only its address is asked for; other libraries look into the fields.
class GE_CLASS StatusFactory {
 public:
  static StatusFactory *Instance();

 protected:
  StatusFactory() {}
  ~StatusFactory() {}
  std::map<uint32_t, std::string> descriptions_;
  char reserved_[256];
};

class GE_CLASS AscendString {
 public:
  AscendString() = default;
  AscendString(const char *text);
  const char *GetString() const;
  bool operator<(const AscendString &other) const;

 private:
  std::shared_ptr<std::string> text_;
};

class GE_CLASS Shape {
 public:
  Shape();
  explicit Shape(const std::vector<int64_t> &lengths);
  size_t GetDimNum() const;
  graphStatus SetDim(size_t axis, int64_t length);
  int64_t GetDim(size_t axis) const;
  std::vector<int64_t> GetDims() const;
  int64_t GetShapeSize() const;

 private:
  std::shared_ptr<std::vector<int64_t>> lengths_;
};

struct DescriptionData {
  Shape shape, origin_shape;
  Format format = FORMAT_ND, origin_format = FORMAT_ND;
  DataType type = DT_FLOAT;
  int64_t real_count = 0;
  std::vector<std::pair<int64_t, int64_t>> range;
};

class GE_CLASS TensorDesc {
 public:
  TensorDesc();
  TensorDesc(Shape shape, Format format, DataType type);
  TensorDesc(const TensorDesc &other);
  TensorDesc(TensorDesc &&other);
  TensorDesc &operator=(const TensorDesc &other);
  TensorDesc &operator=(TensorDesc &&other);
  ~TensorDesc() = default;
  void SetDataType(DataType type);
  void SetPlacement(Placement placement);
  void SetRealDimCnt(int64_t count);
  void SetShape(const Shape &shape);
  void SetOriginShape(const Shape &shape);
  void SetOriginFormat(Format format);
  void SetFormat(Format format);
  graphStatus SetShapeRange(const std::vector<std::pair<int64_t, int64_t>> &range);
  graphStatus GetShapeRange(std::vector<std::pair<int64_t, int64_t>> &range) const;
  DataType GetDataType() const;
  int64_t GetRealDimCnt() const;
  Shape GetShape() const;
  Shape GetOriginShape() const;
  Format GetFormat() const;
  Format GetOriginFormat() const;

 private:
  std::shared_ptr<DescriptionData> data_;
};

struct TensorData {
  TensorDesc description;
  std::vector<uint8_t> bytes;
};

class GE_CLASS Tensor {
 public:
  Tensor();
  explicit Tensor(const TensorDesc &description);
  Tensor(const TensorDesc &description, const uint8_t *bytes, size_t size);
  ~Tensor() = default;
  TensorDesc GetTensorDesc() const;
  const uint8_t *GetData() const;
  uint8_t *GetData();
  size_t GetSize() const;
  graphStatus SetData(const uint8_t *bytes, size_t size);
  graphStatus SetData(uint8_t *bytes, size_t size, const std::function<void(uint8_t *)> &release);
  graphStatus SetData(const std::string &text);
  graphStatus SetData(const std::vector<std::string> &texts);

 private:
  std::shared_ptr<TensorData> data_;
};

struct OperatorData {
  std::string name, type;
  std::map<std::string, std::any> attributes;
};

class InferenceContext;

// The key and value types for which SetAttr and GetAttr exist.
#define GE_ATTRIBUTES(USE)                                                                                            \
  USE(const char *, const Tensor &)                                                                                   \
  USE(const char *, const DataType &)                                                                                 \
  USE(const char *, const std::vector<DataType> &)                                                                    \
  USE(const char *, const std::vector<std::vector<int64_t>> &)                                                        \
  USE(const char *, const std::vector<float> &)                                                                       \
  USE(const char *, const std::vector<int> &)                                                                         \
  USE(const char *, const std::vector<int64_t> &)                                                                     \
  USE(const char *, bool)                                                                                             \
  USE(const char *, float)                                                                                            \
  USE(const char *, int)                                                                                              \
  USE(const char *, uint32_t)                                                                                         \
  USE(const char *, int64_t)                                                                                          \
  USE(const std::string &, const std::vector<std::string> &)                                                          \
  USE(const std::string &, const std::vector<bool> &)                                                                 \
  USE(const std::string &, const std::vector<float> &)                                                                \
  USE(const std::string &, const std::vector<int> &)                                                                  \
  USE(const std::string &, const std::vector<int64_t> &)                                                              \
  USE(const std::string &, const std::string &)                                                                       \
  USE(const std::string &, bool)                                                                                      \
  USE(const std::string &, float)                                                                                     \
  USE(const std::string &, int)                                                                                       \
  USE(const std::string &, int64_t)

class GE_CLASS Operator {
 public:
  Operator();
  explicit Operator(const std::string &type);
  explicit Operator(const char *type);
  Operator(const std::string &name, const std::string &type);
  Operator(const AscendString &name, const AscendString &type);
  Operator(const char *name, const char *type);
  virtual ~Operator() = default;
  std::string GetName() const;
  std::string GetOpType() const;
  graphStatus GetName(AscendString &name) const;
  graphStatus GetOpType(AscendString &type) const;

  // Nothing is ever connected: there are no graphs here.
  TensorDesc GetInputDesc(const std::string &) const;
  TensorDesc GetInputDesc(uint32_t) const;
  TensorDesc GetOutputDesc(const std::string &) const;
  TensorDesc GetOutputDesc(uint32_t) const;
  TensorDesc GetInputDescByName(const char *) const;
  TensorDesc GetOutputDescByName(const char *) const;
  TensorDesc GetDynamicInputDesc(const char *, uint32_t) const;
  std::shared_ptr<InferenceContext> GetInferenceContext() const;
  Operator &SetInput(const char *, const Operator &);
  Operator &SetInput(const char *, uint32_t, const Operator &);
  Operator &SetInput(const char *, uint32_t, const Operator &, const char *);
  Operator &SetInput(const std::string &, const Operator &);
  Operator &SetInput(const std::string &, const Operator &, const std::string &);
  Operator &AddControlInput(const Operator &);

  Operator &SetAttr(const char *key, const char *value);
#define GE_DECLARE(Key, Value)        \
  Operator &SetAttr(Key key, Value value); \
  graphStatus GetAttr(Key key, std::decay_t<Value> &value) const;
  GE_ATTRIBUTES(GE_DECLARE)
#undef GE_DECLARE

 private:
  template <class Value>
  Operator &put(const std::string &key, const Value &value);
  template <class Value>
  graphStatus get(const std::string &key, Value &value) const;
  std::shared_ptr<OperatorData> data_;
};

class GE_CLASS OperatorFactory {
 public:
  static Operator CreateOperator(const char *name, const char *type);
  static Operator CreateOperator(const std::string &name, const std::string &type);
  static bool IsExistOp(const char *type);
  static bool IsExistOp(const std::string &type);
};

}  // namespace ge
