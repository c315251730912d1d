#include "model/weights.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/try.h"
#include "base/units.h"

namespace clo {

namespace {

// Rows that are packed together.
int64_t group_rows(const WeightView& matrix) { return matrix.tiled ? kTileOutputs : kGroupRows; }

// Memory for a matrix of several parts, the index-th of the plan.
Result<WeightView> take_matrix(const std::vector<std::pair<std::string, int64_t>>& parts,
                               int64_t cols, const WeightPlan& plan, size_t index, Arena& arena) {
  WeightView view;
  view.type = plan.type;
  view.blocks = plan.blocks.empty() ? WeightBlocks::kNone : plan.blocks[index];
  view.tiled = plan.tiled && view.blocks != WeightBlocks::kNone;
  view.num_cols = cols;
  for (const auto& [name, rows] : parts) view.num_rows += rows;
  CLO_ASSIGN(view.data, arena.allocate(matrix_bytes(view)));
  return view;
}

// Reads tensors into the arena.
class Loader {
 public:
  Loader(const TensorFiles& files, const WeightPlan& plan, Arena& arena, int num_threads,
         const WeightUpload& upload)
      : files_(files), plan_(plan), arena_(arena), num_threads_(num_threads), upload_(upload) {}

  // Stacks matrices of `cols` columns, given as (name, rows), into one.
  Result<WeightView> matrix(const std::vector<std::pair<std::string, int64_t>>& parts,
                            int64_t cols) {
    CLO_ASSIGN(const WeightView view, take_matrix(parts, cols, plan_, next_matrix_++, arena_));
    auto* at = const_cast<std::byte*>(view.data);
    for (const auto& [name, rows] : parts) {
      const int64_t shape[] = {rows, cols};
      WeightView part = view;
      part.num_rows = rows;
      if (view.blocks != WeightBlocks::kNone) {
        // Groups of rows are of one tensor.
        CLO_CHECK(rows % group_rows(view) == 0 || name == parts.back().first, rows);
        CLO_TRY(put_blocks(at, name, part));
      } else {
        CLO_ASSIGN(const TensorView tensor, files_.require(name, shape));
        put(at, tensor, view.type);
      }
      at += matrix_bytes(part);
    }
    return view;
  }

  // Joins vectors, given as (name, length), as f32.
  Result<const float*> vector(const std::vector<std::pair<std::string, int64_t>>& parts) {
    int64_t length = 0;
    for (const auto& [name, count] : parts) length += count;
    CLO_ASSIGN(std::byte* const block, arena_.allocate(length * int64_t{sizeof(float)}));
    std::byte* at = block;
    for (const auto& [name, count] : parts) {
      const int64_t shape[] = {count};
      CLO_ASSIGN(const TensorView tensor, files_.require(name, shape));
      put(at, tensor, DType::kF32);
      at += count * int64_t{sizeof(float)};
    }
    return reinterpret_cast<const float*>(block);
  }

 private:
  // Elements converted at a time: both buffers stay in the cache.
  static constexpr int64_t kPiece = int64_t{1} << 16;

  // A part of a matrix in blocks. Whole groups of rows, but for the last part's end; they are
  // shared among threads, since all of a file's numbers are touched here. Packed where they will
  // lie, or, for a device, on the way.
  Status put_blocks(std::byte* target, const std::string& name, const WeightView& part) {
    const int64_t shape[] = {part.num_rows, part.num_cols};
    const int64_t rows = part.num_rows, cols = part.num_cols, together = group_rows(part);
    CLO_TRY(files_.check(name, shape));
    BlockRow first;
    const bool as_they_lie = files_.block_row(name, 0, part.blocks, first);
    TensorView tensor;
    if (!as_they_lie) {
      CLO_ASSIGN(tensor, files_.require(name, shape));
    }
    std::unique_ptr<std::byte[]> on_the_way;
    std::byte* packed = target;
    if (part.tiled) {
      on_the_way =
          std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(matrix_bytes(part)));
      packed = on_the_way.get();
    }
    const int64_t groups = divide_up(rows, together);
    const int64_t group_bytes = matrix_bytes(part) / groups;
    std::atomic<int64_t> next{0};
    const auto work = [&] {
      std::vector<BlockRow> of_group(static_cast<size_t>(together));
      std::vector<float> numbers(static_cast<size_t>(cols));
      for (BlockRow& row : of_group) row.resize(cols);
      for (int64_t group = next++; group < groups; group = next++) {
        for (int64_t i = 0; i < together; ++i) {
          BlockRow& target_row = of_group[static_cast<size_t>(i)];
          const int64_t row = group * together + i;
          if (row >= rows) {
            target_row.clear();
          } else if (as_they_lie) {
            (void)files_.block_row(name, row, part.blocks, target_row);
          } else {
            convert_to_f32(tensor.type, tensor.bytes + row * cols * dtype_bytes(tensor.type),
                           numbers.data(), cols);
            quantize_row(part.blocks, numbers.data(), cols, target_row);
          }
        }
        std::byte* const at = packed + group * group_bytes;
        part.tiled ? pack_tiles(part.blocks, of_group.data(), cols, at)
                   : pack_rows(part.blocks, of_group.data(), cols, at);
      }
    };
    constexpr int64_t kWorthAThread = 32;  // groups
    std::vector<std::jthread> others;
    const auto threads = std::min<int64_t>(num_threads_, groups / kWorthAThread);
    for (int64_t t = 1; t < threads; ++t) others.emplace_back(work);
    work();
    others.clear();  // joins
    if (part.tiled) upload_(target, packed, matrix_bytes(part));
    return Ok{};
  }

