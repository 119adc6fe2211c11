# SPDX-License-Identifier: Apache-2.0
"""The classes over the library: errors, contexts, plans on raw addresses, loading and leaving."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import moeblas
import numpy as np
import pytest
from conftest import ROOT
from moeblas import Context, Plan, _lib
from moeblas.numpy import Layer

CONFIG = {"hidden": 4, "inter": 2, "experts": 3, "topk": 1, "act": "relu", "entry": "ids"}


def start(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs a program in a new interpreter that finds the package."""
    kept = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=kept, check=False, capture_output=True, text=True
    )


def test_every_status_has_its_exception() -> None:
    kinds = {status: _lib._ERRORS[status] for status in moeblas.Status if status}
    assert all(kind.status == status for status, kind in kinds.items())
    assert issubclass(moeblas.ArgumentError, ValueError)
    assert issubclass(moeblas.UnsupportedError, NotImplementedError)
    assert issubclass(moeblas.OutOfMemoryError, MemoryError)
    assert issubclass(moeblas.DeviceError, RuntimeError)


def test_an_error_has_the_sentence_of_its_own_thread() -> None:
    def fail(hidden: int) -> str:
        with pytest.raises(moeblas.ArgumentError) as caught:
            Plan(Context.get(), {**CONFIG, "hidden": hidden})
        return str(caught.value)

    numbers = [-n for n in range(200)]
    with ThreadPoolExecutor(8) as pool:
        sentences = list(pool.map(fail, numbers))
    assert all(s.startswith(f"plan: hidden = {n}, ") for n, s in zip(numbers, sentences))


def test_contexts_are_shared() -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: Context.get("cpu", 1), range(64)))
    assert len(found) == 1
    (context,) = found
    assert context.backend is moeblas.Backend.CPU and context.units == 1
    assert Context("cpu", 1) is not context


def test_backends_that_are_not_there() -> None:
    assert moeblas.backend_available("cpu") is None
    sentence = moeblas.backend_available("cuda")
    if sentence is not None:
        assert "CUDA" in sentence
        with pytest.raises(moeblas.UnsupportedError):
            Context("cuda")
    with pytest.raises(moeblas.ArgumentError, match='^backend = "gpu", wanted one of auto, cpu'):
        Context("gpu")


def test_sizes() -> None:
    plan = Plan(Context.get(), CONFIG)
    assert plan.workspace(0) <= plan.workspace(1) <= plan.workspace(1000)
    assert plan.saved(0) <= plan.saved(1) < plan.saved(1000)
    for tokens in (-1, 1 << 31, 1 << 70):
        with pytest.raises(moeblas.ArgumentError, match=f"tokens = {tokens}, wanted 0 or more"):
            plan.workspace(tokens)
    assert f"workspace  {plan.workspace(7)} bytes" in plan.describe(7)


def test_formats_are_resolved() -> None:
    config = Plan(Context.get(), CONFIG).config
    bf16, fp32 = moeblas.Dtype.BF16, moeblas.Dtype.FP32
    found = (config.dtype, config.logits_dtype, config.router_dtype, config.grad_dtype)
    assert found == (bf16, fp32, bf16, bf16)
    assert [moeblas.dtype_bytes(d) for d in ("fp32", "bf16", "fp16")] == [4, 2, 2]


def test_a_run_on_addresses() -> None:
    plan = Plan(Context.get(), {**CONFIG, "dtype": "fp32"})
    w1, w2 = np.ones((3, 2, 4), np.float32), np.ones((3, 4, 2), np.float32)
    x, out = np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32)
    ids, weights = np.array([[2]], np.int32), np.array([[0.5]], np.float32)
    workspace = np.empty(plan.workspace(1), np.uint8)
    fields = {
        "tokens": 1,
        "x": x.ctypes.data,
        "given_ids": ids.ctypes.data,
        "given_weights": weights.ctypes.data,
        "out": out.ctypes.data,
        "workspace": workspace.ctypes.data,
    }
    params = moeblas.Params(w1=w1.ctypes.data, w2=w2.ctypes.data)
    with pytest.raises(moeblas.WorkspaceError, match="workspace_bytes"):
        plan.forward(params, workspace_bytes=workspace.nbytes - 1, **fields)
    assert not out.any()
    plan.forward(params, workspace_bytes=workspace.nbytes, **fields)
    assert out.tolist() == [[4.0] * 4]
    with pytest.raises(moeblas.ArgumentError, match="stream is given, wanted NULL for the CPU"):
        plan.forward(params, stream=16, workspace_bytes=workspace.nbytes, **fields)
    with pytest.raises(AttributeError):
        plan.forward(params, work_space=0)


