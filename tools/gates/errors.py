#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gate: docs/errors.md lists every sentence that the library can answer with.

The sentences are read from the sources: the status and the format of each CHECK and moe_fail. Without arguments the page
is compared with them; `--write` makes it anew. Who shows a row is decided here (SHOWN_BY), else it is tests/test_errors.c,
which reads the page, provokes its rows, and fails for one that it could not. `--self-test` shows that each kind of
difference is found."""
from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Iterator, NamedTuple

from lib import gate

PAGE = Path("docs/errors.md")
HEADER = """# Errors

Every sentence that `moe_last_error()` can hold after a call was refused, with the status that the call returned. Generated from
the sources by `tools/gates/errors.py --write`; a gate fails where the page is not up to date. What stands in `<>` is filled in:
the operation (`<op>`, `<what>`), the argument (`<field>`, `<name>`), what was found, what was wanted.

`tests/test_errors.c` provokes every row marked "test" and compares the whole sentence, `tests/mock_cuda/test.c` those marked "mock", in
the place of whose GPU there is a runtime that computes nothing; the other rows say why no test shows them.

| status | sentence | shown by | where |
|---|---|---|---|
"""
# What else shows a sentence, or why nothing does: by file, or by file and first words of the sentence.
SHOWN_BY = {
    "src/cuda/": "mock",
    "src/context.c context: this build": "a build without CUDA",
    "src/cpu/isa.c cpu: MOE_CPU_ISA = <name>, but": "a processor without AVX-512",
}
CONVERSION = re.compile(r"%%|%[-+ #0]*(?:\d+|\*)?(?:\.\d+)?(?:hh|h|ll|l|z|t|j)?[a-zA-Z]")


class Site(NamedTuple):
    """A place that can fail: file:line, status and sentence with <placeholders>."""

    file: str
    line: int
    status: str
    sentence: str


class Row(NamedTuple):
    """A line of the page: one sentence of one file."""

    status: str
    sentence: str
    shown_by: str
    file: str

    def text(self) -> str:
        return f"| {self.status} | `{self.sentence}` | {self.shown_by} | {self.file} |\n"


def split_arguments(text: str) -> list[str]:
    """The arguments of a call whose text starts after its opening parenthesis."""
    parts, depth, start, quoted = [], 0, 0, False
    for i, char in enumerate(text):
        if quoted or char == '"':
            quoted = (char != '"' or text[i - 1] == "\\") if quoted else True
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if not quoted and (depth < 0 or (depth == 0 and char == ",")):
            parts.append(" ".join(text[start:i].split()))
            start = i + 1
        if depth < 0:
            return parts
    raise ValueError(f"a call does not end: {text[:60]!r}")


def placeholder(argument: str) -> str:
    """What stands for an argument of a format: its name, without casts and the struct that it is in."""
    plain = re.sub(r"\((?:const )?(?:unsigned |long )*(?:int|double|float|void|char|long|ptrdiff_t|int64_t) ?\**\)|\w+->|^\*",
                   "", argument)
    return "<bytes>" if "sizeof" in plain else "<value>" if re.search(r"[?(]", plain) else f"<{plain}>"


def sentence_of(arguments: list[str]) -> str:
    """A printf format and its arguments as one sentence."""
    pieces = re.findall(r'"((?:[^"\\]|\\.)*)"|PRI([du])64', arguments[0])
    text = "".join("ld" if wide else piece for piece, wide in pieces).replace('\\"', '"')
    values = iter(arguments[1:])
    return CONVERSION.sub(lambda found: "%" if found[0] == "%%" else placeholder(next(values)), text)


def sites(path: str, text: str) -> Iterator[Site]:
    """The sites of one source; the definitions of CHECK and moe_fail are none."""
    text = re.sub(r"/\*.*?\*/", lambda cut: "\n" * cut[0].count("\n"), text, flags=re.S)
    text = re.sub(r"^#\s*define\s+CHECK\b(?:.*\\\n)*.*\n", lambda cut: "\n" * cut[0].count("\n"), text, flags=re.M)
    for match in re.finditer(r"\b(CHECK|moe_fail)\(", text):
        arguments = split_arguments(text[match.end() :].replace("\\\n", " \n"))
        rest = arguments[match[1] == "CHECK" :]
        if not rest[0].startswith("const ") and not rest[0].startswith("moe_status "):
            status = "MEMORY/DEVICE" if "?" in rest[0] else rest[0].removeprefix("MOE_ERROR_")
            yield Site(path, text.count("\n", 0, match.start()) + 1, status, sentence_of(rest[1:]))


def reason(site: Site) -> str:
    """What else than test_errors.c shows it, or why nothing does; or ""."""
    name = f"{site.file} {site.sentence}"
    return next((why for start, why in SHOWN_BY.items() if name.startswith(start)), "")


def rows(found: list[Site]) -> list[Row]:
    """The rows of the page in its order."""
    page = {Row(site.status, site.sentence, reason(site) or "test", site.file) for site in found}
    return sorted(page, key=lambda row: (row.file.startswith("src/cuda"), row.sentence.startswith("<"), row.sentence, row.file))


def vague(found: list[Site]) -> list[str]:
    """Sentences that do not open with an operation or an argument."""
    return [f"{site.file}:{site.line}: \"{site.sentence}\" does not start with \"op: \"" for site in found
            if not re.match(r"(\w+|<\w+>): ", site.sentence)]


def differences(page: str, wanted: list[Row]) -> list[str]:
    """A sentence a row that is on one side alone."""
    said = {line + "\n" for line in page.splitlines() if line.startswith("| ") and not line.startswith("| status ")}
    made = {row.text() for row in wanted}
    return ([f"not on the page, --write puts it there; provoke it in tests/test_errors.c: {line.strip()}" for line in sorted(made - said)] +
            [f"on the page, but not in the sources, --write removes it: {line.strip()}" for line in sorted(said - made)])


def read_sites() -> list[Site]:
    """All sites under src/."""
    sources = sorted(path for kind in ("c", "h", "cu", "cuh") for path in Path("src").rglob(f"*.{kind}"))
    return [site for path in sources for site in sites(str(path), path.read_text(encoding="utf-8"))]


def self_test() -> bool:
    """A site of every form, and one change of each kind."""
    source = ('#define CHECK(c, s, ...) \\\n  do { if (!(c)) return moe_fail((s), __VA_ARGS__); } while (0)\n'
              'moe_status moe_fail(moe_status status, const char *format, ...) {\n'
              '  CHECK(f(a, "x, y") && a > 0, MOE_ERROR_ARGUMENT, "%s: a = %" PRId64 ", wanted > %d %%",\n'
              '        what, (int64_t)a,\n        MIN(1, 2));\n'
              '#define NULLS(op) CHECK(p != NULL, MOE_ERROR_MEMORY, \\\n  "%s: p = \\"%.64s\\"", op, p->name)\n'
              '  return moe_fail(MOE_ERROR_UNSUPPORTED, "plan: this is "\n                  "new");\n')
    found = list(sites("src/a.c", source))
    wanted = [Site("src/a.c", 4, "ARGUMENT", "<what>: a = <a>, wanted > <value> %"),
              Site("src/a.c", 7, "MEMORY", '<op>: p = "<name>"'), Site("src/a.c", 9, "UNSUPPORTED", "plan: this is new")]
    page = "".join(row.text() for row in rows(found))
    return (found == wanted and not differences(page, rows(found)) and not vague(found)
            and len(differences(page, rows(found[1:]))) == 1 and len(differences("", rows(found))) == 3
            and len(differences(page.replace("new", "old"), rows(found))) == 2
            and len(vague([Site("a.c", 1, "ARGUMENT", "went wrong")])) == 1)


def gate_check() -> list[str]:
    all_sites = read_sites()
    page = rows(all_sites)
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(HEADER + "".join(map(Row.text, page)), encoding="utf-8")
    print(f"{len(all_sites)} sites, {len(page)} sentences, {sum(row.shown_by in ('test', 'mock') for row in page)} shown by tests")
    return vague(all_sites) + differences(PAGE.read_text(encoding="utf-8") if PAGE.exists() else "", page)


if __name__ == "__main__":
    gate.run(self_test, gate_check)
