#include "text/gguf_pieces.h"

#include <cmath>

#include "base/try.h"
#include "base/utf8.h"
#include "text/gguf_values.h"

namespace clo {

namespace {

// How SentencePiece writes a space.
constexpr std::string_view kSpace = "\xE2\x96\x81";

// Kinds of pieces, as ggml numbers them.
enum class PieceType { kNormal = 1, kUnknown, kControl, kUserDefined, kUnused, kByte };

class Reader {
 public:
  explicit Reader(const GgufFile& file) : file_(file) {}

  Result<std::unique_ptr<TokenizerParts>> run() {
    parts_->kind = TokenizerParts::Kind::kPieces;
    CLO_TRY(refuse_normalizers());
    CLO_TRY(read_vocabulary());
    CLO_TRY(read_fallback());
    CLO_TRY(read_spaces());
    CLO_TRY(read_ends());
    CLO_TRY(build_finders(*parts_));
    return std::move(parts_);
  }

 private:
  Status refuse_normalizers() {
    if (gguf_has(file_, "tokenizer.ggml.precompiled_charsmap")) {
      return Error{ErrorCode::kUnsupported,
                   "\"tokenizer.ggml.precompiled_charsmap\": a vocabulary with a table of "
                   "replaced characters is not supported, one that takes text as it is is",
                   file_.where()};
    }
    const std::string key = "tokenizer.ggml.remove_extra_whitespaces";
    CLO_ASSIGN(const bool removes, gguf_flag(file_, key, false));
    if (!removes) return Ok{};
    return Error{ErrorCode::kUnsupported,
                 "\"" + key +
                     "\" is true, which is not supported; a vocabulary that keeps every "
                     "space is",
                 file_.where()};
  }

  Status read_vocabulary() {
    CLO_ASSIGN(texts_, gguf_list<std::string>(file_, "tokenizer.ggml.tokens"));
    CLO_ASSIGN(const auto* const scores, gguf_list<double>(file_, "tokenizer.ggml.scores"));
    CLO_ASSIGN(const auto* const types, gguf_list<int64_t>(file_, "tokenizer.ggml.token_type"));
    if (texts_->empty()) return bad_gguf(file_, "\"tokenizer.ggml.tokens\" is empty");
    if (scores->size() != texts_->size() || types->size() != texts_->size()) {
      return bad_gguf(file_, "has " + std::to_string(texts_->size()) + " tokens, " +
                                 std::to_string(scores->size()) + " scores and " +
                                 std::to_string(types->size()) + " token types");
    }
    parts_->tokens.resize(texts_->size());
    for (size_t id = 0; id < texts_->size(); ++id) {
      CLO_TRY(add_token(static_cast<int32_t>(id), (*texts_)[id], (*scores)[id], (*types)[id]));
    }
    return Ok{};
  }

  Status add_token(int32_t id, const std::string& text, double score, int64_t type) {
    const std::string what = "token " + std::to_string(id) + " of the tokenizer";
    if (text.empty() || text.size() > PieceMerger::kMaxPieceBytes) {
      return bad_gguf(file_, what + " has " + std::to_string(text.size()) +
                                 " bytes, expected 1 to " +
                                 std::to_string(PieceMerger::kMaxPieceBytes));
    }
    if (find_invalid_utf8(text) < text.size()) return bad_gguf(file_, what + " is not UTF-8");
    if (std::isnan(score)) return bad_gguf(file_, what + " has a score that is no number");
    if (!parts_->ids.emplace(text, id).second)
      return bad_gguf(file_, what + ", \"" + text + "\", occurs twice");
    TokenizerParts::Token& token = parts_->tokens[static_cast<size_t>(id)];
    token.present = token.in_model = true;
    token.bytes = replace_all(text, kSpace, " ");
    switch (type) {
      case static_cast<int64_t>(PieceType::kNormal):
      case static_cast<int64_t>(PieceType::kUnused):
        parts_->pieces.add(text, id, score, type == static_cast<int64_t>(PieceType::kNormal));
        return Ok{};
      case static_cast<int64_t>(PieceType::kUnknown):
        if (parts_->unknown < 0) parts_->unknown = id;
        [[fallthrough]];
      case static_cast<int64_t>(PieceType::kControl):
        token.special = true;
        parts_->added.push_back({.id = id, .content = text, .special = true});
        return Ok{};
      case static_cast<int64_t>(PieceType::kUserDefined):
        // Found in the text as given, where a space is a space.
        parts_->added.push_back({.id = id, .content = token.bytes});
        return Ok{};
      case static_cast<int64_t>(PieceType::kByte): {
        const int byte = byte_of_spelling(text);
        if (byte < 0 || byte_tokens_[static_cast<size_t>(byte)] >= 0) {
          return bad_gguf(file_, what +
                                     " is of type byte, expected one spelling such as <0x41> "
                                     "for each byte, found \"" +
                                     text + "\"");
        }
        byte_tokens_[static_cast<size_t>(byte)] = id;
        ++num_bytes_;
        token.bytes = std::string(1, static_cast<char>(byte));
        token.is_byte = true;
        return Ok{};
      }
      default:
        return bad_gguf(file_, what + " is of type " + std::to_string(type) +
                                   ", expected 1 (normal) to 6 (byte)");
    }
  }

