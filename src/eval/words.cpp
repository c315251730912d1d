#include "eval/words.h"

namespace clo {

namespace {

constexpr std::string_view kAdjectives[] = {
    "amber", "ancient", "arid", "azure", "bitter", "bold", "brass", "brisk", "broad", "bronze",
    "calm", "candid", "cedar", "chalky", "clever", "cobalt", "copper", "coral", "cosmic",
    "crimson", "crisp", "damp", "daring", "deep", "distant", "dusty", "eager", "early", "elder",
    "fabled", "faint", "fallow", "fancy", "fierce", "flinty", "foggy", "frozen", "gentle",
    "gilded", "glassy", "golden", "grand", "gritty", "hazel", "hidden", "hollow", "honest",
    "humble", "icy", "indigo", "iron", "ivory", "jade", "jagged", "jolly", "keen", "late",
    "lavish", "lean", "lilac", "linen", "lofty", "lucid", "lunar", "maple", "marble", "mellow",
    "mild", "misty", "mossy", "narrow", "nimble", "noble", "northern", "oaken", "olive", "opal",
    "pale", "patient", "pearl", "plain", "placid", "polar", "proud", "purple", "quaint", "quick",
    "quiet", "rapid", "ready", "robust", "rosy", "rugged", "rural", "russet", "rustic", "sable",
    "sandy", "scarlet", "secret", "serene", "shady", "sharp", "silent", "silken", "silver",
    "sleek", "slender", "smoky", "solar", "solemn", "sturdy", "subtle", "sunny", "swift", "tawny",
    "tender", "tepid", "thrifty", "tidal", "timber", "topaz", "tranquil", "umber", "upland",
    "velvet", "violet", "vivid", "warm", "wary", "western", "wild", "windy", "winter", "wooden",
    "young", "zealous",
};

constexpr std::string_view kNouns[] = {
    "acorn", "alder", "anchor", "anvil", "apple", "arbor", "arrow", "badger", "banner", "barley",
    "basin", "beacon", "beaver", "birch", "bison", "bobbin", "bonfire", "boulder", "bramble",
    "bridge", "brook", "bucket", "buckle", "burrow", "cabin", "candle", "canyon", "castle",
    "cavern", "cellar", "chapel", "cherry", "chisel", "cinder", "cliff", "clover", "comet",
    "compass", "condor", "cottage", "cradle", "crane", "creek", "cricket", "crown", "dagger",
    "daisy", "delta", "desert", "dolphin", "donkey", "dragon", "dune", "eagle", "ember", "engine",
    "falcon", "fennel", "fern", "ferry", "fiddle", "finch", "fjord", "flint", "flute", "forest",
    "fossil", "fountain", "fox", "galaxy", "garden", "garnet", "geyser", "ginger", "glacier",
    "goblet", "grove", "gull", "hammer", "harbor", "harp", "hawk", "heron", "hill", "hornet",
    "island", "ivy", "jacket", "jackal", "kettle", "kite", "knoll", "ladder", "lagoon", "lantern",
    "lark", "laurel", "ledger", "lemon", "lentil", "lily", "lizard", "locket", "lynx", "magnet",
    "mallet", "mantle", "meadow", "meteor", "mill", "mirror", "monsoon", "mortar", "mountain",
    "needle", "nettle", "oasis", "ocean", "orchard", "osprey", "otter", "oyster", "paddle",
    "palace", "panther", "parrot", "pebble", "pepper", "pigeon", "pillar", "pine", "pirate",
    "planet", "plover", "pocket", "pond", "poplar", "prairie", "puzzle", "quarry", "quartz",
    "quill", "rabbit", "raft", "raven", "reef", "ribbon", "ridge", "river", "robin", "rocket",
    "rudder", "saddle", "saffron", "salmon", "satchel", "schooner", "shadow", "shovel", "sickle",
    "signal", "sparrow", "spindle", "spruce", "squall", "stallion", "statue", "stork", "stream",
    "summit", "sunset", "swallow", "swan", "tavern", "temple", "thicket", "thimble", "thistle",
    "thunder", "tiger", "timpani", "tower", "trellis", "trumpet", "tulip", "tundra", "turnip",
    "turtle", "valley", "vessel", "village", "walnut", "walrus", "weasel", "whistle", "willow",
    "window", "wolf", "wren", "yarrow", "zephyr",
};

constexpr std::string_view kVerbs[] = {
    "admires", "builds", "carries", "chases", "covers", "crosses", "describes", "draws",
    "encounters", "enters", "explains", "explores", "finds", "follows", "greets", "guards",
    "hears", "helps", "hides", "holds", "ignores", "joins", "keeps", "leaves", "lifts", "marks",
    "meets", "mends", "notices", "observes", "offers", "opens", "paints", "passes", "praises",
    "pulls", "pushes", "questions", "reaches", "records", "remembers", "repairs", "returns",
    "sees", "serves", "shows", "signals", "sketches", "sorts", "studies", "surrounds", "teaches",
    "touches", "trades", "visits", "warms", "watches", "weighs", "welcomes",
};

}  // namespace

std::span<const std::string_view> adjectives() { return kAdjectives; }
std::span<const std::string_view> nouns() { return kNouns; }
std::span<const std::string_view> verbs() { return kVerbs; }

}  // namespace clo
