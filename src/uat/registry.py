"""Registries of methods and domains: uat's own entries, those that a program registers, those that packages offer.

At first a registry holds only uat's own entries. Installed packages offer entries as entry points, which are read when
a name is unknown or when all entries are listed; only then is a package imported. An entry that cannot be imported
becomes a `Problem` with a sentence: the error is raised for that name alone, and everything else works.

An address, `python:module:name`, names code. Only `adopt` imports it, and is called only for addresses that the user
named, or that are in a file that the user trusts.

A scheme makes entries of all names with a prefix, such as `logs:events`. Its module is imported for such names alone.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from uat.files import NAME
from uat.settings import shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Entry = TypeVar("Entry")

OWN = "uat"
"""The owner of the entries that uat supplies."""
ADDRESS = re.compile(r"python:(?P<module>\w+(\.\w+)*):(?P<name>\w+(\.\w+)*)")
TRUST = "--trust on the command line, trust=True in Python"


def is_address(name: Any) -> bool:
    """Whether a name is the address of code: `python:module:name`."""
    return isinstance(name, str) and name.startswith("python:")


def address_of(value: Any) -> str:
    """Return the address of a class or function, made of its module and its name."""
    return f"python:{value.__module__}:{value.__qualname__}"


def can_be_imported(value: Any) -> bool:
    """Whether another process can import the class or function from its address."""
    return value.__module__ != "__main__" and "<locals>" not in value.__qualname__


def import_address(address: str) -> Any:
    """Import the object at an address; raise a ValueError that says why if that fails."""
    if (match := ADDRESS.fullmatch(address)) is None:
        raise ValueError(
            f"{shown(address)} is not an address: expected python:MODULE:NAME, such as python:bandit:Bandit"
        )
    try:
        value = importlib.import_module(match["module"])
        for part in match["name"].split("."):
            value = getattr(value, part)
    except AttributeError:
        raise ValueError(f"{address}: the module {match['module']} has no {match['name']!r}") from None
    except (Exception, SystemExit) as error:  # a foreign module may raise anything
        raise ValueError(f"{address} cannot be imported: {_in_words(error)}") from error
    return value


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {shown(str(error).strip(), 200).strip(chr(39) + chr(34)) or 'no message'}"


@dataclass(frozen=True, slots=True)
class Problem:
    """An entry that a package offers but that cannot be used."""

    name: str
    owner: str
    sentence: str


class Registry(MutableMapping[str, Entry], Generic[Entry]):
    """Entries by name. Entries known by an address, and objects, can be looked up as well, but are not listed.

    kind: the word for an entry in messages, such as "method"; group: the group of entry points that add entries;
    convert: makes an entry of the object at an entry point or an address, or raises a ValueError or TypeError;
    reserved: names that no entry may have;
    schemes: prefix of names -> place, `module:function`, of the function that makes an entry of such a name.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        own: Mapping[str, Entry],
        convert: Callable[[Any], Entry],
        reserved: frozenset[str] = frozenset(),
        schemes: Mapping[str, str] | None = None,
    ) -> None:
        self.kind, self.group, self._convert, self._reserved = kind, group, convert, reserved
        self.schemes = dict(schemes or {})
        self.own = tuple(own)
        """Names of uat's own entries; looking them up imports no other package."""
        self._entries: dict[str, Entry] = dict(own)
        self._owners: dict[str, str] = {}
        self._identities: dict[str, Any] = {}
        self._offered: dict[str, EntryPoint] | None = None
        self._tried: set[str] = set()
        self._problems: list[Problem] = []

    # ------------------------------------------------------------ the mapping

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:
            self._load(name)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._entries and isinstance(name, str):
            self._load(name)
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        for name in list(self._offers()):
            self._load(name)
        return iter([name for name in self._entries if ":" not in name])  # leave out addresses and objects

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __setitem__(self, name: str, entry: Entry) -> None:
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]
        self._owners.pop(name, None)

    # ------------------------------------------------------------ adding entries

    def register(self, name: str, entry: Entry, owner: str, identity: Any = None) -> None:
        """Add an entry. Refuse a name that is taken, unless the same code (`identity`) registers it again."""
        self._check_name(name)
        again = identity is not None and self._identities.get(name) == identity
        if name in self and not again:
            raise ValueError(
                f"the {self.kind} {name!r} of {owner} is refused: {self.owner(name)} has a {self.kind} of that name; "
                "choose another"
            )
        self._entries[name], self._owners[name], self._identities[name] = entry, owner, identity

    def adopt(self, address: str) -> Entry:
        """Import the object at an address, once, and register it under the address."""
        if address not in self._entries:
            self._add(address, import_address(address), address)
        return self._entries[address]

    def _scheme(self, name: str) -> str | None:
        return self.schemes.get(name.partition(":")[0]) if ":" in name else None

    def _load_by_scheme(self, name: str) -> None:
        """Make the entry of a name such as `logs:events`."""
        module, _, function = str(self._scheme(name)).partition(":")
        self._entries[name] = getattr(importlib.import_module(module), function)(name)

    def name_of(self, value: Any) -> str:
        """Register a class or function under its address, and return the address."""
        address = address_of(value)
        self._add(address, value, address)
        return address

    def _add(self, address: str, value: Any, owner: str) -> None:
        try:
            self._entries[address] = self._convert(value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{address} is not a {self.kind}: {error}") from None
        self._owners[address] = owner

    def _check_name(self, name: Any) -> None:
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            raise ValueError(f"{shown(name)} cannot name a {self.kind}: expected letters, digits and . _ + = @ -")
        if name in self._reserved:
            raise ValueError(f"{shown(name)} cannot name a {self.kind}: rows use it for a reference")

    # ------------------------------------------------------------ entries of packages

    def _offers(self) -> dict[str, EntryPoint]:
        """Return entry points by name, without importing them. If two packages offer one name, refuse the second."""
        if self._offered is None:
            from importlib.metadata import entry_points

            self._offered = {}
            for point in sorted(entry_points(group=self.group), key=lambda point: (point.name, _package(point))):
                if point.name in self._entries:
                    self._refuse(point, f"{self.owner(point.name)} has a {self.kind} of that name")
                elif point.name in self._offered and self._offered[point.name].value != point.value:
                    other = self._offered[point.name]
                    self._refuse(point, f"{_package(other)} offers a {self.kind} of that name, too")
                else:
                    self._offered[point.name] = point
        return self._offered

    def _load(self, name: str) -> None:
        """Import the entry that a package offers under this name, if there is one."""
        if is_address(name):
            return
        if self._scheme(name):
            self._load_by_scheme(name)
            return
        point = self._offers().get(name)
        if point is None or name in self._entries or name in self._tried:
            return
        self._tried.add(name)
        try:
            value = point.load()
        except (Exception, SystemExit) as error:  # a foreign module may raise anything
            self._refuse(point, f"importing {point.value} failed with {_in_words(error)}")
            return
        try:
            self._check_name(name)
            entry = self._convert(value)
        except (ValueError, TypeError) as error:
            self._refuse(point, str(error))
            return
        if name not in self._entries:  # otherwise the imported module registered it
            self._entries[name], self._owners[name] = entry, _package(point)

    def _refuse(self, point: EntryPoint, why: str) -> None:
        owner = _package(point)
        sentence = f"the {self.kind} {point.name!r} of {owner} cannot be used: {why}"
        self._problems.append(Problem(point.name, owner, sentence))

    def owner(self, name: str) -> str:
        """Return the owner of an entry: uat, a package with its version, the registering module, or an address."""
        return self._owners.get(name, OWN if name in self else "nobody")

    def problems(self) -> list[Problem]:
        """Return the entries that cannot be used."""
        list(self)
        return list(self._problems)

    def offered_as(self, value: Any) -> str | None:
        """Return the name under which a package offers this class or function; None if no package does."""
        place = f"{value.__module__}:{value.__qualname__}"
        return next((n for n, point in self._offers().items() if point.value == place and n in self), None)

    def loaded(self) -> dict[str, Entry]:
        """Return the entries that are loaded, without importing anything."""
        return dict(self._entries)

    def unsupported_reason(self, name: Any) -> str | None:
        """Return why a missing name cannot be used; None if it is simply unknown."""
        if is_address(name):
            return f"the {self.kind} {name} is code, which is imported only if you say so: {TRUST}"
        if isinstance(name, str) and name.startswith("object:"):
            return f"the {self.kind} {name} was passed as an object: pass it again ({self.kind}=... in Python)"
        return next((p.sentence for p in self._problems if p.name == name and name not in self._entries), None)


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unnamed package"
