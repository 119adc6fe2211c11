# SPDX-License-Identifier: Apache-2.0
"""The wheel that `make wheel` built: its name is true, and a stranger can install and use it.

It is installed into a new environment, offline, and run there without MOEBLAS_LIBRARY and away
from this tree.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
from conftest import ROOT

DIST = ROOT / os.environ.get("BUILD", "build") / "dist"
# Beside glibc's own libraries only what the wheel brings.
ALLOWED = (
    r"(libc|libm|libdl|librt|libpthread|ld-linux-x86-64|ld-linux-aarch64|libgomp|libmoeblas)\.so.*"
)
USE = """
import os
import moeblas
from moeblas.numpy import Layer
import numpy as np
assert "MOEBLAS_LIBRARY" not in os.environ
assert moeblas.library_path == os.path.join(os.path.dirname(moeblas.__file__), "libmoeblas.so")
layer = Layer(hidden=4, inter=2, experts=2, topk=1, act="relu", entry="ids")
x = np.eye(3, 4, dtype=np.float32)
params = {"w1": np.ones((2, 2, 4), np.float32), "w2": np.full((2, 4, 2), 0.5, np.float32)}
ids = np.array([[0], [1], [2]], np.int32)
result = layer.forward(x, params, given_ids=ids, given_weights=np.full((3, 1), 3, np.float32))
assert result.out.tolist() == [[3] * 4, [3] * 4, [0] * 4], result.out
print("maps", *{line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line})
"""


@pytest.fixture(scope="module")
def wheel() -> Path:
    found = list(DIST.glob("*.whl"))
    assert len(found) == 1, f"{DIST} holds {len(found)} wheels, wanted 1: make wheel"
    return found[0]


@pytest.fixture(scope="module")
def libraries(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return sorted(folder.glob("**/*.so*"))


def run(*command: str, **options) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, **options).stdout


def test_contents(wheel: Path, libraries: list[Path]) -> None:
    names = [path.name for path in libraries]
    assert names == ["libgomp.so.1", "libmoeblas.so", "libmoeblas_xla.so"]
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        metadata = archive.read(next(name for name in files if name.endswith("/WHEEL"))).decode()
    sources = {f"moeblas/{p.relative_to(ROOT / 'python/moeblas')}" for p in package_sources()}
    assert sources <= set(files)
    assert not [name for name in files if name.endswith((".c", ".h", ".pyc"))]
    assert "Root-Is-Purelib: false" in metadata and "Tag: py3-none-manylinux_2_" in metadata


def package_sources() -> list[Path]:
    return list((ROOT / "python/moeblas").glob("**/*.py"))


def test_tag_is_the_newest_glibc_symbol(wheel: Path, libraries: list[Path]) -> None:
    tag = re.fullmatch(r"moeblas-\d+\.\d+\.\d+-py3-none-manylinux_2_(\d+)_\w+\.whl", wheel.name)
    versions = re.findall(r"GLIBC_2\.(\d+)", run("readelf", "-VW", *map(str, libraries)))
    assert int(tag[1]) == max(map(int, versions))


def test_libraries_need_nothing_else(libraries: list[Path]) -> None:
    dynamic = run("readelf", "-dW", *map(str, libraries))
    needed = re.findall(r"\(NEEDED\)\s+Shared library: \[(.*)\]", dynamic)
    assert len(needed) >= 4
    assert [name for name in needed if not re.fullmatch(ALLOWED, name)] == []
    assert re.findall(r"\(RUNPATH\).*\[(.*)\]", dynamic) == ["$ORIGIN", "$ORIGIN"]


def test_install_and_use(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    python = str(tmp_path / "venv/bin/python")
    run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", str(wheel))
    kept = {k: v for k, v in os.environ.items() if k not in ("MOEBLAS_LIBRARY", "PYTHONPATH")}
    kept["PYTHONPATH"] = str(Path(numpy.__file__).parents[1])
    maps = run(python, "-c", USE, cwd=tmp_path, env=kept)
    assert re.fullmatch(rf"maps {tmp_path}/venv/\S+/moeblas/libgomp\.so\.1\s*", maps), maps
