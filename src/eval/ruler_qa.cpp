// Stand-ins for RULER's two question sets over documents, from the invented world: one hop for
// SQuAD's paragraphs, two for HotpotQA's.
#include "eval/suites.h"
#include "eval/world.h"

namespace clo {

Result<EvalItem> make_ruler_qa(const SuiteRequest& request) {
  const int hops = request.task == "qa_syn_1" ? 1 : 2;
  return request.fit([&](int64_t distractors) {
    EvalItem item = request.start();
    ItemRandom random(item.seed);
    const uint64_t order = random.next();
    const WorldItem world = make_world_item(hops, distractors, random);
    ItemRandom place(order);
    std::vector<int64_t> places = distinct_below(hops, hops + distractors, place);
    shuffle(places, place);
    item.text = "Answer the question from the documents, with the answer alone.\n\n";
    append_documents(item, place_documents(world, places));
    item.text += "Question: " + world.question;
    item.answer_prefix = "Answer:";
    item.answers = {world.answer, world.answer.substr(0, 2) + "," + world.answer.substr(2)};
    item.metric = Metric::kMatchPart;
    item.max_new_tokens = 32;
    item.numbers["hops"] = hops;
    return item;
  });
}

}  // namespace clo
