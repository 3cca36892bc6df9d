"""Names for the bars of a Gantt chart, the most telling ones that there is room for; captions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moegen.timeline import Timeline


def provenance_caption(shares: Mapping[str, float]) -> str:
    """Where predicted durations come from: ``"92% of task time measured, 8% roofline"``.

    Parameters
    ----------
    shares : mapping of str to float
        As `Timeline.provenance_shares` gives them.

    Returns
    -------
    str
        Empty if there are none.
    """
    parts = [f"{_percent(share)} {name}" for name, share in shares.items() if share > 0]
    if not parts:
        return ""
    percent, name = parts[0].split(" ", 1)
    return ", ".join([f"{percent} of task time {name}", *parts[1:]])


def _percent(share: float) -> str:
    """In whole percent, but never none of what there is, nor all of what is not all."""
    if share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


@dataclass(frozen=True)
class Labels:
    """Names for tasks of one lane.

    Parameters
    ----------
    timeline : Timeline
    span_s : float
        Seconds that the axis shows.
    letters : float
        Letters that fit side by side across the axis.
    many : bool
        Several layers are in view: a name without its layer would be read as its neighbour's.
    """

    timeline: Timeline
    span_s: float
    letters: float
    many: bool

    def of(self, drawn: Sequence[int]) -> Iterator[tuple[int, int, str]]:
        """First task, last task and name: of each bar with room for its own, else of a row."""
        for run in self._runs(drawn):
            alone = [(i, i, self._fitting(i, i)) for i in run]
            named = [entry for entry in alone if entry[2]]
            yield from named or self._whole(run)

    def layers(
        self, others: Sequence[int], begin: float, end: float
    ) -> Iterator[tuple[int, float, float]]:
        """A task of each layer that has room for its name, and from when to when it is in view."""
        groups: list[list[int]] = []
        for i in others:
            if groups:
                last = groups[-1][-1]
                a, b = self.timeline.ids[last], self.timeline.ids[i]
                if self._touch(last, i) and (a.step, a.layer) == (b.step, b.layer):
                    groups[-1].append(i)
                    continue
            groups.append([i])
        for group in groups:
            left = max(begin, float(self.timeline.start_s[group[0]]))
            right = min(end, float(self.timeline.end_s[group[-1]]))
            if len(self.layer(group[0])) < self._room(left, right):
                yield group[0], left, right

    def layer(self, i: int) -> str:
        """The layer of a task, or its op where it is in none."""
        task_id = self.timeline.ids[i]
        return f"L{task_id.layer}" if task_id.layer >= 0 else task_id.op

    def _whole(self, run: Sequence[int]) -> Iterator[tuple[int, int, str]]:
        text = self._fitting(run[0], run[-1])
        if text:
            yield run[0], run[-1], text

    def _runs(self, drawn: Sequence[int]) -> list[list[int]]:
        """Tasks in groups: neighbours of one op, step and layer that touch."""
        runs: list[list[int]] = []
        for i in drawn:
            if runs:
                j = runs[-1][-1]
                a, b = self.timeline.ids[j], self.timeline.ids[i]
                if (a.op, a.step, a.layer) == (b.op, b.step, b.layer) and self._touch(j, i):
                    runs[-1].append(i)
                    continue
            runs.append([i])
        return runs

    def _touch(self, j: int, i: int) -> bool:
        gap = self.timeline.start_s[i] - self.timeline.end_s[j]
        return abs(float(gap)) < 1e-3 * self.span_s

    def _room(self, begin: float, end: float) -> float:
        return (end - begin) * self.letters / self.span_s - 1 if self.span_s else 0.0

    def _fitting(self, first: int, last: int) -> str:
        room = self._room(float(self.timeline.start_s[first]), float(self.timeline.end_s[last]))
        return next((text for text in self._texts(first, last) if len(text) < room), "")

    def _texts(self, first: int, last: int) -> list[str]:
        """Names of a task, or of a row of them: the longest first."""
        a, b = self.timeline.ids[first], self.timeline.ids[last]
        layer = f"L{a.layer}" if a.layer >= 0 else ""
        part = ""
        for letter, lo, hi in (("e", a.expert, b.expert), ("m", a.microbatch, b.microbatch)):
            if lo >= 0:
                part = f"{letter}{lo}" if lo == hi else f"{letter}{lo}-{hi}"
                break
        choices = [(a.op, layer, part), (layer, part) if part else (a.op,)]
        if not (part and layer and self.many):
            choices.append((part or a.op,))
        elif first != last:
            choices.append((layer,))
        return [" ".join(filter(None, words)) for words in choices]
