"""Generated long documents that contain facts, for the bundled model and for real models.

A document is the daily log of a harbour, in plain text. Most sentences are filler. The others contain a fact: "the code
of NAME is WORD". Each name occurs once per document, and has different words in different documents. So a KV block that
is lost, stale or from another document causes a wrong answer.
"""

import random
import re
from dataclasses import dataclass
from pathlib import Path

# Names occur only in fact sentences and questions. WORDS are the values of the facts. No name equals a word, even if
# case is ignored.
NAMES = str.split("""
Abernathy Ackroyd Adelaide Agnes Alastair Aldous Alistair Amelia Anselm Antwerp Arabella Arbroath Archibald
Aubrey Augusta Balthasar Barnaby Bartholomew Beatrice Belinda Bergen Bertram Blyth Bridlington Bridport Brixham
Bronwen Calder Callum Cassandra Cecily Chadwick Charlotte Cheswick Clarissa Clement Clovelly Constance Cordelia
Cornelius Cosmo Cressida Cromer Cuthbert Cyprian Dagmar Daphne Delphine Desmond Dorothea Dougal Drummond Dunbar
Dunstan Ebenezer Edgar Edith Edmund Edwina Eleanor Elspeth Emmeline Enid Ephraim Ernestine Esmond Ethelred Eudora
Eugenia Eunice Evander Eyemouth Falmouth Farquhar Felicity Ferdinand Fergus Fiona Fishguard Fleetwood Florian
Fowey Francesca Frederica Gareth Gawain Genevieve Geraldine Gideon Gilbert Giles Godfrey Grimsby Griselda Guinevere
Gwendolen Hamish Hannah Harriet Harwich Hector Henrietta Herbert Hermione Hester Holyhead Horatio Hortense Hubert
Hugo Humphrey Ignatius Imogen Ingrid Inverness Isadora Isidore Isolde Jarvis Jemima Jerome Jocelyn Jonathan Josephine
Julian Juliet Katrina Kelso Kendal Kenneth Kirkwall Lachlan Lambert Lancelot Lavinia Leander Leopold Lerwick Letitia
Lionel Lorna Louisa Lowestoft Lucinda Ludlow Lydia Magnus Mallaig Malvern Margate Marjorie Marmaduke Matilda Maurice
Meredith Millicent Miranda Montague Mortimer Muriel Nathaniel Nigel Nora Norbert Octavia Odette Oliver Ophelia
Orford Orlando Osbert Oswald Ottilie Padstow Patience Penelope Penzance Percival Peregrine Philippa Phineas Phoebe
Prudence Quentin Quincy Ramsgate Raphael Rebecca Reginald Roderick Rosalind Rowan Rufus Rupert Sabrina Samson
Scarborough Sebastian Selina Septimus Sheringham Sibyl Sidmouth Sigrid Silas Sophronia Stornoway Stromness Susanna
Swanage Sybilla Tabitha Tamsin Tarquin Tenby Thaddeus Theodora Theodore Thurso Tiberius Tobermory Tobias Torquay
Tristan Ullapool Ulysses Ursula Valentine Verity Victoria Violet Virgil Vivian Wallace Weymouth Whitby Wilfred
Wilhelmina Winifred Wolfgang Workington Yarmouth Yolanda Zachary Zelda
""")

WORDS = str.split("""
acorn almond amber anchor anvil apple apricot arrow aspen badger bamboo barley basket beacon beaver beetle bell birch
biscuit blanket bonnet bottle bracelet bramble brass bridge bronze bucket buckle butter button cabbage cactus camel
candle canvas carpet carrot castle cedar cello chalk chariot cherry chestnut chimney cinnamon clover cobalt coconut
comet compass copper coral cotton cradle crane crater cricket crimson crown crystal cushion cypress dagger daisy
diamond dolphin donkey dragon drum eagle easel ebony elbow elder emerald engine fable falcon feather fennel ferret
fiddle flannel flint flute forest fossil fountain fox garlic garnet gazelle ginger glacier goblet granite grape
gravel guitar hammer hammock harp hawk hedge helmet heron hollow honey hornet indigo ink iron island ivory jacket
jaguar jasmine jewel juniper kettle kitten lacquer ladder lagoon lantern laurel lavender leather lemon lentil leopard
lichen lilac linen lizard lobster locket lotus magnet magpie mahogany mango mantle maple marble meadow medal melon
mercury mirror mitten monkey mosaic mountain mulberry mustard napkin nectar needle nettle nickel nutmeg oak oasis
onion onyx opal orange orchard orchid organ otter oyster paddle panther paper parrot pebble pelican pencil pepper
pewter piano pigeon pillow planet platinum plum pocket pollen poplar poppy porcelain prism pumpkin puppet pyramid
quartz quill rabbit radish raven ribbon ruby saddle saffron salmon sandal sapphire satin scarlet shadow shovel silk
silver sparrow spider spruce squirrel statue sulphur sunset swallow table teapot thimble thistle thunder tiger timber
topaz trumpet tulip tunnel turnip turtle umbrella valley vanilla velvet vinegar violin volcano walnut walrus
whistle willow window wolf yarrow zebra
""")

