"""From a path or a dict to one validated `Source`, with all files that it includes."""

import os
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from hyper_parallel.core.activation_memory.swap_settings import SwapSettings
from hyper_parallel.core.errors import PolicyError
from hyper_parallel.policy_file.document import DICT_SOURCE, Document, document_of
from hyper_parallel.policy_file.names import did_you_mean
from hyper_parallel.policy_file.problems import Problem, policy_error
from hyper_parallel.policy_file.rule import Rule
from hyper_parallel.policy_file.schema import Entry, PolicyFile, Stage
from hyper_parallel.policy_file.wording import Loc, brief

_MOST_FILES = 50
_MOST_RULES = 10_000
_MOST_LEVELS = 20
_SUFFIXES = (".yaml", ".yml")


class PlacedRule(NamedTuple):
    """A rule, and where it stands."""

    rule: Rule
    label: str
    """How a plan names it: ``rule 2``, ``stage 1, rule 1``, ``set attention, rule 1``, ``base.yaml, rule 3``."""
    document: Document
    loc: Loc

    def wrong(self, key: str, what: str) -> Problem:
        """Something that is wrong with one of its keys."""
        return self.document.problem((*self.loc, key), f"{self.label}: {what}")


class PlacedPair(NamedTuple):
    """A pair of layers of `prefetch`, and where it stands."""

    load: str
    at: str
    label: str
    document: Document
    loc: Loc


class Source(NamedTuple):
    """A validated file, with what it includes, and where it came from."""

    file: PolicyFile
    """Everything in one file: what is included is part of it."""
    name: str
    """Short name for messages: the file's name, or `dict`."""
    origin: str
    """The path as it was given, or `dict`."""
    common: tuple[PlacedRule, ...]
    """The rules for every stage, with sets in place of their names."""
    staged: tuple[tuple[PlacedRule, ...], ...]
    """The rules of each stage alone."""
    pairs: tuple[PlacedPair, ...]
    unused: tuple[str, ...]
    """Names of rule sets that nothing uses."""

    def check_stages(self, stages: int | None) -> None:
        """Refuse a file that isn't for a pipeline of this many stages.

        Args:
            stages: How many stages the pipeline has; None if that isn't known.

        Raises:
            PolicyError: The file has rules for another number of stages.
            TypeError: It is no whole number.
        """
        _require_whole(stages, "the number of stages", 1)
        if stages is not None and self.staged and len(self.staged) != stages:
            more = "more" if len(self.staged) > stages else "fewer"
            raise PolicyError(
                f"{self.origin} has rules for {len(self.staged)} stages, {more} than the pipeline, which has {stages}; "
                f"give one entry per stage, {{}} for a stage without rules of its own"
            )

    def rules(self, stage: int | None) -> tuple[PlacedRule, ...]:
        """The rules for one stage.

        Args:
            stage: The number of the stage, from 0; it makes no difference to a file without stages.

        Returns:
            The common rules, and those of the stage.

        Raises:
            PolicyError: The file has stages and none was given, or not so many.
            TypeError: The stage is no whole number.
        """
        _require_whole(stage, "a stage", 0)
        count = len(self.staged)
        if not count:
            return self.common
        valid = f"{count} stage{'s, 0 to ' + str(count - 1) if count > 1 else ', 0'}"
        if stage is None:
            raise PolicyError(
                f"{self.origin} has rules for {valid}, but no stage was given; say which this net is: "
                f"stage=0 (--stage 0 on the command line)"
            )
        if stage >= count:
            raise PolicyError(f"{self.origin} has rules for {valid}, but the stage is {stage}")
        return self.common + self.staged[stage]


def _require_whole(value: int | None, what: str, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} is a whole number from {least}, but got {value!r} of type {type(value).__name__}")
    if value < least:
        raise PolicyError(f"{what} is a whole number from {least}, but got {value}")


def read_policy_file(source: str | os.PathLike[str] | dict[str, Any]) -> Source:
    """Read and validate a policy file, and all that it includes.

    Args:
        source: Path of a YAML file, or the same content as a dict (its policies may be CheckpointPolicy members).

    Returns:
        The validated file.

    Raises:
        TypeError: The source is neither a path nor a dict.
        PolicyError: The file can't be read, or has mistakes: all of them, each with its place, the value and what was
            expected.
    """
    if isinstance(source, dict):
        first, origin = Document(source, DICT_SOURCE), DICT_SOURCE
    elif isinstance(source, (str, os.PathLike)) and isinstance(origin := os.fspath(source), str):
        first = document_of(Path(source))
    else:
        raise TypeError(f"a policy file is given as a path or a dict, but got {type(source).__name__}")
    return _Assembly(first, origin, _Reading(first)).source()


