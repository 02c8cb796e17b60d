"""A mistake that a test must notice."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ast_grep_py import SgNode, SgRoot

# a comma follows only if the variable matched something
_VARIABLE = re.compile(r"\$(?P<several>\$\$)?(?P<name>[A-Z_]+)(?P<comma>, )?")


@dataclass(frozen=True, slots=True)
class Mutation:
    """One mistake: a syntax pattern, and the code that replaces what it matches.

    Patterns follow ast-grep: `$NAME` stands for any node and `$$$NAME` for any number of nodes.
    White space and line breaks do not matter. Use variables for local names, which may be renamed,
    and literal names where they carry the meaning.

    Attributes:
        name: Consequence of the mistake.
        file: Path relative to the repository.
        pattern: Python code with variables; exactly one node of the file matches it.
        replacement: Code that replaces the node; it may use the variables.
        test: Pytest id of the test that must fail.
        inside: Name of the only function or class in which to search; "" searches the whole file.
    """

    name: str
    file: str
    pattern: str
    replacement: str
    test: str
    inside: str = ""

    def mutate(self, source: str) -> str:
        """Return the source with the mistake in it.

        Raises:
            ValueError: The pattern does not match exactly once.
        """
        nodes = SgRoot(source, "python").root().find_all(self._rule())
        if len(nodes) != 1:
            raise ValueError(f"the pattern matches {len(nodes)} nodes of {self.file}, not one")
        span = nodes[0].range()
        code = self.replacement.replace("\n", "\n" + " " * span.start.column)
        code = _VARIABLE.sub(lambda variable: _matched_text(source, nodes[0], variable), code)
        return source[: span.start.index] + code + source[span.end.index :]

    def apply(self, tree: Path) -> None:
        """Make the mistake in a copy of the repository."""
        path = tree / self.file
        path.write_text(self.mutate(path.read_text()))

    def _rule(self) -> dict[str, object]:
        # a pattern's comma must match, but the last argument of a call may have none
        last = self.pattern.replace(", $$$TAIL)", ")")
        rule: dict[str, object] = {"any": [{"pattern": self.pattern}, {"pattern": last}]}
        if self.inside:
            name = {"field": "name", "regex": f"^{self.inside}$"}
            rule["inside"] = {"has": name, "stopBy": "end"}
        return {"rule": rule}


def _matched_text(source: str, node: SgNode, variable: re.Match[str]) -> str:
    """Return the source text that a variable of the pattern matched."""
    name = variable["name"]
    nodes = node.get_multiple_matches(name) if variable["several"] else [node[name]]
    if not nodes:
        return ""
    text = source[nodes[0].range().start.index : nodes[-1].range().end.index]
    return text + (variable["comma"] or "")
