#include "moe/routing.h"

#include <algorithm>
#include <cmath>

namespace hina {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

bool greater(float a, float b) { return std::isnan(a) ? !std::isnan(b) : a > b; }

float maximum(const float* x, int64_t n) {  // NaN if any is NaN
  float best = x[0];
  for (int64_t i = 1; i < n; ++i) {
    if (std::isnan(x[i])) return x[i];
    if (x[i] > best) best = x[i];
  }
  return best;
}

// A row with NaN, +infinity or nothing but -infinity becomes all NaN, as in ONNX Runtime. `y` may be `x`.
void softmax(const float* x, float* y, int64_t n) {
  const float best = maximum(x, n);
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) sum += y[i] = std::exp(x[i] - best);
  for (int64_t i = 0; i < n; ++i) y[i] /= sum;
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Ids of the k largest, largest first, by insertion into a sorted list: k is small. Scanning in the direction of the
// winning ids and inserting only what is strictly greater settles the ties.
void top_k(const float* scores, int64_t n, int64_t k, bool ties_to_highest, int32_t* ids) {
  int64_t filled = 0;
  for (int64_t step = 0; step < n; ++step) {
    const int64_t id = ties_to_highest ? n - 1 - step : step;
    const float score = scores[id];
    if (filled == k && !greater(score, scores[ids[k - 1]])) continue;
    int64_t at = filled < k ? filled++ : k - 1;
    for (; at > 0 && greater(score, scores[ids[at - 1]]); --at) ids[at] = ids[at - 1];
    ids[at] = static_cast<int32_t>(id);
  }
}

float group_score(const float* scores, int64_t n, GroupScore kind) {
  if (kind == GroupScore::kMax) return maximum(scores, n);
  float first = scores[0], second = -kInfinity;
  for (int64_t i = 1; i < n; ++i) {
    if (greater(scores[i], first)) {
      second = first;
      first = scores[i];
    } else if (greater(scores[i], second)) {
      second = scores[i];
    }
  }
  return n > 1 ? first + second : first;
}

void mask_groups(const Router& router, float* selection, int64_t n, float* group_scores, int32_t* ranked) {
  const int64_t size = n / router.n_group;
  for (int64_t g = 0; g < router.n_group; ++g)
    group_scores[g] = group_score(selection + g * size, size, router.group_score);
  top_k(group_scores, router.n_group, router.topk_group, router.ties_to_highest, ranked);
  std::sort(ranked, ranked + router.topk_group);
  const int32_t* kept = ranked;
  for (int64_t g = 0; g < router.n_group; ++g) {
    if (kept < ranked + router.topk_group && *kept == g)
      ++kept;
    else
      std::fill_n(selection + g * size, size, router.group_mask_value);
  }
}

void sparsemixer(const Router& router, const float* logits, int64_t n, float* scratch, int32_t* ids, float* weights) {
  float* left = scratch;
  float* masked = scratch + n;
  std::copy_n(logits, n, left);
  for (int pass = 0; pass < 2; ++pass) {
    const float best = maximum(left, n);
    for (int64_t i = 0; i < n; ++i) {
      const float size = std::fabs(logits[i]);
      const float factor = std::isnan(best) || size < best ? best : size;
      const bool far = (best - logits[i]) / factor > 2.0f * router.sparsemixer_jitter_eps;
      masked[i] = far ? -kInfinity : left[i];
    }
    top_k(left, n, 1, router.ties_to_highest, &ids[pass]);
    softmax(masked, masked, n);
    weights[pass] = masked[ids[pass]];
    left[ids[pass]] = -kInfinity;
  }
}

void normalise(const Router& router, int64_t k, float* weights) {
  float norm = 0.0f;
  if (router.norm_p == 1.0f) {
    for (int64_t i = 0; i < k; ++i) norm += weights[i];
  } else {
    for (int64_t i = 0; i < k; ++i) norm += std::pow(std::fabs(weights[i]), router.norm_p);
    norm = std::pow(norm, 1.0f / router.norm_p);
  }
  norm += router.norm_eps;
  if (router.norm_floor != 0.0f && norm < router.norm_floor) norm = router.norm_floor;
  for (int64_t i = 0; i < k; ++i) weights[i] /= norm;
}

bool usable(const float* logits, int64_t n) {
  bool any_finite = false;
  for (int64_t i = 0; i < n; ++i) {
    if (std::isnan(logits[i]) || logits[i] == kInfinity) return false;
    any_finite |= logits[i] != -kInfinity;
  }
  return any_finite;
}

}  // namespace

void route_token(const Router& router, int64_t num_experts, int64_t k, const float* logits, const RouteScratch& scratch,
                 int32_t* ids, float* weights) {
  const int64_t n = num_experts;
  if (router.score_func == ScoreFunc::kSparsemixer) {
    sparsemixer(router, logits, n, scratch.scores, ids, weights);
  } else {
    float* scores = scratch.scores;
    float* selection = scores + n;
    if (router.score_func == ScoreFunc::kSoftmax) {
      softmax(logits, scores, n);
    } else if (router.score_func == ScoreFunc::kSigmoid) {
      for (int64_t i = 0; i < n; ++i) scores[i] = sigmoid(logits[i]);
    } else {
      std::copy_n(logits, n, scores);
    }
    for (int64_t i = 0; i < n; ++i)
      selection[i] = router.correction.empty() ? scores[i] : scores[i] + router.correction[i];
    if (router.n_group > 1) mask_groups(router, selection, n, scores + 2 * n, scratch.group_ids);
    top_k(selection, n, k, router.ties_to_highest, ids);
    const float* source = router.mix_from_selection ? selection : scores;
    for (int64_t i = 0; i < k; ++i) weights[i] = source[ids[i]];
    if (router.score_func == ScoreFunc::kSoftmaxTopK) softmax(weights, weights, k);
    if (router.score_func == ScoreFunc::kSigmoidTopK)
      for (int64_t i = 0; i < k; ++i) weights[i] = sigmoid(weights[i]);
  }
  if (router.norm_topk_prob) normalise(router, k, weights);
  for (int64_t i = 0; i < k; ++i) weights[i] *= router.routed_scaling_factor;
  if (router.zero_nonfinite && !usable(logits, n)) std::fill_n(weights, k, 0.0f);
}

}  // namespace hina