  void put(std::byte* target, const TensorView& tensor, DType type) {
    if (tensor.type == type) {
      upload_(target, tensor.bytes, tensor.num_bytes());
      return;
    }
    const int64_t count = tensor.num_elements();
    floats_.resize(kPiece);
    converted_.resize(kPiece * sizeof(float));
    for (int64_t first = 0; first < count; first += kPiece) {
      const int64_t here = std::min(kPiece, count - first);
      convert_to_f32(tensor.type, tensor.bytes + first * dtype_bytes(tensor.type), floats_.data(),
                     here);
      convert_from_f32(type, floats_.data(), converted_.data(), here);
      upload_(target + first * dtype_bytes(type), converted_.data(), here * dtype_bytes(type));
    }
  }

  const TensorFiles& files_;
  const WeightPlan& plan_;
  size_t next_matrix_ = 0;
  Arena& arena_;
  int num_threads_;
  const WeightUpload& upload_;
  std::vector<float> floats_;
  std::vector<std::byte> converted_;
};

// Makes tensors of the same shapes from nothing.
struct Maker {
  const WeightPlan& plan;
  Arena& arena;
  const Weights::Fill& fill;
  size_t next_matrix = 0;

  Result<WeightView> matrix(const std::vector<std::pair<std::string, int64_t>>& parts,
                            int64_t cols) {
    CLO_ASSIGN(const WeightView view, take_matrix(parts, cols, plan, next_matrix++, arena));
    fill.matrix(const_cast<std::byte*>(view.data), view);
    return view;
  }
  Result<const float*> vector(const std::vector<std::pair<std::string, int64_t>>& parts) {
    int64_t length = 0;
    for (const auto& [name, count] : parts) length += count;
    CLO_ASSIGN(std::byte* const at, arena.allocate(length * int64_t{sizeof(float)}));
    fill.vector(reinterpret_cast<float*>(at), length);
    return reinterpret_cast<const float*>(at);
  }
};

constexpr const char* kHead = "lm_head.weight";

std::string_view storage_name(WeightStorage storage) {
  switch (storage) {
    case WeightStorage::kAuto:
      return "auto";
    case WeightStorage::kF32:
      return "f32";
    case WeightStorage::kBF16:
      return "bf16";
    case WeightStorage::kF16:
      return "f16";
    case WeightStorage::kInt8:
      return "int8";
    case WeightStorage::kQ4:
      return "q4";
  }
  return "unknown";
}

struct Sizes {
  int64_t q, kv, hidden, inner;
};

Sizes sizes_of(const ModelConfig& c) {
  return {c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size,
          c.intermediate_size};
}

}  // namespace

