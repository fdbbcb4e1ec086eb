#include "moe/routing.h"

#include <algorithm>
#include <cmath>

namespace hina {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float maximum(const float* x, int64_t n) {  // NaN if any is NaN
  float best = x[0];
  for (int64_t i = 1; i < n; ++i) {
    if (std::isnan(x[i])) return x[i];
    if (x[i] > best) best = x[i];
  }
  return best;
}

// Without branches, which would follow the scores.
float group_score(const float* scores, int64_t n, GroupScore kind) {
  float first = -kInfinity, second = -kInfinity;
  bool any_nan = false;
  for (int64_t i = 0; i < n; ++i) {
    any_nan |= std::isnan(scores[i]);
    second = std::max(second, std::min(first, scores[i]));
    first = std::max(first, scores[i]);
  }
  if (any_nan) return std::numeric_limits<float>::quiet_NaN();
  return kind == GroupScore::kTop2Sum && n > 1 ? first + second : first;
}

void mask_groups(const RouteKernel& kernels, const Router& router, float* selection, int64_t n, float* group_scores,
                 int32_t* ranked) {
  const int64_t size = n / router.n_group;
  for (int64_t g = 0; g < router.n_group; ++g)
    group_scores[g] = group_score(selection + g * size, size, router.group_score);
  kernels.top_k(group_scores, router.n_group, router.topk_group, router.ties_to_highest, ranked);
  std::sort(ranked, ranked + router.topk_group);
  const int32_t* kept = ranked;
  for (int64_t g = 0; g < router.n_group; ++g) {
    if (kept < ranked + router.topk_group && *kept == g)
      ++kept;
    else
      std::fill_n(selection + g * size, size, router.group_mask_value);
  }
}

void sparsemixer(const RouteKernel& kernels, const Router& router, const float* logits, int64_t n, float* scratch,
                 int32_t* ids, float* weights) {
  float* left = scratch;
  float* masked = scratch + n;
  std::copy_n(logits, n, left);
  for (int pass = 0; pass < 2; ++pass) {
    const float best = maximum(left, n);
    for (int64_t i = 0; i < n; ++i) {
      const float size = std::fabs(logits[i]);
      const float factor = size < best ? best : size;
      const bool far = (best - logits[i]) / factor > 2.0f * router.sparsemixer_jitter_eps;
      masked[i] = far ? -kInfinity : left[i];
    }
    kernels.top_k(left, n, 1, router.ties_to_highest, &ids[pass]);
    kernels.softmax(masked, masked, n);
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

// Without an early end, which would keep the compiler from using vectors.
bool usable(const float* logits, int64_t n) {
  int bad = 0, finite = 0;
  for (int64_t i = 0; i < n; ++i) {
    bad |= !(logits[i] < kInfinity);
    finite |= logits[i] > -kInfinity;
  }
  return finite != 0 && bad == 0;
}

// Scores of all experts, and what they are chosen by.
struct Scores {
  const float* mixing;
  const float* selection;
};

Scores score(const RouteKernel& kernels, const Router& router, int64_t n, const float* logits,
             const RouteScratch& scratch) {
  const float* scores = logits;
  if (router.score_func == ScoreFunc::kSoftmax || router.score_func == ScoreFunc::kSigmoid) {
    (router.score_func == ScoreFunc::kSoftmax ? kernels.softmax : kernels.sigmoid)(logits, scratch.scores, n);
    scores = scratch.scores;
  }
  if (router.correction.empty() && router.n_group == 1) return {scores, scores};
  float* selection = scratch.scores + n;
  std::copy_n(scores, n, selection);
  if (!router.correction.empty())
    for (int64_t i = 0; i < n; ++i) selection[i] += router.correction[i];
  if (router.n_group > 1) mask_groups(kernels, router, selection, n, selection + n, scratch.group_ids);
  return {scores, selection};
}

}  // namespace

void route_token(const RouteKernel& kernels, const Router& router, int64_t num_experts, int64_t k, const float* logits,
                 const RouteScratch& scratch, int32_t* ids, float* weights) {
  const int64_t n = num_experts;
  if (router.score_func == ScoreFunc::kSparsemixer) {
    sparsemixer(kernels, router, logits, n, scratch.scores, ids, weights);
  } else {
    const Scores scores = score(kernels, router, n, logits, scratch);
    kernels.top_k(scores.selection, n, k, router.ties_to_highest, ids);
    const float* source = router.mix_from_selection ? scores.selection : scores.mixing;
    for (int64_t i = 0; i < k; ++i) weights[i] = source[ids[i]];
    if (router.score_func == ScoreFunc::kSoftmaxTopK) kernels.softmax(weights, weights, k);
    if (router.score_func == ScoreFunc::kSigmoidTopK) kernels.sigmoid(weights, weights, k);
  }
  if (router.norm_topk_prob) normalise(router, k, weights);
  for (int64_t i = 0; i < k; ++i) weights[i] *= router.routed_scaling_factor;
  if (router.zero_nonfinite && !usable(logits, n)) std::fill_n(weights, k, 0.0f);
}

}  // namespace hina