PLACES = str.split("""
Saltmarsh Greyhaven Northwick Ottermouth Stonequay Elmsport Windle Harrowby Fenmouth Tidewell Marshgate Oldcastle
Brackwater Sandholm Kingsferry Ravensand Westerby Gullpoint Ashwater Lowcliff Pennyport Redscar Mossbay
""")

TITLE = "{place} harbour, daily book, volume {volume}"

FACT_SENTENCES = """
According to the register, the code of {name} is {word}.
A note in the margin says that the code of {name} is {word}.
It was agreed at noon that the code of {name} is {word}, and nothing was changed since.
For the record, the code of {name} is {word}.
The clerk was asked twice and answered that the code of {name} is {word}.
As the sealed letter shows, the code of {name} is {word}; the letter was returned to the safe.
Both copies of the list confirm that the code of {name} is {word}.
The office repeats for all readers that the code of {name} is {word}, as entered above the line.
""".strip().splitlines()

FILLER_SENTENCES = """
The {person} counted {number} {container} of {goods} in the {building} and found {finding}.
{number} {container} of {goods} were moved from the {building} to the {building} before {time}.
The weather stayed {weather} until {time}, with the wind in the {direction} and the sea {sea}.
By {time} the {person} had closed the {building} and handed the keys to the {person}.
A {vessel} from the {direction} came in at {time} with {goods} and {goods}, and left again on the next tide.
The {person} wrote to the {person} about the {goods}, but no reply has come.
Repairs to the {building} took {number} hours and used up {number} {container} of {goods}.
No {vessel} was seen that day, and the {person} spent it sorting {goods}.
It rained from {time} to {time}, so the {goods} had to stay in the {building}.
The {person} complained that the {building} was too {state} for {goods}.
Instead of the {number} {container} that were promised there came {number}, and some of those were damp.
The {vessel} lay at the {building} for {number} days while the {person} looked for a crew.
Nobody could say why the {building} was {state}, and the {person} let the matter rest.
The price of {goods} rose by {number} pence, which the {person} thought too much.
At {time} the {person} read the gauge at the {building}: {number} inches, and the water {sea}.
Two men were paid for carrying {goods}, and a third for watching the {building}.
The {building} is to be painted in spring, if the {person} can spare the {goods}.
After {time} the wind turned to the {direction} and the air became {weather}.
The {person} asked for more {goods}; the {person} sent {number} {container} and a long bill.
Visitors to the {building} are reminded that it is {state} and that the {person} keeps the door.
Page {number} of the old book describes the same {building}, then still {state}.
The {vessel} paid its dues in {goods}, {number} {container} in all: {finding}.
On the way to the {building} the {person} lost {number} {container} of {goods} and reported it at {time}.
Lamps were lit at {time}, earlier than usual, because the evening was {weather}.
""".strip().splitlines()

LISTS = {
    slot: words.split(", ")
    for slot, words in {
        "person": "harbour master, clerk, pilot, cook, carpenter, customs officer, night watchman, surveyor, "
        "lamp keeper, owner of the yard, younger clerk, doctor, ferry man, sail maker, inspector",
        "container": "barrels, crates, sacks, boxes, bales, casks, bundles, jars, tubs, loads",
        "goods": "rope, tar, salt, flour, coal, herring, wool, nails, lamp oil, dried peas, soap, tea, paint, "
        "bricks, straw, old sails, tin plates, oats, fish hooks, glass, wax, turpentine, slate, candied fruit",
        "building": "east shed, west shed, boat house, customs house, long pier, small pier, rope walk, tower, "
        "grain store, dry dock, lower yard, upper yard, ice house, signal station, chapel, south gate",
        "time": "dawn, eight in the morning, nine, ten, half past ten, noon, two, three in the afternoon, four, "
        "five, six, dusk, nightfall, midnight",
        "weather": "grey, mild, foggy, cold and clear, damp, close, bright, uncertain, raw, fair",
        "direction": "north, south, east, west, north east, south west",
        "sea": "calm, rough, rising, falling, low, high, muddy, flat, choppy",
        "vessel": "brig, cutter, collier, barge, lugger, schooner, tug, ketch, trawler, mail boat",
        "state": "dry, damp, warm, crowded, draughty, half empty, in poor repair, in good order, locked, dark",
        "finding": "nothing missing, one short, all in order, the seals unbroken, two of them wet, "
        "no reason to complain, the sum correct, the labels hard to read",
    }.items()
}

# Common words of users' own sentences, so that the bundled tokenizer knows them.
EVERYDAY_WORDS = str.split("""
a about again all also always am an and another any are ask back be because been but can come could day did do done
each else every few find first for give go good great had has have he hello help her here him his how i if into it
its just keep know large last later less like line long made make many me men more most much must my name names never
new next not now number of often on once one or other our out over own part people please put read right said say see
sentence she should show small so some still story such take tell text than thank thanks that their them there these
they thing think those three today together tomorrow too true two under until up us very want was way we well went
were what when where which while who whose why will with without word words work would write wrong year yes yesterday
yet you your
""")

