// Attributes of one node, checked against the schema as they are read.
#pragma once

#include <string>

#include "op/ort_api.h"
#include "op/schema.h"

namespace hina {

class Attributes {
 public:
  Attributes(const OrtApi& api, const OrtKernelInfo* info) : api_(api), info_(info) {}

  // The value, or the default where the attribute is absent. Throws Error for a missing required attribute, another
  // type, a number outside [lowest, highest] or NaN, or a word the schema does not know.
  int64_t integer(const char* name, int64_t lowest, int64_t highest) const;
  bool flag(const char* name) const { return integer(name, 0, 1) != 0; }
  float number(const char* name, float lowest, float highest) const;
  std::string text(const char* name) const;
  // Position of the word among the schema's values of `name`.
  int word(const char* name) const;

 private:
  // Whether reading `name` went well; throws if the attribute has another type, or is absent and required.
  bool present(const char* name, OrtStatus* status) const;

  const OrtApi& api_;
  const OrtKernelInfo* info_;
};

}  // namespace hina
