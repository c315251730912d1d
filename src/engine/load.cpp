// Engine::load: from a model directory to everything that a request needs.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <stdexcept>

#include "base/thread_pool.h"
#include "base/try.h"
#include "base/units.h"
#include "engine/backend.h"
#include "engine/checks.h"
#include "engine/impl.h"
#include "engine/memory.h"
#include "io/model_files.h"
#include "kv/memory_plan.h"
#include "profile/profile_file.h"
#include "text/gguf_tokenizer.h"

namespace clo {

namespace {

// What the root key of the prefix cache must tell apart, as one text.
std::string store_identity(const std::filesystem::path& dir, const ModelConfig& config,
                           const KvShape& shape, const std::string& profile) {
  return dir.string() + "|" + model_fingerprint(config) + "|" +
         std::string(dtype_name(shape.type)) + "|" + std::string(kv_type_name(shape)) + "|" +
         std::to_string(shape.code_bits) + "|" + std::to_string(kHashSeed) + "|" + profile;
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::load(const EngineOptions& options) {
  CLO_TRY(check_options(options));
  CLO_ASSIGN(const ModelFiles model, ModelFiles::find(options.model_dir));
  CLO_ASSIGN(ModelConfig config, model.config());
  CLO_TRY(check_context(options, config));
  auto impl = std::make_unique<Impl>(options, std::move(config));
  try {
    CLO_TRY(impl->build(model));
  } catch (const std::runtime_error& error) {
    // What a device call throws; see device/cuda_error.h.
    return Error{ErrorCode::kDeviceFault, error.what(), "--backend"};
  }
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Status Engine::Impl::build(const ModelFiles& model) {
  const std::filesystem::path& dir = model.path();
  const bool has_tokenizer = model.gguf() ? gguf_has_tokenizer(*model.gguf())
                                          : std::filesystem::exists(dir / "tokenizer.json");
  if (options.require_tokenizer || has_tokenizer) {
    CLO_ASSIGN(tokenizer, Tokenizer::load(model));
  }
  CLO_ASSIGN(chat_template, ChatTemplate::load(model));
  CLO_ASSIGN(generation, load_generation_config(dir, config));
  CLO_ASSIGN(const TensorFiles files, TensorFiles::open(model));

  CLO_ASSIGN(const BackendChoice choice, choose_backend(config, options));
  options.backend = choice.backend;
  if (options.observer != nullptr && options.observer->watches_decode() &&
      options.backend != Backend::kCpu) {
    return Error{ErrorCode::kUnsupported,
                 "decode steps are observed on the CPU backend only; use --backend cpu",
                 "--backend"};
  }
  shape = kv_shape(config, options);
  backend_note = choice.note;
  CLO_TRY(check_policy(options.policy, shape));
  if (tokenizer) CLO_TRY(check_vocabulary(*tokenizer, config, dir));
  max_context = clo::max_context_tokens(config, options);
  if (options.threads == 0) options.threads = num_processors();
  return build_memory(files);
}

Status Engine::Impl::build_memory(const TensorFiles& files) {
  if (options.backend == Backend::kCuda) {
    constexpr int64_t kMaxVocabulary = int64_t{1} << 19;  // of the sampling kernels
    if (config.vocab_size > kMaxVocabulary) {
      return Error{ErrorCode::kUnsupported,
                   "the CUDA backend takes vocabularies of up to " +
                       std::to_string(kMaxVocabulary) + " tokens, the model has " +
                       std::to_string(config.vocab_size) + "; use --backend cpu",
                   "--backend"};
    }
    CLO_ASSIGN(cuda, CudaBackend::create(options.threads));
  } else {
    pool = std::make_unique<ThreadPool>(options.threads);
    ops = std::make_unique<CpuOps>(*pool);
    memcpy_engine = make_memcpy_engine(*pool);
  }
  CLO_TRY(make_host_store());  // first: that the device maps it costs device memory
  CLO_TRY(take_device_memory());
  CLO_TRY(make_kv_system());
  return make_runner(files);
}

Status Engine::Impl::take_device_memory() {
  options.prefill_chunk = resolve_prefill_chunk(config, options, shape, cuda.get());
  const int64_t weight_bytes = clo::weight_bytes(config, options);
  const int64_t workspace_bytes = step_workspace_bytes(config, options, shape);
  const int64_t overhead_bytes = cuda ? cuda->overhead_bytes() : 0;

  // A budget that is not given is what the batch could need at most. On the CPU an arena only
  // reserves addresses; a device gives what it has free, less a margin for others. A request may
  // bring another policy than the engine's, so codes are counted in any case.
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
    if (cuda) {
      device_bytes = std::min(device_bytes, cuda->free_bytes() / 100 * 97 + overhead_bytes);
      options.device_memory_bytes = device_bytes;
    }
  }
  if (device_bytes < workspace_bytes + weight_bytes + overhead_bytes) {
    return Error{
        ErrorCode::kDeviceMemory,
        "the device budget is " + format_bytes(device_bytes) + "; weights (" +
            format_bytes(weight_bytes) + ") and workspace (" + format_bytes(workspace_bytes) + ")" +
            (overhead_bytes > 0 ? " and the CUDA context (" + format_bytes(overhead_bytes) + ")"
                                : "") +
            " alone need " + std::to_string(workspace_bytes + weight_bytes + overhead_bytes) +
            " bytes; raise --device-memory or lower --prefill-chunk",
        "--device-memory"};
  }
  if (cuda) {
    CLO_TRY(cuda->take_arena(device_bytes));
    device = &cuda->arena();
    return Ok{};
  }
  CLO_ASSIGN(cpu_arena, Arena::create("device", device_bytes, ErrorCode::kDeviceMemory));
  device = &*cpu_arena;
  return Ok{};
}

Status Engine::Impl::make_host_store() {
  int64_t host_bytes = options.host_memory_bytes;
  if (host_bytes == 0) {
    PlanInput with_host = plan_input(options.policy, max_context, options.max_batch);
    with_host.host_copy = true;
    const int64_t batch_bytes = sketch_memory(with_host).host_bytes;
    // Twice the batch, so that prefixes of finished requests have a place, but never more than the
    // system can give. Pinned memory is taken at once and for good: the batch alone.
    host_bytes = cuda ? std::min(batch_bytes, available_host_bytes() / 10 * 6)
                      : std::min(2 * batch_bytes, available_host_bytes() / 10 * 8);
  }
  // Codes in the host store are for sequences that share its pages later.
  KvShape store_shape = shape;
  if (!options.keep_prefixes) store_shape.code_bits = 0;
  CLO_ASSIGN(HostStore made, HostStore::create(store_shape, host_bytes));
  store = std::make_unique<HostStore>(std::move(made));
  if (cuda) CLO_TRY(cuda->pin(*store));
  return Ok{};
}

Status Engine::Impl::make_kv_system() {
  TransferEngine& transfer = cuda ? cuda->transfer() : *memcpy_engine;
  if (store->layout().shape.code_bits > 0) {
    codes = std::make_unique<CodeCache>(
        *store, *device, [&transfer](void* target, const void* source, size_t num_bytes) {
          transfer.upload(static_cast<std::byte*>(target), source, static_cast<int64_t>(num_bytes));
        });
  }
  system = std::make_unique<KvSystem>(KvSystem{
      shape, ops.get(), transfer, *device, store.get(), codes.get(), {}, {}, {}, false, false});
  system->guard_host_rows = options.guard_host_rows;
  system->codes_pass_device = cuda != nullptr;
  system->observer = options.observer;
  if (!options.profile.empty()) {
    CLO_ASSIGN(system->profile, load_profile(options.profile, config, shape.code_bits));
  }
  if (shape.code_bits > 0) {
    signs = std::make_unique<HashSigns>(shape, kHashSeed);
    for (int32_t layer = 0; layer < shape.num_layers; ++layer) {
      for (int32_t head = 0; head < shape.num_kv_heads; ++head) {
        HashParams hash = signs->params(layer, head);
        if (!system->profile.hash_weights.empty()) {
          hash.weights = system->profile.hash_weights.data() +
                         (int64_t{layer} * shape.num_kv_heads + head) *
                             hash_weight_count(shape.head_dim, shape.code_bits);
        }
        system->hashes.push_back(hash);
      }
    }
  }
  const std::string identity = store_identity(options.model_dir, config, shape, options.profile);
  std::vector<int32_t> identity_words(identity.begin(), identity.end());
  system->root_key = page_key({}, identity_words);

  return Ok{};
}

Status Engine::Impl::make_runner(const TensorFiles& files) {
  WeightUpload upload = copy_weights;
  if (cuda) {
    upload = [this](std::byte* target, const void* source, int64_t num_bytes) {
      cuda->transfer().upload(target, source, num_bytes);
    };
  }
  CLO_ASSIGN(const WeightPlan plan, weight_plan(config, options));
  CLO_ASSIGN(Weights loaded, Weights::load(config, files, plan, *device, options.threads, upload));
  weights = std::make_unique<Weights>(std::move(loaded));
  if (cuda) {
    CLO_ASSIGN(runner, cuda->make_runner(*weights, *system, cuda_limits(config, options)));
    return Ok{};
  }
  attention =
      std::make_unique<Attention>(*system, 1.0f / std::sqrt(static_cast<float>(config.head_dim)));
  CLO_ASSIGN(Transformer transformer,
             Transformer::create(*weights, *ops, *attention, *device,
                                 max_step_rows(config, options), options.max_batch));
  runner = std::make_unique<Transformer>(std::move(transformer));
  return Ok{};
}

}  // namespace clo
