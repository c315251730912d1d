#include "eval/world.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "eval/words.h"

namespace clo {

namespace {

enum class Kind : uint8_t { kPerson, kTown, kCompany, kWork, kNumber };

// What links an entity to another, or to a number. In texts S is the subject and O the object; in
// `phrase` S is the noun phrase so far.
struct Relation {
  Kind from, to;
  std::string_view phrase;  // the object, from the subject
  std::string_view sentences[6];
};

constexpr Relation kRelations[] = {
    {Kind::kPerson,
     Kind::kTown,
     "the town where S was born",
     {"S was born in O.", "The birthplace of S is O.", "It was in O that S was born.",
      "S came into the world in O.", "O is the town where S was born.",
      "Born in O, S never forgot the place."}},
    {Kind::kPerson,
     Kind::kCompany,
     "the company founded by S",
     {"S founded O.", "The founder of O was S.", "It was S who founded O.",
      "S set up the company O.", "O was founded by S.",
      "The company O goes back to S, its founder."}},
    {Kind::kCompany,
     Kind::kTown,
     "the town where S is based",
     {"S is based in O.", "The head office of S is in O.", "S has its seat in O.",
      "O is the town where S is based.", "From its base in O, S sends its goods.",
      "The company S is run from O."}},
    {Kind::kWork,
     Kind::kPerson,
     "the person who made S",
     {"S was made by O.", "The maker of S was O.", "It was O who made S.", "O made S.",
      "S is the work of O.", "The work S came from the hands of O."}},
    {Kind::kTown,
     Kind::kTown,
     "the town twinned with S",
     {"S is twinned with O.", "The twin town of S is O.", "S and its twin town O exchange visits.",
      "O is the twin town of S.", "S chose O as its twin town.",
      "A sign at the gate of S names its twin town, O."}},
};

constexpr Relation kLeaves[] = {
    {Kind::kTown,
     Kind::kNumber,
     "the population of S",
     {"S has O inhabitants.", "The population of S is O.", "O people live in S.",
      "At the last count S had a population of O.", "S is home to O people.",
      "The number of inhabitants of S is O."}},
    {Kind::kCompany,
     Kind::kNumber,
     "the number of workers of S",
     {"S has O workers.", "The number of workers of S is O.", "O people work for S.",
      "At the last count S had O workers.", "S employs O people.",
      "The workers of S number O in all."}},
};

constexpr std::string_view kNeutral[] = {
    "Visitors often speak of S with a smile.",
    "A N stands on the old seal of S.",
    "In a letter S is called J and J.",
    "There is a song about S and a J N.",
    "Some say that S would be nothing without the J N.",
    "The name of S is carved into a J N.",
    "A J painting of S hangs beside the N.",
    "Every spring the N reminds people of S.",
    "The story of S is told to children beside a J N.",
    "Few things are as J as the N that belongs to S.",
};

// Puts the subject for S, the object for O, and words for J and N, each a word of its own.
std::string fill(std::string_view pattern, const std::string& subject, const std::string& object,
                 ItemRandom& random) {
  std::string out;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    const auto is_letter = [&](size_t at) {
      return at < pattern.size() && std::isalpha(static_cast<unsigned char>(pattern[at])) != 0;
    };
    const bool alone = (i == 0 || !is_letter(i - 1)) && !is_letter(i + 1);
    if (alone && c == 'S') {
      out += subject;
    } else if (alone && c == 'O') {
      out += object;
    } else if (alone && c == 'J') {
      out += pick(adjectives(), random);
    } else if (alone && c == 'N') {
      out += pick(nouns(), random);
    } else {
      out += c;
    }
  }
  return out;
}

class World {
 public:
  explicit World(ItemRandom& random) : random_(random) {}

  // A name of three syllables that shares no four letters with one of the chain, and is new.
  std::string new_name(bool of_chain) {
    constexpr std::string_view kConsonants = "bdfgklmnprstvz";
    constexpr std::string_view kVowels = "aeiou";
    for (;;) {
      std::string name;
      for (int s = 0; s < 3; ++s) {
        name += kConsonants[random_.below(kConsonants.size())];
        name += kVowels[random_.below(kVowels.size())];
      }
      if (random_.below(2) == 0) name += kConsonants[random_.below(kConsonants.size())];
      std::vector<std::string> grams;
      for (size_t i = 0; i + 4 <= name.size(); ++i) grams.push_back(name.substr(i, 4));
      if (std::any_of(grams.begin(), grams.end(),
                      [&](const std::string& gram) { return chain_grams_.contains(gram); })) {
        continue;
      }
      name[0] = static_cast<char>(name[0] - 'a' + 'A');
      if (!names_.insert(name).second) continue;
      if (of_chain) chain_grams_.insert(grams.begin(), grams.end());
      return name;
    }
  }

  // Five digits, new.
  std::string new_number() {
    for (;;) {
      std::string number = digits(random_, 5);
      if (numbers_.insert(number).second) return number;
    }
  }