def test_threads_share_a_layer() -> None:
    layer = Layer(threads=1, hidden=16, inter=8, experts=4, topk=2, act="swiglu")
    rng = np.random.default_rng(3)
    names = ("router_weight", "w1", "w2")
    params = {name: rng.standard_normal(layer.shapes[name], np.float32) for name in names}
    inputs = [rng.standard_normal((n, 16), np.float32) for n in range(1, 33)]

    def both(x: np.ndarray) -> bytes:
        result = layer.forward(x, params)
        grads = layer.backward(result, x)
        return result.out.tobytes() + grads.x.tobytes() + grads.params["w1"].tobytes()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(both, inputs)) == [both(x) for x in inputs]


def test_plans_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and before their context."""
    destroyed = []
    for name in ("moe_plan_destroy", "moe_context_destroy"):
        monkeypatch.setattr(_lib.lib, name, lambda handle, name=name: destroyed.append(name))
    plan = Plan(Context("cpu", 1), CONFIG)
    handles = plan.handle, plan.context.handle
    del plan
    gc.collect()
    monkeypatch.undo()
    assert destroyed == ["moe_plan_destroy", "moe_context_destroy"]
    _lib.lib.moe_plan_destroy(handles[0])
    _lib.lib.moe_context_destroy(handles[1])


def test_leaving_with_plans_alive() -> None:
    code = f"import moeblas\nplan = moeblas.Plan(moeblas.Context.get(), {CONFIG!r})\nprint('left')"
    done = start(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


def build(source: str, folder: Path) -> str:
    (folder / "stub.c").write_text(source)
    path = str(folder / "stub.so")
    subprocess.run(["gcc", "-shared", "-fPIC", folder / "stub.c", "-o", path], check=True)
    return path


def test_another_version_is_refused(tmp_path: Path) -> None:
    functions = [name for name in _lib.PROTOTYPES if name != "moe_version"]
    source = "".join(f"void {name}(void) {{}}\n" for name in functions)
    path = build(source + 'const char *moe_version(void) { return "7.2.0"; }\n', tmp_path)
    done = start("import moeblas", MOEBLAS_LIBRARY=path)
    assert f"ImportError: moeblas: {path} is version 7.2.0, wanted 0.1.x" in done.stderr


@pytest.mark.parametrize("source", ["int x;", "const char *moe_version(void) { return 0; }"])
def test_another_library_is_refused(source: str, tmp_path: Path) -> None:
    path = build(source, tmp_path)
    done = start("import moeblas", MOEBLAS_LIBRARY=path)
    assert f"ImportError: moeblas: {path} cannot be loaded: " in done.stderr
    (tmp_path / "text.so").write_text("no library")
    done = start("import moeblas", MOEBLAS_LIBRARY=str(tmp_path / "text.so"))
    assert "text.so cannot be loaded: " in done.stderr


def test_the_example_learns() -> None:
    code = (ROOT / "examples/numpy_layer.py").read_text()
    assert code.count("\n") <= 30
    assert code[code.index("import numpy") :] in (ROOT / "docs/python.md").read_text()
    done = start(code)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines()]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.1 * losses[0]


def test_pointers_are_wide_enough() -> None:
    """An address beyond 32 bits survives the way into a struct."""
    address = (1 << 47) + 16
    assert moeblas.Params(w1=address).w1 == address
    assert ctypes.sizeof(moeblas.Params) % 8 == 0
