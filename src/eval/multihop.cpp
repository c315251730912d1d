// Multi-hop questions whose evidence is adjacent or separated: each is made once and rendered with
// its documents at every set of places, in the order of the hops and in reverse.
#include <algorithm>
#include <array>

#include "eval/suites.h"
#include "eval/world.h"

namespace clo {

namespace {

constexpr int64_t kDocuments = 20;  // of the published places; more scale them

struct Layout {
  bool adjacent;
  std::vector<int64_t> places;
};

const std::vector<Layout>& layouts(int hops) {
  static const std::array<std::vector<Layout>, 3> kLayouts = {{
      {{true, {0, 1}},
       {true, {4, 5}},
       {true, {9, 10}},
       {true, {14, 15}},
       {true, {18, 19}},
       {false, {0, 4}},
       {false, {4, 9}},
       {false, {9, 14}},
       {false, {14, 19}}},
      {{true, {0, 1, 2}},
       {true, {4, 5, 6}},
       {true, {9, 10, 11}},
       {true, {14, 15, 16}},
       {true, {17, 18, 19}},
       {false, {0, 4, 9}},
       {false, {4, 9, 14}},
       {false, {9, 14, 19}}},
      {{true, {0, 1, 2, 3}},
       {true, {4, 5, 6, 7}},
       {true, {9, 10, 11, 12}},
       {true, {14, 15, 16, 17}},
       {true, {16, 17, 18, 19}},
       {false, {0, 2, 4, 6}},
       {false, {4, 6, 8, 10}},
       {false, {9, 11, 13, 15}},
       {false, {13, 15, 17, 19}}},
  }};
  return kLayouts[static_cast<size_t>(hops - 2)];
}

int hops_of(const std::string& task) { return task[0] - '0'; }

// The published place among `documents`: adjacent ones stay adjacent, from the first on.
std::vector<int64_t> scaled(const Layout& layout, int64_t documents) {
  std::vector<int64_t> places;
  const auto scale = [&](int64_t place) { return place * (documents - 1) / (kDocuments - 1); };
  for (size_t i = 0; i < layout.places.size(); ++i) {
    if (!layout.adjacent) {
      places.push_back(scale(layout.places[i]));
      continue;
    }
    // The middle of the run keeps its share of the context, and the run stays inside.
    const auto width = std::ssize(layout.places);
    const int64_t last_first = documents - width;
    const int64_t first = layout.places.front() * last_first / (kDocuments - width);
    places.push_back(first + static_cast<int64_t>(i));
  }
  return places;
}

}  // namespace

int64_t num_multihop_renders(const std::string& task) {
  return 2 * std::ssize(layouts(hops_of(task)));
}

Result<EvalItem> make_multihop(const SuiteRequest& request) {
  const int hops = hops_of(request.task);
  const int64_t renders = num_multihop_renders(request.task);
  const int64_t world_index = request.index / renders;
  const int64_t render = request.index % renders;
  const Layout& layout = layouts(hops)[static_cast<size_t>(render / 2)];
  const bool reversed = render % 2 == 1;
  // All renders of a world are one item as far as chance goes.
  const uint64_t seed =
      item_seed(request.suite, request.task, request.context, world_index, request.seed);
  return request.fit(
      [&](int64_t documents) {
        EvalItem item = request.start();
        item.seed = seed;
        ItemRandom random(seed);
        const WorldItem world = make_world_item(hops, documents - hops, random);
        std::vector<int64_t> places = scaled(layout, documents);
        if (reversed) places = {places.rbegin(), places.rend()};
        append_documents(item, place_documents(world, places));
        const std::string material = item.text;
        item.text = "Answer the question from the documents below.\n\n";
        for (TextSpan& span : item.gold) {
          span.begin += item.text.size();
          span.end += item.text.size();
        }
        item.question = world.question;
        item.recite = item.text + material +
                      "Quote, word for word, every sentence of the documents that is needed to "
                      "answer this question: " +
                      world.question;
        item.text += material + "Question: " + world.question + " Answer with the number alone.";
        item.question += " Answer with the number alone.";
        item.answers = {world.answer};
        item.metric = Metric::kSubspan;
        item.max_new_tokens = 64;
        item.numbers["hops"] = hops;
        item.numbers["world"] = static_cast<double>(world_index);
        item.numbers["documents"] = static_cast<double>(documents);
        const auto [first, last] = std::minmax_element(places.begin(), places.end());
        item.numbers["distance"] = static_cast<double>(*last - *first);
        // How far the least visible document is from the nearer end, as a share of the context.
        double worst = 0;
        for (const int64_t place : places) {
          const double at = static_cast<double>(place) / static_cast<double>(documents - 1);
          worst = std::max(worst, std::min(at, 1 - at));
        }
        item.numbers["worst_place"] = worst;
        item.numbers["depth"] =
            static_cast<double>(*first + *last) / static_cast<double>(2 * (documents - 1));
        item.labels["layout"] = layout.adjacent ? "adjacent" : "separated";
        item.labels["order"] = reversed ? "reversed" : "forward";
        std::string at;
        for (const int64_t place : layout.places)
          at += (at.empty() ? "" : "-") + std::to_string(place);
        item.labels["places"] = at;
        return item;
      },
      kDocuments);
}

}  // namespace clo