  // What becomes of characters that are in no piece.
  Status read_fallback() {
    CLO_ASSIGN(const auto unknown,
               gguf_token_id(file_, "tokenizer.ggml.unknown_token_id", texts_->size()));
    if (unknown) parts_->unknown = *unknown;
    parts_->byte_fallback = num_bytes_ > 0;
    if (num_bytes_ == 256) {
      parts_->pieces.set_byte_tokens(byte_tokens_);
    } else if (num_bytes_ > 0) {
      return bad_gguf(file_, "has tokens for " + std::to_string(num_bytes_) +
                                 " of the 256 bytes, expected all or none");
    } else if (parts_->unknown < 0) {
      return bad_gguf(file_,
                      "has neither byte tokens nor an unknown token "
                      "(tokenizer.ggml.unknown_token_id): a character outside the vocabulary "
                      "could not be encoded");
    } else {
      parts_->pieces.set_unknown(parts_->unknown);
    }
    return Ok{};
  }

  Status read_spaces() {
    CLO_ASSIGN(const bool prefix, gguf_flag(file_, "tokenizer.ggml.add_space_prefix", true));
    if (prefix) {
      parts_->normalizer.push_back(
          {.kind = NormalizerStep::Kind::kPrepend, .content = std::string(kSpace)});
    }
    parts_->normalizer.push_back(
        {.kind = NormalizerStep::Kind::kReplace, .pattern = " ", .content = std::string(kSpace)});
    parts_->decode_rules = {.leading_spaces = prefix ? size_t{1} : size_t{0},
                            .replace_each_byte = true};
    return Ok{};
  }

  // BOS and EOS. Such files begin a text with BOS unless they say otherwise.
  Status read_ends() {
    CLO_TRY(read_end("bos", true, parts_->prefix));
    return read_end("eos", false, parts_->suffix);
  }
  Status read_end(const std::string& name, bool otherwise, std::vector<int32_t>& ids) {
    const std::string flag_key = "tokenizer.ggml.add_" + name + "_token";
    const std::string id_key = "tokenizer.ggml." + name + "_token_id";
    CLO_ASSIGN(const bool adds, gguf_flag(file_, flag_key, otherwise));
    if (!adds) return Ok{};
    CLO_ASSIGN(const auto id, gguf_token_id(file_, id_key, texts_->size()));
    if (!id) {
      return bad_gguf(file_, "metadata \"" + id_key + "\" is missing, but \"" + flag_key +
                                 "\" is " +
                                 (gguf_has(file_, flag_key) ? "true" : "absent, which means true"));
    }
    ids.push_back(*id);
    parts_->post_processor =
        (parts_->post_processor == "none" ? "" : parts_->post_processor + ", ") + "add_" + name +
        "_token " + (*texts_)[static_cast<size_t>(*id)];
    return Ok{};
  }

  const GgufFile& file_;
  const std::vector<std::string>* texts_ = nullptr;
  std::array<int32_t, 256> byte_tokens_ = [] {
    std::array<int32_t, 256> none;
    none.fill(-1);
    return none;
  }();
  int num_bytes_ = 0;
  std::unique_ptr<TokenizerParts> parts_ = std::make_unique<TokenizerParts>();
};

}  // namespace

Result<std::unique_ptr<TokenizerParts>> read_gguf_pieces(const GgufFile& file) {
  return Reader(file).run();
}

}  // namespace clo
