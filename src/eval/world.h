#pragma once
// An invented world of people, towns, companies and works, told in short documents: questions over
// it need one document for each hop, and nothing about it can be known beforehand.
#include <cstdint>
#include <string>
#include <vector>

#include "eval/item.h"
#include "eval/prose.h"
#include "eval/random.h"

namespace clo {

struct WorldDocument {
  std::string title;
  std::string text;  // sentences about the title's entity
  TextSpan fact;     // of a gold document: the sentence in `text` that a hop needs
  bool gold = false;
};

struct WorldItem {
  std::string question;
  std::string answer;               // a number, in exactly one document
  std::vector<WorldDocument> gold;  // in the order of the hops
  std::vector<WorldDocument> distractors;
};

// A question of `hops` hops with as many distractors as asked. Distractors, from the front: facts
// of the question's own kinds about others, documents that mention an entity of the chain in
// passing, then others; shuffled. Fewer distractors are a part of more.
// Requires: hops 1 to 4.
WorldItem make_world_item(int hops, int64_t num_distractors, ItemRandom& random);

// Gold document g at index places[g], distractors in order at the others. Requires: different
// places below the number of documents.
std::vector<WorldDocument> place_documents(const WorldItem& item,
                                           const std::vector<int64_t>& places);
// Appends "Document 1 (Title)" and the text of each, a line apart; facts of gold documents become
// the item's evidence.
void append_documents(EvalItem& item, const std::vector<WorldDocument>& documents);

}  // namespace clo