class _Reading:
    """Reads files in the order in which they count: what is included before what includes it."""

    def __init__(self, first: Document) -> None:
        self.files: list[tuple[Document, PolicyFile]] = []
        self.documents: list[Document] = []
        """All of them, also those that have mistakes."""
        self.problems: list[Problem] = []
        self._read: set[Path] = set()
        self._folder = first.path.parent if first.path is not None else None
        self._add(first, ())

    def _add(self, document: Document, around: tuple[Path, ...]) -> None:
        """Add one file; `around` are the files that include it."""
        self.documents.append(document)
        file, problems = document.validated()
        self.problems.extend(problems)
        if document.path is not None:
            around = (*around, document.path.resolve())
            self._read.add(around[-1])
        includes = document.content.get("include", ()) if file is None else file.include
        for loc, given in _includes(includes):
            if len(self._read) >= _MOST_FILES:
                what = f"got {given!r}, which is one file too many: at most {_MOST_FILES} are read"
                self.problems.append(document.wrong(loc, what))
                break
            why_not = self._include(document, given, around)
            if why_not:
                self.problems.append(document.wrong(loc, f"got {given!r}, {why_not}"))
        if file is not None:
            self.files.append((document, file))

    def _include(self, document: Document, given: str, around: tuple[Path, ...]) -> str:
        if document.path is None:
            return "but a dict has no folder that it could be relative to; give the path of a file instead of a dict"
        if PurePosixPath(given).is_absolute() or not given.lower().endswith(_SUFFIXES):
            return f"expected a path relative to {document.name}, of a file that ends in {' or '.join(_SUFFIXES)}"
        if "\0" in given:
            return "which is no path"
        path = document.path.parent / given
        real = path.resolve()
        if real in around:
            ring = " -> ".join(each.name for each in (*around[around.index(real) :], real))
            return f"which would never end: {ring}"
        if real in self._read:
            return ""
        self._read.add(real)
        try:
            self._add(document_of(path, os.path.relpath(path, self._folder)), around)
        except PolicyError as error:
            if not any(problem.position for problem in error.problems):
                return "but " + str(error).partition("\n")[0]
            self.problems.extend(error.problems)
        return ""


def _includes(value: Any) -> Iterator[tuple[Loc, str]]:
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            if isinstance(each, str):
                yield ("include", index), each


