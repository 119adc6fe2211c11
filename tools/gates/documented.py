#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gate: everything that the public headers declare is documented where it is declared.

A function is documented by a comment on its line, or by one above it in the same group (lines without a blank line
between them). A struct or enum is documented by a comment directly above it or by comments on at least half of its
members. `--self-test` shows that undocumented ones are found."""
import glob
import re

from lib import gate


def members_documented(body):
    """Whether at least half of the members carry a comment; a comment on a line of its own counts for one."""
    members = [line for line in body if re.search(r"[,;]|^\s+\w+(\s*=\s*\d+)?\s*(/\*.*)?$", re.sub(r"/\*.*", "", line))]
    comments = sum("/*" in line for line in body)
    return 2 * comments >= len(members)


def check(path, text):
    lines = text.splitlines()
    found = []
    commented = False  # the group has had a comment so far
    end_of_body = 0
    for i, line in enumerate(lines):
        if not line.strip():
            commented = False
        if i < end_of_body:
            continue
        commented = commented or "/*" in line
        opens = re.match(r"typedef (?:struct|enum) (\w+) \{", line)
        if opens:
            end_of_body = next(j for j in range(i, len(lines)) if lines[j].startswith("}"))
            if not commented and not members_documented(lines[i + 1 : end_of_body]):
                found.append(f"{path}:{i + 1}: {opens[1]} has no comment")
            continue
        declares = re.match(r"[a-z][\w ]*[ *](moe_\w+)\(", line)
        if declares and not commented:
            found.append(f"{path}:{i + 1}: {declares[1]} has no comment")
    return found


def self_test():
    cases = [
        ("int moe_a(void);\n", 1), ("/* A. */\nint moe_a(void);\nint moe_b(void);\n", 0),
        ("/* A. */\n\nint moe_a(void);\n", 1), ("int moe_a(void); /* a */\n", 0),
        ("typedef struct moe_s {\n  int a; /* a */\n  int b;\n  int c;\n} moe_s;\n", 1),
        ("typedef struct moe_s {\n  int a; /* a */\n  int b;\n} moe_s;\nint moe_f(void);\n", 1),
        ("/* S. */\ntypedef enum moe_s {\n  A,\n  B\n} moe_s;\n", 0), ("typedef enum moe_s {\n  A,\n  B\n} moe_s;\n", 1),
    ]
    return all(len(check("x.h", text)) == want for text, want in cases)


def gate_check():
    headers = sorted(glob.glob("include/*.h"))
    print(f"{len(headers)} headers")
    return [line for path in headers for line in check(path, open(path, encoding="utf-8").read())] if headers else ["no headers"]


gate.run(self_test, gate_check)
