#pragma once
// The places that keep token rows, twice: on the device, and as the CPU backend fills them.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <ostream>
#include <tuple>

#include "kernels/decode_tables.h"
#include "kernels/gpu_test.h"
#include "kernels/rows/offsets.h"
#include "reference/cpu_ops.h"
#include "select/hash_signs.h"

namespace clo::kernels {
inline namespace rows_places {  // other tests have places of their own

inline constexpr int32_t kLayer = 1, kLayers = 2;

// Memory of the device with its expected content on the host, both 0xCB where nothing is written.
struct Mirror {
  explicit Mirror(int64_t bytes)
      : device(bytes), host(static_cast<size_t>(bytes), std::byte{0xCB}) {}
  DeviceArray<std::byte> device;
  std::vector<std::byte> host;
};

inline int ordered(uint16_t bits) { return (bits & 0x8000u) != 0 ? -(bits & 0x7FFF) : bits; }

inline float value_of(DType type, uint16_t bits) {
  return type == DType::kBF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

inline void expect_rows(std::span<const std::byte> got, std::span<const std::byte> want, int steps,
                        const char* what, DType type) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i + 1 < got.size(); i += 2) {
    uint16_t a = 0, b = 0;
    std::memcpy(&a, got.data() + i, 2);
    std::memcpy(&b, want.data() + i, 2);
    // Where a rotation's products cancel, a last bit of theirs is many steps of the difference.
    if (steps > 0 && std::abs(value_of(type, a) - value_of(type, b)) < 1e-5f) continue;
    ASSERT_LE(std::abs(ordered(a) - ordered(b)), steps) << what << ", element " << i / 2;
  }
}

struct Case {
  int head_dim = 128, group = 4, kv_heads = 8;
  bool norm = false, bias = false;
  int splits = 1;
  int code_bits = 128;
  bool trained = false;
  DType type = DType::kBF16;
  RowFormat stored = RowFormat::kFull;
};

inline std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "head_dim " << c.head_dim << " group " << c.group << " kv heads " << c.kv_heads
             << " norm " << c.norm << " bias " << c.bias << " splits " << c.splits << " bits "
             << c.code_bits << " trained " << c.trained << " " << dtype_name(c.type) << " format "
             << static_cast<int>(c.stored);
}

// The constants and the places of a model of one shape; sequences are added with their tokens.
class Places {
 public:
  static constexpr int32_t kSink = 4, kRing = 24;

