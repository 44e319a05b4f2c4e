// Operators of AscendCL's older interface (aclop): found by name, with tensors described apart from their memory.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "tensor.h"

namespace ascsim {

using Attribute = std::variant<int64_t, double, std::string, std::vector<int64_t>, std::vector<float>>;

struct LegacyCall {
  std::vector<Tensor> inputs, outputs;
  std::map<std::string, Attribute> attributes;
  std::vector<std::shared_ptr<std::vector<char>>> kept;  // what the inputs' constants were at the call

  double number(const std::string &name, double standard) const;
  std::string text(const std::string &name, const std::string &standard) const;
  std::vector<int64_t> integers(const std::string &name) const;
};

using LegacyBody = std::function<void(const LegacyCall &)>;

struct LegacyOperator {
  LegacyBody body;             // writes the outputs
  std::vector<size_t> updated; // inputs that the body writes, too
};

// Null if there is none of this name.
const LegacyOperator *legacy_operator(const std::string &name);

// Each family of operators adds its own when the library is loaded.
struct LegacyOperators {
  explicit LegacyOperators(const std::map<std::string, LegacyOperator> &operators);
};

}  // namespace ascsim
