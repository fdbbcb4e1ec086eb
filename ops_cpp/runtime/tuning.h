// From how many tokens of an expert on AMX is used: what the kernels' tables say, unless the user's machine was
// measured
// (`hina-ort bench tune`) or HINA_AMX_FROM gives a number.
#pragma once

#include <string>

namespace hina {

// The file that `hina-ort bench tune` writes: HINA_TUNING, else hina-ort/tuning in the user's cache folder
// (XDG_CACHE_HOME, else ~/.cache); empty when there is none of these. Lines of a key and a number, after a first line
// `cpu` with the name of the CPU: a file of another CPU counts for nothing, and so do lines that are not understood.
std::string tuning_path();

class Tuning {
 public:
  // Reads environment and file; `cpu` is this machine's.
  explicit Tuning(const std::string& cpu);

  // Not empty when HINA_AMX_FROM is no number of tokens.
  const std::string& error() const { return error_; }

  // Tokens for the kernels called `key`: bf16, bf16x2, int8, int4 or mxfp4.
  int amx_from(const std::string& key, int otherwise) const;

 private:
  std::string error_;
  int forced_ = 0;
  std::string lines_;  // of the file, "\n" before each
};

}  // namespace hina
