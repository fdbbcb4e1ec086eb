// Lists of words separated by spaces, as attributes and the schema hold them.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

namespace hina {

inline std::vector<std::string> split_words(std::string_view text) {
  std::vector<std::string> words;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    if (end > at) words.emplace_back(text.substr(at, end - at));
    at = end + 1;
  }
  return words;
}

}  // namespace hina