std::vector<std::pair<std::string, Shape>> expected_tensors(const ModelConfig& c) {
  const Sizes s = sizes_of(c);
  std::vector<std::pair<std::string, Shape>> list = {
      {"model.embed_tokens.weight", {c.vocab_size, s.hidden}}, {"model.norm.weight", {s.hidden}}};
  if (!c.tie_word_embeddings) list.push_back({kHead, {c.vocab_size, s.hidden}});
  for (int64_t l = 0; l < c.num_layers; ++l) {
    const std::string layer = "model.layers." + std::to_string(l) + ".";
    const auto linear = [&](const std::string& name, int64_t rows, int64_t cols, bool bias) {
      list.push_back({layer + name + ".weight", {rows, cols}});
      if (bias) list.push_back({layer + name + ".bias", {rows}});
    };
    linear("self_attn.q_proj", s.q, s.hidden, c.attention_bias);
    linear("self_attn.k_proj", s.kv, s.hidden, c.attention_bias);
    linear("self_attn.v_proj", s.kv, s.hidden, c.attention_bias);
    linear("self_attn.o_proj", s.hidden, s.q, c.output_bias);
    linear("mlp.gate_proj", s.inner, s.hidden, c.mlp_bias);
    linear("mlp.up_proj", s.inner, s.hidden, c.mlp_bias);
    linear("mlp.down_proj", s.hidden, s.inner, c.mlp_bias);
    list.push_back({layer + "input_layernorm.weight", {s.hidden}});
    list.push_back({layer + "post_attention_layernorm.weight", {s.hidden}});
    if (c.qk_norm) {
      list.push_back({layer + "self_attn.q_norm.weight", {c.head_dim}});
      list.push_back({layer + "self_attn.k_norm.weight", {c.head_dim}});
    }
  }
  return list;
}

Result<WeightPlan> plan_weights(const ModelConfig& c, WeightStorage storage, DType type,
                                bool on_gpu) {
  WeightPlan plan;
  plan.type = type;
  if (storage == WeightStorage::kF32) plan.type = DType::kF32;
  if (storage == WeightStorage::kBF16) plan.type = DType::kBF16;
  if (storage == WeightStorage::kF16) plan.type = DType::kF16;
  const bool in_blocks = storage == WeightStorage::kInt8 || storage == WeightStorage::kQ4;
  const std::string name = "--weights " + std::string(storage_name(storage));
  if (on_gpu && plan.type != type) {
    return Error{ErrorCode::kUnsupported,
                 "a GPU's plain weights are of the KV rows' type, " +
                     std::string(dtype_name(type)) +
                     "; say --dtype instead, leave the flag out, or use --backend cpu",
                 name};
  }
  const Sizes s = sizes_of(c);
  // Gate and up lie one after the other in groups of rows.
  const bool groups_fit = s.inner % (on_gpu ? kTileOutputs : kGroupRows) == 0;
  if (storage == WeightStorage::kAuto && groups_fit) plan.blocks = c.file_blocks;
  plan.tiled = on_gpu && (in_blocks || !plan.blocks.empty());
  if (!in_blocks) return plan;
  for (const int64_t extent : {s.hidden, s.q, s.inner}) {
    if (extent % kBlockInputs == 0) continue;
    return Error{ErrorCode::kUnsupported,
                 "the model has matrices with rows of " + std::to_string(extent) +
                     " weights, and blocks hold " + std::to_string(kBlockInputs) +
                     "; use --weights bf16",
                 name};
  }
  const size_t outer = c.tie_word_embeddings ? 1 : 2;
  plan.blocks.assign(outer + 4 * static_cast<size_t>(c.num_layers),
                     storage == WeightStorage::kInt8 ? WeightBlocks::kInt8 : WeightBlocks::kQ4);
  std::fill_n(plan.blocks.begin(), outer, WeightBlocks::kInt8);
  return plan;
}

Status check_tensors(const ModelConfig& config, const TensorFiles& files) {
  for (const auto& [name, shape] : expected_tensors(config)) {
    Status found = files.check(name, shape);
    if (!found && name == kHead && found.error().code == ErrorCode::kBadFile &&
        !files.contains(name)) {
      Error error = std::move(found).error();
      error.message +=
          "; config.json says that the head is not the embedding: if it is, set "
          "\"tie_word_embeddings\" to true there, if not, download all weights";
      return error;
    }
    CLO_TRY(std::move(found));
  }
  return Ok{};
}

int64_t matrix_bytes(const WeightView& m) {
  return m.tiled ? tiled_bytes(m.blocks, m.num_rows, m.num_cols)
                 : weight_bytes(m.blocks, m.type, m.num_rows, m.num_cols);
}

int64_t Weights::required_bytes(const ModelConfig& c, const WeightPlan& plan) {
  const Sizes s = sizes_of(c);
  int64_t total = 0;
  size_t next = 0;
  const auto matrix = [&](int64_t rows, int64_t cols) {
    const WeightBlocks blocks = plan.blocks.empty() ? WeightBlocks::kNone : plan.blocks[next++];
    const bool tiled = plan.tiled && blocks != WeightBlocks::kNone;
    total +=
        round_up(matrix_bytes({nullptr, plan.type, rows, cols, blocks, tiled}), Arena::kAlignment);
  };
  const auto vector = [&](int64_t length) {
    total += round_up(length * int64_t{sizeof(float)}, Arena::kAlignment);
  };
  matrix(c.vocab_size, s.hidden);
  if (!c.tie_word_embeddings) matrix(c.vocab_size, s.hidden);
  vector(s.hidden);
  for (int64_t l = 0; l < c.num_layers; ++l) {
    vector(s.hidden);
    vector(s.hidden);
    matrix(s.q + 2 * s.kv, s.hidden);
    matrix(s.hidden, s.q);
    matrix(2 * s.inner, s.hidden);
    matrix(s.hidden, s.inner);
    if (c.attention_bias) vector(s.q + 2 * s.kv);
    if (c.output_bias) vector(s.hidden);
    if (c.mlp_bias) {
      vector(2 * s.inner);
      vector(s.hidden);
    }
    if (c.qk_norm) {
      vector(c.head_dim);
      vector(c.head_dim);
    }
  }
  return total;
}

