// Just enough JSON to answer HinaQuery: values of one object or array, written in order.
#pragma once

#include <cmath>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

namespace hina {

inline std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      out += escaped;
    } else {
      out += c;
    }
  }
  out += '"';
  return out;
}

// JSON has no infinities; they become the strings "inf" and "-inf".
inline std::string json_number(double value) {
  if (std::isinf(value)) return value > 0 ? "\"inf\"" : "\"-inf\"";
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

template <typename Number>
std::string json_numbers(const std::vector<Number>& numbers) {
  std::string out = "[";
  for (const Number number : numbers) {
    if (out.size() > 1) out += ',';
    out += std::to_string(number);
  }
  return out + ']';
}

inline std::string json_strings(const std::vector<std::string>& strings) {
  std::string out = "[";
  for (const std::string& text : strings) {
    if (out.size() > 1) out += ',';
    out += json_string(text);
  }
  return out + ']';
}

}  // namespace hina
