"""A small world that is always the same: people, short documents about them, and questions with their evidence.

Every person lives somewhere, likes something and works for another, a document each. A question needs one document
(`Where does Ann-Fox live?`) or two (`What does the boss of Ann-Fox like?`: who that is, and what they like). People are
split by a hash of their name: no question of training is about a person that a held-out question is about.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

FIRST = [
    "Ann",
    "Ben",
    "Cleo",
    "Dan",
    "Eva",
    "Finn",
    "Gus",
    "Hal",
    "Ida",
    "Jan",
    "Kim",
    "Leo",
    "Max",
    "Nora",
    "Otto",
    "Pia",
]
LAST = [
    "Ash",
    "Bell",
    "Cole",
    "Day",
    "East",
    "Fox",
    "Gray",
    "Hill",
    "Ives",
    "Jay",
    "King",
    "Lane",
    "Moss",
    "Nash",
    "Orr",
    "Park",
]
CITIES = ["Bern", "Cairo", "Delhi", "Lima", "Oslo", "Paris", "Quito", "Rome", "Seoul", "Tokyo"]
HOBBIES = ["chess", "dance", "films", "golf", "jazz", "maths", "poker", "rugby", "tea", "yoga"]
PEOPLE = 200
HELD_OUT_PERCENT = 25
SEED = 7


@dataclass(frozen=True)
class Document:
    number: int
    text: str


@dataclass(frozen=True)
class Person:
    name: str
    city: str
    hobby: str
    boss: str
    lives: int
    """Numbers of the documents that say so."""
    likes: int
    works: int


@dataclass(frozen=True)
class Question:
    text: str
    answer: str
    evidence: tuple[int, ...]
    """The documents that the answer follows from, in the order in which they are needed."""
    searches: tuple[str, ...]
    """One way to find them."""
    about: str
    """A person's name, which decides the split."""

    def as_task(self) -> dict[str, object]:
        """With the key `messages`, which all agents have, and what the reward needs."""
        return {
            "messages": [{"role": "user", "content": self.text}],
            "answer": self.answer,
            "evidence": list(self.evidence),
        }


@cache
def people() -> dict[str, Person]:
    draw = random.Random(SEED)
    names = draw.sample([f"{first}-{last}" for first in FIRST for last in LAST], PEOPLE)
    numbers = draw.sample(range(100, 1000), 3 * PEOPLE)
    found = {}
    # Everyone is the boss of one, so a search for a name and "works" finds two documents that fit it as well.
    for at, (name, boss) in enumerate(zip(names, [*names[1:], names[0]], strict=True)):
        lives, likes, works = numbers[3 * at : 3 * at + 3]
        found[name] = Person(name, draw.choice(CITIES), draw.choice(HOBBIES), boss, lives, likes, works)
    return found


def documents() -> list[Document]:
    """Three for each person, in the order of their numbers."""
    written = []
    for person in people().values():
        written.append(Document(person.lives, f"{person.name} lives in {person.city}"))
        written.append(Document(person.likes, f"{person.name} likes {person.hobby}"))
        written.append(Document(person.works, f"{person.name} works for {person.boss}"))
    return sorted(written, key=lambda document: document.number)


def questions(split: str) -> list[Question]:
    """Of "train" or "test", four for each person, in an order that is always the same."""
    asked = [
        question
        for person in people().values()
        if is_held_out(person.name) == (split == "test")
        for question in _questions(person)
    ]
    random.Random(SEED).shuffle(asked)
    return asked


def is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) % 100 < HELD_OUT_PERCENT


def _questions(person: Person) -> Iterator[Question]:
    name, boss = person.name, people()[person.boss]
    yield Question(f"Where does {name} live?", person.city, (person.lives,), (f"lives {name}",), name)
    yield Question(f"What does {name} like?", person.hobby, (person.likes,), (f"likes {name}",), name)
    found = f"works {name}"
    yield Question(
        f"Where does the boss of {name} live?",
        boss.city,
        (person.works, boss.lives),
        (found, f"lives {boss.name}"),
        name,
    )
    yield Question(
        f"What does the boss of {name} like?",
        boss.hobby,
        (person.works, boss.likes),
        (found, f"likes {boss.name}"),
        name,
    )