  // Five to seven sentences about `subject` with `fact` at a random place.
  WorldDocument document(const std::string& subject, const std::string& fact, bool gold) {
    WorldDocument document;
    document.title = subject;
    document.gold = gold;
    std::vector<std::string_view> patterns(std::begin(kNeutral), std::end(kNeutral));
    shuffle(patterns, random_);
    patterns.resize(5 + random_.below(3));
    const size_t place = random_.below(patterns.size() + 1);
    for (size_t i = 0; i <= patterns.size(); ++i) {
      if (i > 0) document.text += ' ';
      if (i == place) {
        document.fact = append_span(document.text, fact);
        if (i < patterns.size()) document.text += ' ';
      }
      if (i < patterns.size()) document.text += fill(patterns[i], subject, "", random_);
    }
    return document;
  }

  std::string sentence(const Relation& relation, const std::string& subject,
                       const std::string& object) {
    return fill(relation.sentences[random_.below(std::size(relation.sentences))], subject, object,
                random_);
  }

  // Relations that lead from some entity to one with a number, then that number.
  std::vector<const Relation*> draw_chain(int hops) {
    for (;;) {
      std::vector<const Relation*> chain;
      for (int h = 1; h < hops; ++h) {
        const Relation& next = kRelations[random_.below(std::size(kRelations))];
        if (!chain.empty() && chain.back()->to != next.from) break;
        chain.push_back(&next);
      }
      if (std::ssize(chain) != hops - 1) continue;
      const Relation& leaf = kLeaves[random_.below(std::size(kLeaves))];
      if (!chain.empty() && chain.back()->to != leaf.from) continue;
      chain.push_back(&leaf);
      return chain;
    }
  }

  // The relation told of an entity outside the chain.
  WorldDocument other(const Relation& relation) {
    const std::string subject = new_name(false);
    const std::string object = relation.to == Kind::kNumber ? new_number() : new_name(false);
    return document(subject, sentence(relation, subject, object), false);
  }

  WorldDocument in_passing(const std::string& entity) {
    const std::string subject = new_name(false);
    return document(
        subject, fill("A friend of S once travelled to see O.", subject, entity, random_), false);
  }

 private:
  ItemRandom& random_;
  std::set<std::string> names_, numbers_, chain_grams_;
};

}  // namespace

WorldItem make_world_item(int hops, int64_t num_distractors, ItemRandom& random) {
  World world(random);
  WorldItem item;
  const std::vector<const Relation*> chain = world.draw_chain(hops);
  std::vector<std::string> entities;
  for (int h = 0; h < hops; ++h) entities.push_back(world.new_name(true));
  item.answer = world.new_number();
  std::string phrase = entities.front();
  for (size_t h = 0; h < chain.size(); ++h) {
    const std::string& object = h + 1 < entities.size() ? entities[h + 1] : item.answer;
    item.gold.push_back(
        world.document(entities[h], world.sentence(*chain[h], entities[h], object), true));
    phrase = fill(chain[h]->phrase, phrase, "", random);
  }
  item.question = "What is " + phrase + "?";
  for (int64_t i = 0; i < num_distractors; ++i) {
    if (i < 6 || (i >= 8 && i % 2 == 0)) {
      item.distractors.push_back(world.other(*chain[static_cast<size_t>(i) % chain.size()]));
    } else if (i < 8) {
      item.distractors.push_back(world.in_passing(entities.back()));
    } else {
      const uint64_t any = random.below(std::size(kRelations) + std::size(kLeaves));
      item.distractors.push_back(world.other(
          any < std::size(kRelations) ? kRelations[any] : kLeaves[any - std::size(kRelations)]));
    }
  }
  shuffle(item.distractors, random);
  return item;
}

std::vector<WorldDocument> place_documents(const WorldItem& item,
                                           const std::vector<int64_t>& places) {
  const size_t total = item.gold.size() + item.distractors.size();
  std::vector<WorldDocument> documents(total);
  std::vector<bool> taken(total, false);
  for (size_t g = 0; g < places.size(); ++g) {
    documents[static_cast<size_t>(places[g])] = item.gold[g];
    taken[static_cast<size_t>(places[g])] = true;
  }
  size_t next = 0;
  for (size_t i = 0; i < total; ++i) {
    if (!taken[i]) documents[i] = item.distractors[next++];
  }
  return documents;
}

void append_documents(EvalItem& item, const std::vector<WorldDocument>& documents) {
  for (size_t i = 0; i < documents.size(); ++i) {
    const WorldDocument& document = documents[i];
    item.text += "Document " + std::to_string(i + 1) + " (" + document.title + ")\n";
    const TextSpan span = append_span(item.text, document.text);
    item.text += "\n\n";
    if (document.gold) {
      item.gold.push_back({span.begin + document.fact.begin, span.begin + document.fact.end});
    }
  }
}

}  // namespace clo