QUESTION = "\n\nQuestion: what does the book say? Answer: the code of {name} is"

NUM_FACTS = 40  # default number of facts in a document

# A word-level token is a word or a digit with the space before it, or any other single character.
TOKEN_PATTERN = r" ?[A-Za-z]+| ?[0-9]|[^A-Za-z0-9]"


@dataclass(frozen=True)
class Fact:
    """A fact of a document: the code of *name* is *word*."""

    name: str
    word: str


@dataclass(frozen=True)
class Document:
    """A text, and its facts in order of appearance."""

    text: str
    facts: tuple[Fact, ...]


def make_document(seed: int, num_tokens: int, num_facts: int = NUM_FACTS) -> Document:
    """Generate a document from *seed*, with at least *num_tokens* word-level tokens and evenly spread facts.

    A fact is a name and its code, which is a word. Documents with different seeds have different titles. If the
    seeds are below `len(WORDS)`, a name that occurs in both documents has different codes in them.
    """
    if not 0 <= num_facts <= len(NAMES):
        raise ValueError(f"num_facts: a document cannot have {num_facts} facts; give 0 to {len(NAMES)}")

    rng = random.Random(seed)
    # A Latin square: a name has different words for different seeds, and no two names of a document share a word.
    facts = [Fact(name, WORDS[(7 * i + 31 * seed) % len(WORDS)]) for i, name in enumerate(NAMES)]
    facts = rng.sample(facts, num_facts)
    title = TITLE.format(place=PLACES[seed % len(PLACES)], volume=seed)

    parts = [title]
    length, num_told = count_tokens(title), 0
    while length < num_tokens or num_told < num_facts:
        if num_told < num_facts and length >= num_tokens * num_told // num_facts:
            sentence = rng.choice(FACT_SENTENCES).format(name=facts[num_told].name, word=facts[num_told].word)
            num_told += 1
        else:
            sentence = _filler_sentence(rng)
        gap = "\n\n" if len(parts) == 1 or rng.random() < 1 / 6 else " "
        parts.append(gap + sentence)
        length += count_tokens(parts[-1])
    return Document("".join(parts), tuple(facts))


def with_facts(text: str) -> Document:
    """Insert facts between the sentences of a user's *text*, evenly from the first sentence to the last.

    The document has `NUM_FACTS` facts, or one per sentence if the text has fewer sentences. Raises ValueError if *text*
    has no sentences.
    """
    sentences = re.findall(r".+?(?:[.!?](?=\s)|\n\n|\Z)\s*", text, re.DOTALL)
    if not sentences:
        raise ValueError("document: has no text; give a file with sentences in it")
    facts = make_document(0, 0, min(NUM_FACTS, len(sentences))).facts
    rng = random.Random(0)
    told = {len(sentences) * i // len(facts): fact for i, fact in enumerate(facts)}
    parts = []
    for i, sentence in enumerate(sentences):
        if i in told:
            parts.append(rng.choice(FACT_SENTENCES).format(name=told[i].name, word=told[i].word) + " ")
        parts.append(sentence)
    return Document("".join(parts), facts)


def question(document_text: str, name: str) -> str:
    """Return a prompt for the model to complete: the document, then a question that ends with "the code of NAME is"."""
    return document_text + QUESTION.format(name=name)


def is_right(answer: str, fact: Fact) -> bool:
    """Return whether *answer* contains the fact's word, as a whole word in any case."""
    return re.search(rf"\b{re.escape(fact.word)}\b", answer, re.IGNORECASE) is not None


def count_tokens(text: str) -> int:
    """Return the number of word-level tokens in *text*, without special tokens."""
    return len(re.findall(TOKEN_PATTERN, text))


def vocabulary() -> list[str]:
    """Return all words that documents and questions use, and common English words, sorted and without duplicates."""
    fillings = [filling for fillings in LISTS.values() for filling in fillings]
    sentences = [*FACT_SENTENCES, *FILLER_SENTENCES, *fillings, TITLE, QUESTION]
    words = re.findall("[A-Za-z]+", " ".join(sentences))
    return sorted({*NAMES, *WORDS, *PLACES, *EVERYDAY_WORDS, *words})


def _filler_sentence(rng: random.Random) -> str:
    def fill(slot: re.Match[str]) -> str:
        return str(rng.randint(2, 99)) if slot[1] == "number" else rng.choice(LISTS[slot[1]])

    sentence = re.sub(r"{(\w+)}", fill, rng.choice(FILLER_SENTENCES))
    return sentence[0].upper() + sentence[1:]


def document_text(path: str) -> str:
    """Return the text of the file at *path*. Raise ValueError if the file cannot be read or is not UTF-8 text."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"document {path}: is not UTF-8 text ({error.reason}); give a text file") from error
    except OSError as error:
        raise ValueError(f"document {path}: cannot be read ({error.strerror}); give a text file") from error
