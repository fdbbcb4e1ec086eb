// Small text files of the kernel and of the user.
#pragma once

#include <cstdio>
#include <string>

namespace hina {

// The first `most` bytes of a file; empty when there is none. No stream: those of the static libstdc++ ask for a newer
// glibc.
inline std::string read_file(const std::string& path, size_t most = 1 << 16) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return {};
  std::string text(most, '\0');
  text.resize(std::fread(text.data(), 1, most, file));
  std::fclose(file);
  return text;
}

}  // namespace hina
