// Engine::load: from a model directory to everything that a request needs.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include "base/thread_pool.h"
#include "base/try.h"
#include "base/units.h"
#include "engine/checks.h"
#include "engine/impl.h"
#include "engine/memory.h"
#include "kv/memory_plan.h"
#include "profile/profile_file.h"

namespace clo {

namespace {

// What the root key of the prefix cache must tell apart, as one text.
std::string store_identity(const std::filesystem::path& dir, const ModelConfig& config,
                           const KvShape& shape, const std::string& profile) {
  return dir.string() + "|" + model_fingerprint(config) + "|" +
         std::string(dtype_name(shape.type)) + "|" + std::to_string(shape.code_bits) + "|" +
         std::to_string(kHashSeed) + "|" + profile;
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::load(const EngineOptions& options) {
  CLO_TRY(check_options(options));
  CLO_ASSIGN(const std::filesystem::path dir, resolve_model_dir(options.model_dir));
  CLO_ASSIGN(ModelConfig config, load_model_config(dir));
  CLO_TRY(check_context(options, config));
  auto impl = std::make_unique<Impl>(options, std::move(config));
  CLO_TRY(impl->build(dir));
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Status Engine::Impl::build(const std::filesystem::path& dir) {
  if (options.require_tokenizer || std::filesystem::exists(dir / "tokenizer.json")) {
    CLO_ASSIGN(tokenizer, Tokenizer::load(dir));
  }
  CLO_ASSIGN(chat_template, ChatTemplate::load(dir));
  CLO_ASSIGN(generation, load_generation_config(dir, config));
  CLO_ASSIGN(const TensorFiles files, TensorFiles::open(dir));

  CLO_ASSIGN(shape, kv_shape(config, options));
  CLO_TRY(check_policy(options.policy, shape));
  if (tokenizer) CLO_TRY(check_vocabulary(*tokenizer, config, dir));
  max_context = clo::max_context_tokens(config, options);
  if (options.threads == 0) options.threads = num_processors();
  pool = std::make_unique<ThreadPool>(options.threads);
  ops = std::make_unique<CpuOps>(*pool);
  transfer = make_memcpy_engine(*pool);
  return build_memory(files);
}

Status Engine::Impl::build_memory(const TensorFiles& files) {
  const DType type = shape.type;
  const int64_t max_rows = clo::max_step_rows(config, options);
  const int64_t workspace_bytes = Transformer::workspace_bytes(config, max_rows, options.max_batch);

  // Budgets that are not given are what the batch could need at most: the arenas only reserve
  // addresses, and a page costs memory once it is written.
  // A request may bring another policy than the engine's, so codes are counted in any case.
  const auto most = [&](const PolicyOptions& policy) {
    PlanInput input = plan_input(policy, max_context, options.max_batch);
    input.device_codes = true;
    return sketch_memory(input).device_bytes;
  };
  int64_t device_bytes = options.device_memory_bytes;
  if (device_bytes == 0) {
    device_bytes =
        std::max(most(*preset("dense")), most(options.policy)) +
        // Each sequence's blocks are rounded to the arena's alignment.
        options.max_batch * (divide_up(max_context, kPageTokens) + 2) * Arena::kAlignment;
  } else if (device_bytes < workspace_bytes + Weights::required_bytes(config, type)) {
    return Error{ErrorCode::kDeviceMemory,
                 "the device budget is " + format_bytes(device_bytes) + "; weights (" +
                     format_bytes(Weights::required_bytes(config, type)) + ") and workspace (" +
                     format_bytes(workspace_bytes) + ") alone need " +
                     std::to_string(workspace_bytes + Weights::required_bytes(config, type)) +
                     " bytes; raise --device-memory or lower --prefill-chunk",
                 "--device-memory"};
  }
  CLO_ASSIGN(Arena arena, Arena::create("device", device_bytes, ErrorCode::kDeviceMemory));
  device = std::make_unique<Arena>(std::move(arena));

  int64_t host_bytes = options.host_memory_bytes;
  if (host_bytes == 0) {
    // Twice the batch, so that prefixes of finished requests have a place, but never more than
    // the system can give.
    PlanInput with_host = plan_input(options.policy, max_context, options.max_batch);
    with_host.host_copy = true;
    host_bytes = std::min(2 * sketch_memory(with_host).host_bytes, available_host_bytes() / 10 * 8);
  }
  // Codes in the host store are for sequences that share its pages later.
  KvShape store_shape = shape;
  if (!options.keep_prefixes) store_shape.code_bits = 0;
  CLO_ASSIGN(HostStore made, HostStore::create(store_shape, host_bytes));
  store = std::make_unique<HostStore>(std::move(made));
  if (store_shape.code_bits > 0) codes = std::make_unique<CodeCache>(*store, *device);
  system = std::make_unique<KvSystem>(KvSystem{
      shape, *ops, *transfer, *device, store.get(), codes.get(), {}, {}, {}, false, false});
  system->guard_host_rows = options.guard_host_rows;
  if (!options.profile.empty()) {
    CLO_ASSIGN(system->profile, load_profile(options.profile, config, shape.code_bits));
  }
  if (shape.code_bits > 0) {
    signs = std::make_unique<HashSigns>(shape, kHashSeed);
    for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
      for (int32_t head = 0; head < shape.num_kv_heads; ++head) {
        HashParams hash = signs->params(layer, head);
        if (!system->profile.hash_weights.empty()) {
          hash.weights =
              system->profile.hash_weights.data() +
              (int64_t{layer} * shape.num_kv_heads + head) * shape.head_dim * shape.code_bits;
        }
        system->hashes.push_back(hash);
      }
    }
  }
  const std::string identity = store_identity(options.model_dir, config, shape, options.profile);
  std::vector<int32_t> identity_words(identity.begin(), identity.end());
  system->root_key = page_key({}, identity_words);

  CLO_ASSIGN(Weights loaded, Weights::load(config, files, type, *device));
  weights = std::make_unique<Weights>(std::move(loaded));
  attention =
      std::make_unique<Attention>(*system, 1.0f / std::sqrt(static_cast<float>(config.head_dim)));
  CLO_ASSIGN(Transformer transformer,
             Transformer::create(*weights, *ops, *attention, *device, max_rows, options.max_batch));
  model = std::make_unique<Transformer>(std::move(transformer));
  return Ok{};
}

}  // namespace clo
