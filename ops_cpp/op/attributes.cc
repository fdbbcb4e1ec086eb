#include "op/attributes.h"

#include <cstdio>

#include "op/words.h"

namespace hina {
namespace {

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

}  // namespace

// ONNX Runtime has one code for an absent attribute and for one of another type (a list, say); only its words differ.
// Should they change one day, an attribute of another type is taken as absent.
bool Attributes::present(const char* name, OrtStatus* status) const {
  if (status == nullptr) return true;
  const std::string why = api_.GetErrorMessage(status);
  api_.ReleaseStatus(status);
  const AttributeSchema& schema = attribute_schema(name);
  constexpr const char* kTypes[] = {"an int", "a float", "a string"};
  if (why.find("type don't match") != std::string::npos)
    throw Error(std::string("attribute ") + name + " has another type, expected " +
                kTypes[static_cast<int>(schema.type)]);
  if (schema.required) throw Error(std::string("attribute ") + name + " is missing");
  return false;
}

int64_t Attributes::integer(const char* name, int64_t lowest, int64_t highest) const {
  int64_t value = static_cast<int64_t>(attribute_schema(name).number);
  present(name, api_.KernelInfoGetAttribute_int64(info_, name, &value));
  if (value < lowest || value > highest)
    throw Error(std::string("attribute ") + name + " is " + std::to_string(value) + ", expected " +
                (lowest == highest ? std::to_string(lowest) : std::to_string(lowest) + ".." + std::to_string(highest)));
  return value;
}

float Attributes::number(const char* name, float lowest, float highest) const {
  float value = static_cast<float>(attribute_schema(name).number);
  present(name, api_.KernelInfoGetAttribute_float(info_, name, &value));
  if (!(value >= lowest && value <= highest))
    throw Error(std::string("attribute ") + name + " is " + number_text(value) + ", expected a number in [" +
                number_text(lowest) + ", " + number_text(highest) + "]");
  return value;
}

std::string Attributes::text(const char* name) const {
  size_t size = 0;
  if (!present(name, api_.KernelInfoGetAttribute_string(info_, name, nullptr, &size)))
    return attribute_schema(name).text;
  std::string value(size, '\0');
  check(api_, api_.KernelInfoGetAttribute_string(info_, name, value.data(), &size));
  value.resize(size > 0 ? size - 1 : 0);  // the size counts the terminating zero
  return value;
}

int Attributes::word(const char* name) const {
  const std::string value = text(name);
  const std::vector<std::string> words = split_words(attribute_schema(name).values);
  const auto at = std::find(words.begin(), words.end(), value);
  if (at == words.end())
    throw Error(std::string("attribute ") + name + " is '" + value +
                "', expected one of: " + attribute_schema(name).values);
  return static_cast<int>(at - words.begin());
}

}  // namespace hina
