// Layer: the two projections by a NumaPlan. Tasks are items of its partitions, in one queue for each node and phase; a
// worker takes those of the node that it runs on, then those of others, so that none is idle.
//
//   FC1  an item of gate or of up leaves the products of its rows, or of a range of k of them, in a buffer. Whoever
//        finishes the last item of a window adds up the ranges, applies the activation and stores what FC2 takes.
//   FC2  likewise an item of down; whoever finishes the last item of a window of output rows, of all groups, adds up
//        the ranges and then the groups, as Layer::fc2 does.
//
// Every product and every sum is that of the plain plan in the same order, except that a row which is cut along k is
// added up range by range. Results of an item lie as the kernels leave them: [tokens][rows], or [rows][tokens] of each
// panel in tiles.
#include <cstring>
#include <new>

#include "moe/layer.h"

namespace hina {
namespace {

int64_t items_of(const Partition* partition, int node) {
  return partition == nullptr ? 0 : partition->node_first[node + 1] - partition->node_first[node];
}

int32_t items_in(const Partition* partition, int64_t window) {
  return partition == nullptr ? 0 : partition->window_first[window + 1] - partition->window_first[window];
}

// Every step-th row of a matrix from `first` on.
Matrix rows_of(const Matrix& matrix, int64_t first, int64_t step) {
  Matrix rows = matrix;
  rows.data = matrix.row(first);
  rows.row_stride *= step;
  rows.scales += first * matrix.scale_stride;
  rows.scale_stride *= step;
  if (matrix.zero_points != nullptr) rows.zero_points += first * matrix.zero_point_stride;
  rows.zero_point_stride *= step;
  return rows;
}

// The products of the rows of a window for `n` tokens, as [rows][n]: the sums over the items' ranges of k, in ascending
// order. `results` are those of a group of `tokens` tokens, of which `begin` come before these.
void join(const Partition& partition, int64_t window, const float* results, int64_t tokens, int64_t begin, int n,
          float* values) {
  for (int32_t i = partition.window_first[window]; i < partition.window_first[window + 1]; ++i) {
    const Item& item = partition.items[partition.in_window[i]];
    const float* from = results + item.at * tokens + begin * item.rows();
    const int64_t count = int64_t{item.run} * n;
    for (int64_t r = 0; r < item.count; ++r, from += count) {
      float* to = values + (item.first + r * item.step - window * partition.window) * n;
      if (item.k0 == 0)
        std::copy_n(from, count, to);
      else
        for (int64_t j = 0; j < count; ++j) to[j] += from[j];
    }
  }
}

}  // namespace

// --- tokens of ranges of k, where they are int8 codes ---

void Layer::quantise_parts(int64_t token) {
  const std::vector<KRange>& ranges = call_.numa->ranges[kFc1];
  for (int f = 0; f < kTokenFormCount; ++f)
    for (size_t r = 1; w_.token_parts[f] != nullptr && r < ranges.size(); ++r)
      quantise(static_cast<TokenForm>(f), x_ + token * p_.hidden_size + ranges[r].from, 0, ranges[r].size(),
               ranges[r].size(), w_.token_parts[f][r].of(token));
}

void Layer::pack_parts(int64_t task) {
  const auto [group, slot] = w_.packs[task];
  const TileKernel& kernel = *tiles_of(group).first;
  if (w_.packed_parts == nullptr || kernel.terms > 0) return;
  const std::vector<KRange>& ranges = call_.numa->ranges[kFc1];
  const int64_t n = std::min<int64_t>(kPanelTokens, w_.plan.first[group + 1] - slot);
  const float* weights = is_scaled(kind_of(group)) ? &w_.plan.weight[slot] : nullptr;
  const float* tokens[kPanelTokens];
  for (size_t r = 1; r < ranges.size(); ++r) {
    for (int64_t t = 0; t < n; ++t) tokens[t] = x_ + w_.plan.token[slot + t] * p_.hidden_size + ranges[r].from;
    kernel.pack(tokens, weights, static_cast<int>(n), ranges[r].size(), w_.packed_parts[r].of(slot));
  }
}

// Values [first, first + rows) of what FC1 leaves for n tokens, as [rows][n], to the ranges of FC2.
void Layer::store_parts(int64_t group, int64_t first, int64_t rows, int64_t slot, int n, const float* values) const {
  const Kind& kind = kind_of(group);
  const Parts* parts = hidden_parts(kind);
  if (parts == nullptr) return;
  const TileKernel* kernel = tiles_of(group).down;
  const std::vector<KRange>& ranges = call_.numa->ranges[&kind == &shared_ ? kSharedFc2 : kFc2];
  for (size_t r = 1; r < ranges.size(); ++r) {
    const int64_t from = std::max(first, ranges[r].from), to = std::min(first + rows, ranges[r].to);
    if (from >= to) continue;
    const float* part = values + (from - first) * n;
    std::byte* at = parts[r].of(slot - first_slot(kind));
    const int64_t begin = from - ranges[r].from, end = to - ranges[r].from;
    if (kernel == nullptr)
      quantise(form(expert_of(group).down), part, begin, end, ranges[r].size(), at);
    else if (kernel->terms == 0)
      kernel->pack_rows(part, static_cast<int>(end - begin), n, begin, ranges[r].size(), at);
  }
}

// --- queues ---

void Layer::plan_by_nodes() {
  const NumaPlan& plan = *call_.numa;
  const size_t active = w_.plan.active.size();
  for (int node = 0; node < plan.nodes; ++node) {
    NodeQueue &fc1 = w_.queues[node], &fc2 = w_.queues[plan.nodes + node];
    fc1.first[0] = fc2.first[0] = 0;
    for (size_t i = 0; i < active; ++i) {
      const ExpertPartition& cut = plan.experts[w_.order[i]];
      fc1.first[i + 1] = static_cast<int32_t>(fc1.first[i] + items_of(cut.up, node) + items_of(cut.gate, node));
      fc2.first[i + 1] = static_cast<int32_t>(fc2.first[i] + items_of(cut.down, node));
    }
    fc1.total = fc1.first[active], fc2.total = fc2.first[active];
  }
  const int64_t down_windows = plan.experts[0].down->windows();
  for (int64_t w = 0; w < down_windows; ++w) {
    int32_t items = 0;
    for (const int32_t group : w_.plan.active) items += items_in(plan.experts[group].down, w);
    (new (&w_.fc2_items_left[w]) Countdown)->reset(items);
  }
  for (const int32_t group : w_.plan.active) {
    const ExpertPartition& cut = plan.experts[group];
    for (int64_t w = 0; w < cut.up->windows(); ++w)
      (new (&fc1_items_left(group, w)) Countdown)->reset(items_in(cut.up, w) + items_in(cut.gate, w));
    w_.fc1_left[group].reset(static_cast<int32_t>(cut.up->windows()));
  }
}

Countdown& Layer::fc1_items_left(int64_t group, int64_t window) const {
  return w_.fc1_items_left[group * call_.numa->most_fc1_windows + window];
}

int Layer::see_node(size_t worker) {
  int node = executor_.node == nullptr ? 0 : std::max(executor_.node(executor_.self), 0);
  if (call_.numa != nullptr && node >= call_.numa->nodes) node = 0;
  return w_.node_of_worker[worker] = node;
}

void Layer::work_by_nodes(size_t worker) {
  for (int64_t task; (task = next_pack_.fetch_add(1, std::memory_order_relaxed)) < pack_tasks_;) {
    pack_parts(task);
    pack(task);
  }
  serve(kFc1, worker);
  serve(kFc2, worker);
}

// Takes items until every queue of the phase is empty: those of the worker's node, several at a time, then single ones
// of the fullest queue.
void Layer::serve(Phase phase, size_t worker) {
  const int nodes = call_.numa->nodes;
  NodeQueue* queues = w_.queues + (phase == kFc1 ? 0 : nodes);
  int64_t items = 0;
  for (int n = 0; n < nodes; ++n) items += queues[n].total;
  const int64_t of_own = std::clamp<int64_t>(items / (kTasksPerWorker * workers_), 1, kMostRun);
  for (;;) {
    NodeQueue* queue = &queues[see_node(worker)];
    const int64_t run = queue->left() > 0 ? of_own : 1;
    if (queue->left() <= 0)
      queue = std::max_element(queues, queues + nodes,
                               [](const NodeQueue& a, const NodeQueue& b) { return a.left() < b.left(); });
    if (queue->left() <= 0) return;
    const int64_t begin = queue->next.fetch_add(run, std::memory_order_relaxed);
    for (int64_t i = begin; i < std::min(begin + run, queue->total); ++i) {
      const Product product = product_of(phase, *queue, static_cast<int>(queue - queues), i);
      multiply(product, worker);
      const int64_t window = product.item->window;
      if (phase == kFc1 && fc1_items_left(product.group, window).arrive()) {
        join_fc1(product.group, window, worker);
        w_.fc1_left[product.group].arrive();
      }
      if (phase == kFc2 && w_.fc2_items_left[window].arrive()) join_fc2(window, worker);
    }
  }
}

Layer::Product Layer::product_of(Phase phase, const NodeQueue& queue, int node, int64_t index) const {
  const auto after = std::upper_bound(queue.first, queue.first + w_.plan.active.size(), static_cast<int32_t>(index));
  const int32_t group = w_.order[after - queue.first - 1];
  const ExpertPartition& cut = call_.numa->experts[group];
  const Expert& expert = expert_of(group);
  int64_t item = index - after[-1];
  Product product{phase, group, false, &expert.down, cut.down, nullptr, results_of(phase, group)};
  if (phase == kFc1) {
    product.is_gate = item >= items_of(cut.up, node);
    if (product.is_gate) item -= items_of(cut.up, node);
    product.matrix = product.is_gate ? &expert.gate : &expert.up;
    product.partition = product.is_gate ? cut.gate : cut.up;
    if (product.is_gate) product.results = gate_results(group);
  }
  product.item = &product.partition->items[product.partition->node_first[node] + item];
  return product;
}

float* Layer::results_of(Phase phase, int64_t group) const {
  const int64_t slot = w_.plan.first[group];
  return phase == kFc1 ? w_.fc1_results + slot * call_.numa->fc1_results
                       : w_.fc2_results + slot * call_.numa->fc2_results;
}

float* Layer::gate_results(int64_t group) const {
  return results_of(kFc1, group) + tokens_of(group) * call_.numa->experts[group].up->results;
}

// --- products ---

void Layer::multiply(const Product& product, size_t worker) {
  const Item& item = *product.item;
  const Matrix part = columns_of(*product.matrix, item.k0, item.k1, values_of_row(product));
  for (int64_t r = 0; call_.reads != nullptr && r < item.count; ++r)
    record_part(part, item.first + r * item.step, item.first + r * item.step + item.run, worker);
  if (product.phase == kFc2) w_.fc1_left[product.group].wait();
  if (const ExpertTiles tiles = tiles_of(product.group); tiles.first != nullptr)
    multiply_in_tiles(product, tiles, part, worker);
  else
    multiply_by_vectors(product, part, worker);
}

// Rows of a matrix that columns_of() gave.
void Layer::record_part(const Matrix& part, int64_t first, int64_t last, size_t worker) const {
  const int64_t at_once = part.row_stride == part.row_bytes ? last - first : 1;
  for (int64_t row = first; row < last; row += at_once)
    call_.reads->add({part.row(row), at_once * part.row_bytes, static_cast<int>(worker), w_.node_of_worker[worker]});
}

void Layer::multiply_by_vectors(const Product& product, const Matrix& part, size_t worker) {
  const Item& item = *product.item;
  const TokenForm token_form = form(part);
  const int64_t k = item.k1 - item.k0, rows = item.rows(), whole = values_of_row(product);
  const int64_t begin = w_.plan.first[product.group], end = w_.plan.first[product.group + 1];
  const int64_t step = rows_at_once(*product.matrix, token_form, whole, end - begin, kernels_);
  const bool scaled = product.phase == kFc1 && is_scaled(kind_of(product.group));
  const int64_t chunk = chunk_of(scaled ? w_.scaled_bytes : token_bytes(token_form, whole, kernels_));
  const void* tokens[kMaxChunk];
  // What this worker will read then, most likely.
  const Partition& partition = *product.partition;
  const bool is_last = std::binary_search(partition.node_first.begin(), partition.node_first.end(),
                                          static_cast<int32_t>(&item - partition.items.data()) + 1);
  const Item& after = is_last ? item : (&item)[1];
  const Matrix then = columns_of(*product.matrix, after.k0, after.k1, whole);
  const RowBlock next_item = is_last ? RowBlock{} : RowBlock{&then, after.first, after.first + after.run};
  for (int64_t row = 0, count; row < rows; row += count) {
    // A block is whole runs, or a part of one.
    const int64_t most = item.run > step ? item.run - row % item.run : step / item.run * item.run;
    count = std::min({step, rows - row, most});
    const auto index = [&](int64_t r) { return item.first + r / item.run * item.step + r % item.run; };
    const int64_t first = index(row);
    const RowBlock block{&part, first, first + count, item.run > step ? 0 : item.run, item.step};
    RowBlock next = next_item;
    if (row + count < rows) next = {&part, index(row + count), index(row + count) + count};
    const Projection projection(block, next, k, token_form, end - begin, kernels_, scratch_of(worker, product.is_gate));
    for (int64_t slot = begin; slot < end; slot += chunk) {
      const int n = static_cast<int>(std::min(chunk, end - slot));
      gather_part(product, token_form, slot, n, worker, tokens);
      projection.multiply(tokens, n, product.out(end - begin) + (slot - begin) * rows + row, rows);
    }
  }
}

// Where the n tokens of the slots from `slot` on are that an item is multiplied with.
void Layer::gather_part(const Product& product, TokenForm form, int64_t slot, int n, size_t worker,
                        const void** tokens) const {
  const Item& item = *product.item;
  const Kind& kind = kind_of(product.group);
  const bool part_of_int8 = item.range > 0 && is_int8(form);
  if (product.phase == kFc1 && is_scaled(kind)) {
    gather_scaled(form, {item.k0, item.k1}, slot, n, worker, tokens);
    return;
  }
  if (product.phase == kFc1 && !part_of_int8) gather(form, slot, n, tokens);
  for (int t = 0; t < n; ++t) {
    if (part_of_int8)
      tokens[t] = product.phase == kFc1 ? w_.token_parts[static_cast<int>(form)][item.range].of(w_.plan.token[slot + t])
                                        : hidden_parts(kind)[item.range].of(slot + t - first_slot(kind));
    else if (product.phase == kFc2)
      tokens[t] = hidden_of(kind, slot + t);
    if (!is_int8(form))
      tokens[t] = static_cast<const std::byte*>(tokens[t]) + item.k0 * (form == TokenForm::kBFloat16 ? 2 : 4);
  }
}

void Layer::multiply_in_tiles(const Product& product, const ExpertTiles& tiles, const Matrix& part, size_t worker) {
  const Item& item = *product.item;
  const TileKernel& kernel = product.phase == kFc1 ? *tiles.first : *tiles.down;
  const int64_t k = item.k1 - item.k0, all = item.rows(), begin = w_.plan.first[product.group];
  const int64_t tokens = tokens_of(product.group), step = tile_rows_at_once(kernel, tokens, 1);
  if (product.phase == kFc1) w_.packs_left[product.group].wait();
  // Tiles are of rows at one distance: all runs of one row, or one run.
  const bool single = item.run == 1;
  const int64_t length = single ? item.count : item.run;
  for (int64_t piece = 0; piece < (single ? 1 : item.count); ++piece) {
    const Matrix rows = rows_of(part, item.first + piece * item.step, single ? item.step : 1);
    for (int64_t row = 0; row < length; row += step) {
      const int64_t count = std::min(step, length - row), at = piece * length + row;
      const TileRows weights[2] = {
          tile_rows({&rows, row, row + count}, kernel, k, kernels_, scratch_of(worker, product.is_gate)), {}};
      for (int64_t t = 0; t < tokens; t += kTileChunk) {
        const int64_t n = std::min(kTileChunk, tokens - t);
        const void* panels[kTileChunk / kPanelTokens];
        const auto of_panel = [&](int64_t i) { return static_cast<int>(std::min<int64_t>(kPanelTokens, n - i)); };
        for (int64_t i = 0; i < n; i += kPanelTokens)
          panels[i / kPanelTokens] = panel_part(product, tiles, begin + t + i, of_panel(i));
        float* values = tile_of(worker);
        kernel.multiply(weights, panels, static_cast<int>(n), k, values);
        for (int64_t i = 0; i < n; i += kPanelTokens)
          std::copy_n(values + i * count, count * of_panel(i), product.out(tokens) + (t + i) * all + at * of_panel(i));
      }
    }
  }
}

// The panel of n tokens that begins at `slot`, from the item's range of k on.
const void* Layer::panel_part(const Product& product, const ExpertTiles& tiles, int64_t slot, int n) const {
  const Item& item = *product.item;
  const Kind& kind = kind_of(product.group);
  const TileKernel& kernel = product.phase == kFc1 ? *tiles.first : *tiles.down;
  if (kernel.terms == 0 && item.range > 0)
    return product.phase == kFc1 ? w_.packed_parts[item.range].of(slot)
                                 : hidden_parts(kind)[item.range].of(slot - first_slot(kind));
  const void* panel = product.phase == kFc1 ? packed_of(tiles, product.group, slot) : hidden_of(kind, slot);
  // Panels of bfloat16 have the values along k one after the other.
  return static_cast<const std::byte*>(panel) + (item.k0 == 0 ? 0 : kernel.panel_bytes(item.k0, n));
}

// --- sums ---

void Layer::join_fc1(int64_t group, int64_t window, size_t worker) {
  const ExpertPartition& cut = call_.numa->experts[group];
  const Kind& kind = kind_of(group);
  const ExpertTiles tiles = tiles_of(group);
  const int64_t first = window * cut.up->window, rows = std::min(cut.up->window, kind.size - first);
  const int64_t tokens = tokens_of(group), slot = w_.plan.first[group];
  const int step = tiles.first == nullptr ? 1 : kPanelTokens;
  for (int64_t t = 0; t < tokens; t += step) {
    const int n = static_cast<int>(std::min<int64_t>(step, tokens - t));
    float* up = joined_of(worker);
    float* gate = kind.gated ? up + rows * n : up;
    join(*cut.up, window, results_of(kFc1, group), tokens, t, n, up);
    if (kind.gated) join(*cut.gate, window, gate_results(group), tokens, t, n, gate);
    if (tiles.first == nullptr)
      finish_token(group, first, first + rows, slot + t, up, gate);
    else
      activate(group, tiles, first, rows, slot + t, n, false, up);
    store_parts(group, first, rows, slot + t, n, gate);
  }
}

void Layer::join_fc2(int64_t window, size_t worker) {
  const int64_t size = call_.numa->experts[0].down->window, first = window * size;
  const int64_t rows = std::min(size, p_.hidden_size - first);
  begin_output(first, rows);
  for (const int32_t group : w_.plan.active) {
    const bool in_tiles = tiles_of(group).first != nullptr;
    const int step = in_tiles ? kPanelTokens : 1;
    const int64_t tokens = tokens_of(group), slot = w_.plan.first[group];
    for (int64_t t = 0; t < tokens; t += step) {
      const int n = static_cast<int>(std::min<int64_t>(step, tokens - t));
      float* values = joined_of(worker);
      join(*call_.numa->experts[group].down, window, results_of(kFc2, group), tokens, t, n, values);
      if (in_tiles)
        add_panel(group, first, rows, slot + t, n, values);
      else
        add_token(group, first, rows, slot + t, values);
    }
  }
  end_output(first, rows);
}

}  // namespace hina