class _Assembly:
    """Makes one `Source` of the files that were read."""

    def __init__(self, main: Document, origin: str, reading: _Reading) -> None:
        self.main = main
        self.origin = origin
        self.files = reading.files
        self.problems = [*reading.problems, *_unknown_sets(reading.documents)]
        self.sets: dict[str, tuple[Document, tuple[Entry, ...]]] = {}
        self.used: set[str] = set()
        self._placed = 0

    def source(self) -> Source:
        for document, file in self.files:
            for name, entries in file.rule_sets.items():
                if name in self.sets:
                    other = self.sets[name][0].name
                    self.problems.append(document.wrong(("rule_sets", name), f"{other} has a set of this name, too"))
                self.sets[name] = document, entries
        count = max((len(file.stages) for _, file in self.files), default=0)
        common: list[PlacedRule] = []
        staged: list[list[PlacedRule]] = [[] for _ in range(count)]
        pairs: list[PlacedPair] = []
        for document, file in self.files:
            common.extend(self._rules(document, ("rules",), file.rules))
            if file.stages and len(file.stages) != count:
                self.problems.append(
                    document.wrong(("stages",), f"it has {len(file.stages)} stages, but another file has {count}")
                )
            for number, stage in enumerate(file.stages):
                staged[number].extend(self._rules(document, ("stages", number, "rules"), stage.rules))
            for number, pair in enumerate(file.prefetch):
                label = f"{self._prefix(document)}prefetch pair {number + 1}"
                pairs.append(PlacedPair(pair.load, pair.at, label, document, ("prefetch", number)))
        for name, (document, entries) in self.sets.items():
            if name not in self.used:  # what is wrong with it is told all the same
                list(self._rules(document, ("rule_sets", name), entries, (name,)))
        if self.problems:
            raise policy_error(self.main.name, self.problems)
        unused = tuple(name for name in self.sets if name not in self.used)
        stages = tuple(map(tuple, staged))
        return Source(self._in_one_file(), self.main.name, self.origin, tuple(common), stages, tuple(pairs), unused)

    def _rules(
        self, document: Document, loc: Loc, entries: tuple[Entry, ...], around: tuple[str, ...] = ()
    ) -> Iterator[PlacedRule]:
        """Walk rules, with the rules of a set in place of its name; `around` are the sets that these stand in."""
        for number, entry in enumerate(entries):
            here = (*loc, number)
            self._placed += 1
            if self._placed > _MOST_RULES:
                if self._placed == _MOST_RULES + 1:
                    what = f"with sets in place of their names there are more than {_MOST_RULES:,} rules"
                    self.problems.append(document.wrong(here, what))
                return
            if isinstance(entry, Rule):
                yield PlacedRule(entry, self._label(document, loc, number, around), document, here)
            else:
                yield from self._used(document, here, entry.use, around)

    def _used(self, document: Document, loc: Loc, name: str, around: tuple[str, ...]) -> Iterator[PlacedRule]:
        if name in around:
            why_not = "which would never end: " + " -> ".join((*around[around.index(name) :], name))
        elif name not in self.sets:
            return  # told by _unknown_sets
        elif len(around) >= _MOST_LEVELS:
            why_not = f"which is a set in a set in a set, more than {_MOST_LEVELS} times"
        else:
            self.used.add(name)
            set_document, entries = self.sets[name]
            yield from self._rules(set_document, ("rule_sets", name), entries, (*around, name))
            return
        self.problems.append(document.wrong((*loc, "use"), f"got {brief(name)}, {why_not}"))

    def _label(self, document: Document, loc: Loc, number: int, around: tuple[str, ...]) -> str:
        if around:
            where = f"set {around[-1]}, "
        elif loc[0] == "stages":
            where = f"stage {loc[1]}, "
        else:
            where = ""
        return f"{self._prefix(document)}{where}rule {number + 1}"

    def _prefix(self, document: Document) -> str:
        return "" if document is self.main else f"{document.name}, "

    def _in_one_file(self) -> PolicyFile:
        files = [file for _, file in self.files]
        if len(files) == 1:
            return files[0]
        given: dict[str, Any] = {"version": files[-1].version}
        for file in files:
            given |= {key: getattr(file, key) for key in ("mode", "default") if key in file.model_fields_set}
        swap: dict[str, Any] = {}
        for file in files:
            swap |= file.swap.model_dump(include=file.swap.model_fields_set)
        if swap:
            given["swap"] = SwapSettings(**swap)
        lists = {
            "rule_sets": {name: entries for name, (_, entries) in self.sets.items()},
            "rules": sum((file.rules for file in files), ()),
            "prefetch": sum((file.prefetch for file in files), ()),
            "stages": tuple(
                Stage(rules=sum((stage.rules for stage in stages if stage is not None), ()))
                for stages in zip_longest(*(file.stages for file in files))
            ),
        }
        return PolicyFile(**given, **{key: value for key, value in lists.items() if value})


def _unknown_sets(documents: list[Document]) -> Iterator[Problem]:
    """Look for uses of sets that no file has, also in files that have other mistakes."""
    known = [name for document in documents for name in _mapping(document.content.get("rule_sets"))]
    for document in documents:
        content = document.content
        lists: list[tuple[Loc, Any]] = [(("rules",), content.get("rules"))]
        lists += [(("rule_sets", name), rules) for name, rules in _mapping(content.get("rule_sets")).items()]
        lists += [
            (("stages", number, "rules"), _mapping(stage).get("rules"))
            for number, stage in enumerate(_list(content.get("stages")))
        ]
        for loc, rules in lists:
            for number, entry in enumerate(_list(rules)):
                name = _mapping(entry).get("use")
                if isinstance(name, str) and name not in known:
                    offer = did_you_mean(name, map(str, known)) or f"; known are {', '.join(map(str, known)) or 'none'}"
                    yield document.wrong(
                        (*loc, number, "use"), f"got {brief(name)}, expected a set of rule_sets{offer}"
                    )


def _mapping(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, (list, tuple)) else ()