template <typename Source>
Status Weights::take_all(Source& source) {
  const ModelConfig& c = config_;
  const Sizes s = sizes_of(c);
  CLO_ASSIGN(embedding_, source.matrix({{"model.embed_tokens.weight", c.vocab_size}}, s.hidden));
  head_ = embedding_;
  if (!c.tie_word_embeddings) {
    CLO_ASSIGN(head_, source.matrix({{kHead, c.vocab_size}}, s.hidden));
  }
  CLO_ASSIGN(final_norm_, source.vector({{"model.norm.weight", s.hidden}}));
  for (int64_t l = 0; l < c.num_layers; ++l) {
    const std::string layer = "model.layers." + std::to_string(l) + ".";
    const std::string attention = layer + "self_attn.", mlp = layer + "mlp.";
    LayerWeights& out = layers_.emplace_back();
    CLO_ASSIGN(out.input_norm, source.vector({{layer + "input_layernorm.weight", s.hidden}}));
    CLO_ASSIGN(out.mlp_norm,
               source.vector({{layer + "post_attention_layernorm.weight", s.hidden}}));
    CLO_ASSIGN(out.qkv, source.matrix({{attention + "q_proj.weight", s.q},
                                       {attention + "k_proj.weight", s.kv},
                                       {attention + "v_proj.weight", s.kv}},
                                      s.hidden));
    CLO_ASSIGN(out.output, source.matrix({{attention + "o_proj.weight", s.hidden}}, s.q));
    CLO_ASSIGN(out.gate_up, source.matrix({{mlp + "gate_proj.weight", s.inner},
                                           {mlp + "up_proj.weight", s.inner}},
                                          s.hidden));
    CLO_ASSIGN(out.down, source.matrix({{mlp + "down_proj.weight", s.hidden}}, s.inner));
    if (c.attention_bias) {
      CLO_ASSIGN(out.qkv_bias, source.vector({{attention + "q_proj.bias", s.q},
                                              {attention + "k_proj.bias", s.kv},
                                              {attention + "v_proj.bias", s.kv}}));
    }
    if (c.output_bias) {
      CLO_ASSIGN(out.output_bias, source.vector({{attention + "o_proj.bias", s.hidden}}));
    }
    if (c.mlp_bias) {
      CLO_ASSIGN(out.gate_up_bias, source.vector({{mlp + "gate_proj.bias", s.inner},
                                                  {mlp + "up_proj.bias", s.inner}}));
      CLO_ASSIGN(out.down_bias, source.vector({{mlp + "down_proj.bias", s.hidden}}));
    }
    if (c.qk_norm) {
      CLO_ASSIGN(out.q_norm, source.vector({{attention + "q_norm.weight", c.head_dim}}));
      CLO_ASSIGN(out.k_norm, source.vector({{attention + "k_norm.weight", c.head_dim}}));
    }
  }
  return Ok{};
}

Result<Weights> Weights::load(const ModelConfig& config, const TensorFiles& files,
                              const WeightPlan& plan, Arena& arena, int num_threads,
                              const WeightUpload& upload) {
  CLO_TRY(check_tensors(config, files));  // before gigabytes are copied
  const int64_t before = arena.used_bytes();
  Weights w(config, plan.type);
  Loader loader(files, plan, arena, num_threads, upload);
  CLO_TRY(w.take_all(loader));
  w.bytes_ = arena.used_bytes() - before;
  return w;
}

Result<Weights> Weights::make(const ModelConfig& config, const WeightPlan& plan, Arena& arena,
                              const Fill& fill) {
  const int64_t before = arena.used_bytes();
  Weights w(config, plan.type);
  Maker maker{plan, arena, fill};
  CLO_TRY(w.take_all(maker));
  w.bytes_ = arena.used_bytes() - before;
  return w;
}

}  // namespace clo
