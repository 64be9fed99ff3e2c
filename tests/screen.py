"""A terminal as a person sees it: what is on the screen after what a program has written."""

import re

TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(\x1b)|(.)", re.DOTALL)


class Screen:
    """Lines of ``width`` characters, any number of them. Knows what rich writes, and refuses everything else."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._lines: list[list[str]] = [[]]
        self._row = self._column = 0

    @property
    def lines(self) -> list[str]:
        return ["".join(line).rstrip() for line in self._lines]

    def feed(self, text: str) -> None:
        for number, command, escape, character in TOKEN.findall(text):
            assert not escape, f"not understood: {text!r}"
            if command:
                self._control(command, number)
            elif character == "\r":
                self._column = 0
            elif character == "\n":
                self._move_to(self._row + 1)
            else:
                self._put(character)

    def _control(self, command: str, number: str) -> None:
        if command == "A":
            self._row = max(0, self._row - int(number or 1))
        elif command == "K":
            assert number == "2"
            self._lines[self._row] = []
        else:
            assert command in "mhl", f"not understood: {number}{command}"

    def _put(self, character: str) -> None:
        if self._column == self.width:
            self._move_to(self._row + 1)
            self._column = 0
        line = self._lines[self._row]
        line.extend(" " * (self._column + 1 - len(line)))
        line[self._column] = character
        self._column += 1

    def _move_to(self, row: int) -> None:
        self._row = row
        self._lines.extend([] for _ in range(row + 1 - len(self._lines)))
