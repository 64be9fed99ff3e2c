"""Towns and people that do not exist: facts that no model knows by heart, the same in every process."""

import functools
from dataclasses import dataclass
from random import Random

PARTS = """
Al Bar Cas Dor El Fen Gar Hal Is Kel Lor Mar Nor Os Pel Quin Ros Sel Tor Wes;
bury den field ford ham holm leigh mouth stead ton;
Ada Boris Clara Dmitri Elena Farid Greta Hugo Ines Jonas Katya Leon Mira Nils Olga Pavel Rosa Stefan Tilda Viktor;
Abelard Brandt Castell Drummond Engel Falk Gruber Hollis Ivarsen Jansky Kessler Lindqvist Moreau Novak Ostrow
Petrov Quist Renner Sandoval Thorne Ullman Varga Whitlock Yarrow Zeller Ashby Bellamy Corwin Dahl Eriksen;
baker botanist carpenter chemist composer gardener painter pilot printer surveyor teacher weaver;
Ahm Brede Corle Dunn Esk Fahr Glane Hode Ithe Lume
"""
BEGINNINGS, ENDINGS, FIRST_NAMES, SURNAMES, TRADES, RIVERS = (part.split() for part in PARTS.split(";"))


@dataclass(frozen=True)
class Town:
    """``mayor``: a name, of somebody who may have been born elsewhere."""

    name: str
    founded: int
    river: str
    mayor: str


@dataclass(frozen=True)
class Person:
    """``birthplace``: a town's name."""

    name: str
    born: int
    birthplace: str
    trade: str


@functools.cache
def towns() -> dict[str, Town]:
    """200, by name."""
    rng = Random("towns")
    names = [beginning + ending for beginning in BEGINNINGS for ending in ENDINGS]
    mayors = rng.sample(list(people()), len(names))
    return {
        name: Town(name, rng.randint(900, 1899), rng.choice(RIVERS), mayor)
        for name, mayor in zip(names, mayors, strict=True)
    }


@functools.cache
def people() -> dict[str, Person]:
    """600, by name."""
    rng = Random("people")
    names = [f"{first} {last}" for first in FIRST_NAMES for last in SURNAMES]
    birthplaces = [beginning + ending for beginning in BEGINNINGS for ending in ENDINGS]
    return {name: Person(name, rng.randint(1900, 1999), rng.choice(birthplaces), rng.choice(TRADES)) for name in names}


def passages() -> dict[str, str]:
    """The corpus: a text about each town and each person, by its title."""
    about = {
        town.name: f"{town.name} is a town on the river {town.river}. It was founded in {town.founded}. "
        f"The mayor of {town.name} is {town.mayor}."
        for town in towns().values()
    }
    about |= {
        person.name: f"{person.name}, a {person.trade}, was born in {person.birthplace} in {person.born}."
        for person in people().values()
    }
    return about
