#include "runtime/tuning.h"

#include <charconv>
#include <cstdlib>

#include "runtime/files.h"

namespace hina {
namespace {

const char* variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

// A number of tokens, or 0.
int tokens_of(const std::string& text) {
  int tokens = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), tokens);
  return error == std::errc() && end == text.data() + text.size() && tokens > 0 ? tokens : 0;
}

}  // namespace

std::string tuning_path() {
  if (*variable("HINA_TUNING") != '\0') return variable("HINA_TUNING");
  if (*variable("XDG_CACHE_HOME") == '/') return std::string(variable("XDG_CACHE_HOME")) + "/hina-ort/tuning";
  return *variable("HOME") == '\0' ? "" : std::string(variable("HOME")) + "/.cache/hina-ort/tuning";
}

Tuning::Tuning(const std::string& cpu) {
  if (const std::string text = variable("HINA_AMX_FROM"); !text.empty()) {
    forced_ = tokens_of(text);
    if (forced_ == 0) error_ = "HINA_AMX_FROM is '" + text + "', expected a number of tokens from 1 on";
    return;
  }
  constexpr size_t kMost = 4096;  // bytes; what is longer is not a file of ours
  const std::string text = read_file(tuning_path(), kMost);
  if (text.rfind("cpu " + cpu + "\n", 0) == 0) lines_ = "\n" + text;
}

int Tuning::amx_from(const std::string& key, int otherwise) const {
  if (forced_ > 0) return forced_;
  const size_t at = lines_.find("\n" + key + " ");
  if (at == std::string::npos) return otherwise;
  const size_t begin = at + key.size() + 2;
  const int tokens = tokens_of(lines_.substr(begin, lines_.find('\n', begin) - begin));
  return tokens > 0 ? tokens : otherwise;
}

}  // namespace hina
