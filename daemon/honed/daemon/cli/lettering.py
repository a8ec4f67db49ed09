"""Letters as pen strokes, for pictures: readable at any size, and no font has to be installed.

A glyph is strokes parted by commas; a stroke is its points parted by spaces; a point is two digits, x and y.
Capitals reach from y = 0 to the baseline at 6, small letters begin at 2, tails end at 8. Own design.
"""

from __future__ import annotations

from collections.abc import Iterator

CAP, BASELINE = 0.0, 6.0
GAP = 1.8  # between two glyphs
_SPACE = 2.0

_GLYPHS = {
    "0": "10 30 41 45 36 16 05 01 10",
    "1": "01 20 26,06 46",
    "2": "01 10 30 41 42 06 46",
    "3": "01 10 30 41 42 33 13,33 44 45 36 16 05",
    "4": "36 30 04 44",
    "5": "40 00 02 32 43 45 36 16 05",
    "6": "41 30 10 01 05 16 36 45 44 33 13 04",
    "7": "00 40 16",
    "8": "13 02 01 10 30 41 42 33 13 04 05 16 36 45 44 33",
    "9": "42 33 13 02 01 10 30 41 45 36 16 05",
    "A": "06 20 46,14 34",
    "B": "00 30 41 42 33 03,33 44 45 36 06 00",
    "C": "41 30 10 01 05 16 36 45",
    "D": "00 30 41 45 36 06 00",
    "E": "40 00 06 46,03 33",
    "F": "40 00 06,03 33",
    "G": "41 30 10 01 05 16 36 45 43 23",
    "H": "00 06,40 46,03 43",
    "I": "00 20,10 16,06 26",
    "J": "40 45 36 16 05",
    "K": "00 06,40 03 46",
    "L": "00 06 46",
    "M": "06 00 23 40 46",
    "N": "06 00 46 40",
    "O": "10 30 41 45 36 16 05 01 10",
    "P": "06 00 30 41 42 33 03",
    "Q": "10 30 41 45 36 16 05 01 10,24 46",
    "R": "06 00 30 41 42 33 03,23 46",
    "S": "41 30 10 01 02 13 33 44 45 36 16 05",
    "T": "00 40,20 26",
    "U": "00 05 16 36 45 40",
    "V": "00 26 40",
    "W": "00 16 23 36 40",
    "X": "00 46,40 06",
    "Y": "00 23 40,23 26",
    "Z": "00 40 06 46",
    "a": "03 12 22 33 36,34 14 05 16 26 35",
    "b": "00 06,03 12 22 33 35 26 16 05",
    "c": "33 22 12 03 05 16 26 35",
    "d": "30 36,33 22 12 03 05 16 26 35",
    "e": "04 34 33 22 12 03 05 16 26 35",
    "f": "30 20 11 16,02 22",
    "g": "32 37 28 18 07,33 22 12 03 05 16 26 35",
    "h": "00 06,03 12 22 33 36",
    "i": "02 06,00 00",
    "j": "12 17 08,10 10",
    "k": "00 06,32 04 36",
    "l": "00 05 16",
    "m": "02 06,03 12 23 26,23 32 43 46",
    "n": "02 06,03 12 22 33 36",
    "o": "12 22 33 35 26 16 05 03 12",
    "p": "02 08,03 12 22 33 35 26 16 05",
    "q": "32 38,33 22 12 03 05 16 26 35",
    "r": "02 06,03 12 22",
    "s": "32 12 03 14 24 35 26 06",
    "t": "10 15 26,02 22",
    "u": "02 05 16 26 35,32 36",
    "v": "02 26 42",
    "w": "02 16 23 36 42",
    "x": "02 36,32 06",
    "y": "02 26,42 26 18",
    "z": "02 32 06 36",
    ".": "06 06",
    ",": "06 07",
    ":": "03 03,06 06",
    "-": "04 24",
    "_": "07 37",
    "+": "04 44,22 26",
    "/": "06 40",
    "(": "10 02 04 16",
    ")": "00 12 14 06",
    "%": "06 40,00 00,46 46",
    "?": "01 10 30 41 42 24,26 26",
}
Point = tuple[float, float]


def strokes(text: str) -> Iterator[list[Point]]:
    """The strokes of a line of text, which begins at x = 0; what has no glyph is drawn as "?"."""
    left = 0.0
    for character in text:
        if character != " ":
            for stroke in _glyph(character).split(","):
                yield [(left + float(point[0]), float(point[1])) for point in stroke.split()]
        left += _advance(character)


def width(text: str) -> float:
    """How far a line of text reaches."""
    return max(0.0, sum(map(_advance, text)) - GAP)


def _advance(character: str) -> float:
    if character == " ":
        return _SPACE + GAP
    return max(float(point[0]) for point in _glyph(character).replace(",", " ").split()) + GAP


def _glyph(character: str) -> str:
    return _GLYPHS.get(character, _GLYPHS["?"])