  Places(const Case& c, int64_t num_pages)
      : c_(c),
        shape_{kLayers, c.kv_heads * c.group, c.kv_heads, c.head_dim,
               c.type,  c.code_bits,          c.stored},
        layout_{shape_, num_pages},
        signs_(shape_, kHashSeed),
        host_rows(layout_.rows_bytes()),
        want_rows(static_cast<size_t>(layout_.rows_bytes()), std::byte{0xCB}),
        host_codes(std::max<int64_t>(layout_.codes_bytes(), 8)),
        want_codes(host_codes.span().size(), std::byte{0xCB}) {
    const std::vector<float> weights =
        random_floats(kLayers * c.kv_heads * hash_weight_count(c.head_dim, c.code_bits), 7);
    weights_host_ = weights;
    weights_ = std::make_unique<DeviceArray<float>>(weights);
    std::vector<HashParams> device_hashes;
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      for (int32_t h = 0; h < c.kv_heads; ++h) {
        HashParams params = signs_.params(layer, h);
        const int64_t at =
            (int64_t{layer} * c.kv_heads + h) * hash_weight_count(c.head_dim, c.code_bits);
        if (c.trained) params.weights = weights_host_.data() + at;
        hashes_host.push_back(params);
        const int64_t sign_words =
            2 * (params.width / 32) * ((c.code_bits + params.width - 1) / params.width);
        sign_words_.push_back(std::make_unique<DeviceArray<uint32_t>>(
            std::span<const uint32_t>(params.signs, static_cast<size_t>(sign_words))));
        params.signs = sign_words_.back()->data();
        if (c.trained) params.weights = weights_->data() + at;
        device_hashes.push_back(params);
      }
    }
    hashes = std::make_unique<DeviceArray<HashParams>>(device_hashes);
    for (int64_t p = 0; p < num_pages; ++p)
      free_pages_.push_back(static_cast<int32_t>(num_pages - 1 - p));
  }

  struct Sequence {
    std::vector<int32_t> pages;
    std::unique_ptr<DeviceArray<int32_t>> device_pages;
    std::vector<std::unique_ptr<DeviceArray<uint64_t>>> blocks;
    std::unique_ptr<DeviceArray<uint64_t*>> device_blocks;
    std::vector<HeadCacheView> views, device_views;  // [KV heads] of kLayer
    std::vector<std::unique_ptr<Mirror>> memory;
    std::vector<std::byte*> page_rows;  // of the expected store
    int64_t capacity = 0;
  };

  // A sequence of up to `capacity` tokens; odd heads are resident.
  Sequence& add(int64_t capacity) {
    Sequence& s = *sequences.emplace_back(std::make_unique<Sequence>());
    s.capacity = capacity;
    std::vector<uint64_t*> blocks;
    for (int64_t p = 0; p < (capacity + kPageTokens - 1) / kPageTokens; ++p) {
      s.pages.push_back(free_pages_.back());
      free_pages_.pop_back();
      s.blocks.push_back(std::make_unique<DeviceArray<uint64_t>>(block_words()));
      blocks.push_back(s.blocks.back()->data());
      s.page_rows.push_back(want_rows.data() + layout_.row_offset(kLayer, s.pages.back(), 0, 0));
    }
    s.device_pages = std::make_unique<DeviceArray<int32_t>>(s.pages);
    s.device_blocks = std::make_unique<DeviceArray<uint64_t*>>(blocks);
    const int64_t row = shape_.row_bytes(), stored = shape_.stored_row_bytes();
    for (int32_t h = 0; h < c_.kv_heads; ++h) {
      HeadCacheView view, device;
      view.sink_tokens = kSink;
      view.ring_tokens = kRing;
      view.capacity_tokens = capacity;
      device = view;
      const auto place = [&](int64_t bytes, std::byte*& host, std::byte*& on_device) {
        Mirror& m = *s.memory.emplace_back(std::make_unique<Mirror>(bytes));
        host = m.host.data();
        on_device = m.device.data();
      };
      if (h % 2 == 1) place(capacity * stored, view.resident, device.resident);
      if (h % 2 == 0 || shape_.compressed()) {
        place(kSink * row, view.sink, device.sink);
        place(kRing * row, view.ring, device.ring);
      }
      states_.push_back(std::make_unique<DeviceArray<HeadState>>(std::vector<HeadState>(1)));
      labels_.push_back(std::make_unique<DeviceArray<float>>(int64_t{c_.group} * c_.head_dim));
      device.state = states_.back()->data();
      device.label = labels_.back()->data();
      s.views.push_back(view);
      s.device_views.push_back(device);
    }
    return s;
  }
  int64_t block_words() const {
    return int64_t{kLayers} * c_.kv_heads * kPageTokens * shape_.code_words();
  }

  // What the CPU writes for rows at [first, first + tokens) of a sequence; keys already rotated.
  void expect_append(CpuOps& ops, Sequence& s, int64_t first, int64_t tokens, const float* keys,
                     const float* values, int64_t stride) {
    SequenceLayerView view;
    view.host_rows = s.page_rows.data();
    view.heads = s.views.data();
    AppendParams p;
    p.shape = shape_;
    p.sequences = &view;
    p.first_token = &first;
    p.keys = keys;
    p.values = values;
    p.row_stride = stride;
    p.num_sequences = 1;
    p.tokens_per_sequence = tokens;
    ops.append(p);
    for (int64_t t = first; t < first + tokens; ++t) {
      written.push_back({&s, t});
      for (int32_t h = 0; h < c_.kv_heads; ++h) {
        const float* key = keys + (t - first) * stride + h * c_.head_dim;
        full_keys[{&s, t, h}] =
            from_bits(c_.type, to_bits(c_.type, std::span(key, static_cast<size_t>(c_.head_dim))));
      }
    }
  }

  // Every place holds what the CPU wrote, and nothing else was touched.
  void check_rows(int steps) {
    expect_rows(host_rows.span(), want_rows, steps, "host rows", c_.type);
    for (const auto& s : sequences) {
      for (const auto& m : s->memory)
        expect_rows(m->device.download(), m->host, steps, "head cache", c_.type);
    }
  }
  // Codes in both places are those of the keys in the host store.
  void check_codes(bool in_blocks, bool in_store) {
    const int words = shape_.code_words();
    std::vector<float> scratch(static_cast<size_t>(c_.head_dim)), key(scratch.size());
    for (const auto& s : sequences) {
      std::vector<std::vector<uint64_t>> want(
          s->blocks.size(),
          std::vector<uint64_t>(static_cast<size_t>(block_words()), 0xCBCBCBCBCBCBCBCBu));
      for (const auto& [of, token] : written) {
        if (of != s.get()) continue;
        const auto page = static_cast<size_t>(token / kPageTokens);
        const auto slot = static_cast<int32_t>(token % kPageTokens);
        for (int32_t h = 0; h < c_.kv_heads; ++h) {
          const std::byte* row =
              host_rows.data() + layout_.row_offset(kLayer, s->pages[page], h, slot);
          if (shape_.compressed()) {
            key = full_keys.at({s.get(), token, h});
          } else {
            convert_to_f32(c_.type, row, key.data(), c_.head_dim);
          }
          std::vector<uint64_t> code(static_cast<size_t>(words));
          encode_row(simd_table(), hashes_host[static_cast<size_t>(kLayer * c_.kv_heads + h)],
                     key.data(), true, code.data(), scratch.data());
          if (in_blocks) {
            std::copy(code.begin(), code.end(),
                      want[page].begin() + block_code_index(c_.kv_heads, kLayer, h, slot) * words);
          }
          if (in_store) {
            std::memcpy(want_codes.data() + layout_.code_offset(kLayer, s->pages[page], h, slot),
                        code.data(), code.size() * 8);
          }
        }
      }
      for (size_t p = 0; p < want.size(); ++p) ASSERT_EQ(s->blocks[p]->download(), want[p]);
    }
    ASSERT_TRUE(std::equal(want_codes.begin(), want_codes.end(), host_codes.data()));
  }

  Case c_;
  KvShape shape_;
  HostLayout layout_;
  HashSigns signs_;
  PinnedArray<std::byte> host_rows;
  std::vector<std::byte> want_rows;
  PinnedArray<std::byte> host_codes;
  std::vector<std::byte> want_codes;
  std::vector<HashParams> hashes_host;
  std::unique_ptr<DeviceArray<HashParams>> hashes;
  std::vector<std::unique_ptr<Sequence>> sequences;
  std::vector<std::pair<const Sequence*, int64_t>> written;
  // Keys as the full rows have them, which codes are made of.
  std::map<std::tuple<const Sequence*, int64_t, int32_t>, std::vector<float>> full_keys;

 private:
  std::vector<std::unique_ptr<DeviceArray<HeadState>>> states_;
  std::vector<std::unique_ptr<DeviceArray<float>>> labels_;
  std::vector<float> weights_host_;
  std::unique_ptr<DeviceArray<float>> weights_;
  std::vector<std::unique_ptr<DeviceArray<uint32_t>>> sign_words_;
  std::vector<int32_t> free_pages_;
};

}  // namespace rows_places
}  // namespace clo::kernels
