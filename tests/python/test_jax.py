# SPDX-License-Identifier: Apache-2.0
"""moeblas.jax against a layer on jax.lax.ragged_dot, on every platform that is here."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
import jax.numpy as jnp
import jax_helper as helper
import jax_reference as reference
import moeblas
import moeblas.jax as moe_jax
from jax_helper import CPU, GPT_OSS, Problem, assert_close, assert_same, gpu, on_cpu
from moeblas.jax import _layer

device = helper.device


def expected_of(arrays, ids, dout, **options):
    value, pull = jax.vjp(lambda a: reference.experts(ids=ids, **a, **options), arrays)
    return value, pull(dout)[0]


def compare(problem, ids=None):
    """Values and all gradients, of the eager and of the compiled layer."""
    ids = problem.ids if ids is None else ids
    out = problem.call(moe_jax.experts, ids)(problem.arrays)
    assert out.dtype == problem.dtype and out.devices() == problem.arrays["x"].devices()
    options = {name: value for name, value in problem.options.items() if name != "recompute"}
    value, expected = on_cpu(expected_of, problem.arrays, ids, problem.dout, **options)
    assert_close(out, value, problem.dtype, "out")
    loss = problem.loss(moe_jax.experts, ids)
    eager = jax.grad(loss)(problem.arrays)
    for name, grad in eager.items():
        assert grad.dtype == problem.arrays[name].dtype
        assert_close(grad, expected[name], problem.dtype, f"d{name}")
    assert_same(jax.jit(jax.grad(loss))(problem.arrays), eager)
    return eager


CASES = {
    "swiglu": {},
    "gpt_oss": GPT_OSS,
    "interleave8": {"layout": "interleaved", "interleave": 8},
    "geglu_up_first": {"act": "geglu", "layout": "concat_up_first"},
    "relu2_plain": {"act": "relu2"},
    "transposed": {"transposed": True},
    "weight_on_input": {"weight_on_input": True},
    "recompute": {"recompute": True},
}


@pytest.mark.parametrize("name", CASES)
def test_matches_ragged_dot(device, name):
    compare(Problem(**CASES[name]).with_biases())


def test_biases_are_optional(device):
    compare(Problem())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["swiglu", "gpt_oss", "transposed"])
def test_half_types_match_ragged_dot(device, dtype, name):
    # Rounding carries elements across a clamp, where the derivative jumps: so they lie far out.
    far = {"gate_max": 9.0, "up_min": -9.0, "up_max": 9.0} if name == "gpt_oss" else {}
    options = CASES[name] | far
    compare(Problem(tokens=70, hidden=64, inter=48, dtype=dtype, **options).with_biases())


def test_ids_outside_and_duplicates(device):
    problem = Problem()
    ids = np.array(problem.ids)
    ids[0], ids[1], ids[2], ids[3] = (-1, 5), (2, 2), (2**31 - 1, -(2**31)), (-1, 0)
    grads = compare(problem, jnp.asarray(ids))
    out = moe_jax.experts(ids=jnp.asarray(ids), **problem.arrays)
    for token in (0, 2):
        assert not np.asarray(out[token]).any() and not np.asarray(grads["x"][token]).any()
        assert not np.asarray(grads["weights"][token]).any()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
def test_ids_of_any_integer_type(device, dtype):
    """None is wrapped into an expert on its way to 32 bits."""
    problem = Problem()
    ids = np.array(problem.ids, dtype)
    ids[0] = np.iinfo(dtype).max
    if dtype.endswith("64"):
        ids[1] = 2**32  # 0 in 32 bits
    with jax.enable_x64(True):
        found = moe_jax.experts(ids=jnp.asarray(ids), **problem.arrays)
    outside = (ids < 0) | (ids >= problem.count)
    known = np.where(outside, 0, ids).astype(np.int32) - outside.astype(np.int32)
    wanted = moe_jax.experts(ids=known, **problem.arrays)
    assert_same(found, wanted)
    assert not np.asarray(found[0]).any()


def test_empty_experts_have_gradient_zero(device):
    problem = Problem(count=8).with_biases()
    grads = compare(problem, jnp.where(problem.ids > 2, 6, problem.ids))
    for name in ("w1", "w2", "b1", "b2"):
        assert not np.asarray(grads[name][jnp.array([3, 4, 5, 7])]).any()
        assert np.asarray(grads[name][6]).any()


def test_no_tokens(device):
    problem = Problem(tokens=0).with_biases()
    assert moe_jax.experts(ids=problem.ids, **problem.arrays).shape == (0, 32)
    for grad in jax.jit(jax.grad(problem.loss(moe_jax.experts)))(problem.arrays).values():
        assert not np.asarray(grad).any()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows(device, dtype, weighted):
    """Rows sorted by expert are one choice a token, to the bit; rows past the last take no part."""
    problem = Problem(topk=1, dtype=dtype).with_biases()
    ids = jnp.sort(problem.ids, axis=0).at[-4:].set(-1)
    counts = np.bincount(np.asarray(ids[:-4, 0]), minlength=problem.count)
    offset = np.append(0, counts.cumsum()).astype(np.int16)
    arrays = dict(problem.arrays, weights=problem.arrays["weights"][:, 0])
    if not weighted:
        problem.arrays["weights"] = jnp.ones_like(problem.arrays["weights"])
        del arrays["weights"]

    def loss(arrays):
        out = moe_jax.rows(row_offset=offset, **arrays)
        return (out.astype(jnp.float32) * problem.dout.astype(jnp.float32)).sum(), out

    grads, out = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    assert_same(out, problem.call(moe_jax.experts, ids)(problem.arrays))
    assert np.asarray(out[:-4]).any() and not np.asarray(out[-4:]).any()
    wanted = jax.grad(problem.loss(moe_jax.experts, ids))(problem.arrays)
    for name, grad in grads.items():
        assert np.asarray(grad).any()
        assert_same(grad.ravel(), wanted[name].ravel())


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"row_offset": np.zeros(5, np.int32)}, "row_offset is int32[5], wanted int32[6]"),
        ({"row_offset": np.zeros(6)}, "row_offset is of float32, wanted integers"),
        ({"weights": np.zeros((33, 1))}, "weights is float32[33, 1], wanted float32[33]"),
        ({"topk": 2}, "option topk is unknown"),
        ({"capacity_factor": 1.0}, "option capacity_factor is unknown"),
    ],
)
def test_rows_refuse(changed, sentence):
    given = {"row_offset": np.zeros(6, np.int32)} | Problem().arrays | {"weights": None} | changed
    with pytest.raises(moeblas.ArgumentError) as caught:
        moe_jax.rows(**given)
    assert sentence in str(caught.value)


def test_donated_buffers(device):
    """Steps of gradient descent that give their parameters away end in the same bits."""
    problem = Problem().with_biases()

    def step(arrays):
        grads = jax.grad(problem.loss(moe_jax.experts))(arrays)
        return jax.tree.map(lambda a, g: a - 0.01 * g, arrays, grads)

    plain, giving = jax.jit(step), jax.jit(step, donate_argnums=0)
    kept, given = problem.arrays, jax.tree.map(jnp.copy, problem.arrays)
    for _ in range(3):
        kept, before = plain(kept), given
        given = giving(given)
        assert all(array.is_deleted() for array in before.values())
    assert_same(given, kept)


def test_frozen_arrays_cost_nothing(device):
    """What nobody differentiates is not a result of the call."""
    problem = Problem()
    frozen = {name: problem.arrays[name] for name in ("w1", "w2", "weights")}
    loss = problem.loss(moe_jax.experts)
    gradient = jax.jit(jax.grad(lambda x: loss({"x": x, **frozen})))
    assert 'results = "dx workspace"' in gradient.lower(problem.arrays["x"]).as_text()
    assert_same(gradient(problem.arrays["x"]), jax.grad(loss)(problem.arrays)["x"])


def test_two_calls_and_no_branch(device):
    """The choice of the platform is made when XLA compiles: a branch would wait for the device."""
    problem = Problem()
    gradient = jax.jit(jax.grad(problem.loss(moe_jax.experts)))
    program = gradient.lower(problem.arrays).compile().as_text()
    for name in ("moeblas_forward", "moeblas_backward"):
        assert program.count(f'custom_call_target="{name}"') == 1
    assert " conditional(" not in program


def test_checkpoint_and_scan(device):
    """The layer three times over, recomputed in the backward pass, against the same written out."""
    problem = Problem()
    run = problem.call(moe_jax.experts)
    rest = {name: array for name, array in problem.arrays.items() if name != "x"}

    def scanned(x):
        body = jax.checkpoint(lambda y, _: (run({"x": y, **rest}), None))
        return jax.lax.scan(body, x, None, length=3)[0].sum()

    def unrolled(x):
        for _ in range(3):
            x = run({"x": x, **rest})
        return x.sum()

    found, wanted = (jax.jit(jax.grad(f))(problem.arrays["x"]) for f in (scanned, unrolled))
    assert_close(found, wanted, problem.dtype)


def test_vmap_is_refused(device):
    problem = Problem()
    with pytest.raises(NotImplementedError, match=r"vmap over 2 calls .* wanted one call: reshape"):
        jax.vmap(lambda x: moe_jax.experts(ids=problem.ids, **problem.arrays | {"x": x}))(
            jnp.stack([problem.arrays["x"]] * 2)
        )


REFUSALS = {
    "w1 is float32[5, 47, 32], wanted float32[5, 48, 32]": {
        "w1": np.zeros((5, 47, 32), np.float32)
    },
    "w2 is float16[5, 32, 24], wanted float32": {"w2": np.zeros((5, 32, 24), np.float16)},
    "x is float32[33], wanted [tokens,hidden]": {"x": np.zeros(33, np.float32)},
    "x is int32[33, 32], wanted": {"x": np.zeros((33, 32), np.int32)},
    "ids is of float32, wanted integers": {"ids": np.zeros((33, 2), np.float32)},
    "ids is int32[32, 2], wanted int32[33, 2]": {"ids": np.zeros((32, 2), np.int32)},
    "weights is float32[33, 1], wanted float32[33, 2]": {"weights": np.zeros((33, 1), np.float32)},
    "b1 is float32[48], wanted float32[5, 48]": {"b1": np.zeros(48, np.float32)},
    "option gate_min is unknown, wanted one of act, alpha": {"gate_min": 1.0},
    "act.alpha = -1, wanted a positive number": {"alpha": -1.0},
    "topk = 0, wanted 1 .. 64": {
        "ids": np.zeros((33, 0), np.int32),
        "weights": np.zeros((33, 0), np.float32),
    },
}


@pytest.mark.parametrize("sentence", REFUSALS)
def test_refusals(sentence):
    problem = Problem()
    with pytest.raises(moeblas.ArgumentError) as caught:
        moe_jax.experts(**{"ids": problem.ids, **problem.arrays, **REFUSALS[sentence]})
    assert sentence in str(caught.value)


def raw_call(problem, operands="x given_ids given_weights w1 w2", workspace=1 << 27, **changed):
    """The custom call itself, as a program that was tampered with would make it; the workspace is
    enough for the CPU's threads, however many."""
    config = moeblas.make_config(
        hidden=32,
        inter=24,
        experts=5,
        topk=2,
        dtype="fp32",
        grad_dtype="fp32",
        entry="ids",
        act="swiglu",
    )
    results = [
        jax.ShapeDtypeStruct((33, 32), jnp.float32),
        jax.ShapeDtypeStruct((workspace,), jnp.uint8),
    ]
    arrays = {"x": problem.arrays["x"], "ids": problem.ids, **problem.arrays, **changed}
    values = [arrays[name] for name in ("x", "ids", "weights", "w1", "w2")]
    call = jax.ffi.ffi_call("moeblas_forward", results)
    config = changed.get("config", np.frombuffer(bytes(config), np.uint8))
    return jax.jit(lambda *v: call(*v, config=config, operands=operands, results="out workspace"))(
        *values
    )


HANDLER_REFUSALS = {
    "workspace_bytes = 8, wanted at least": {"workspace": 8},
    "w1 has 5760 elements, wanted 7680": {"w1": np.zeros((5, 36, 32), np.float32)},
    "w2 has XLA's element type 10, wanted 11": {"w2": np.zeros((5, 32, 24), np.float16)},
    'buffer 4 is "w3", wanted a known name': {"operands": "x given_ids given_weights w1 w3"},
    'wanted one more: "b1"': {"operands": "x given_ids given_weights w1 w2 b1"},
    "row_offset has 66 elements, wanted 6": {"operands": "x row_offset given_weights w1 w2"},
    "logits has XLA's element type 4, wanted 0": {"operands": "x logits given_weights w1 w2"},
    "x given_ids given_weights w1": {"operands": "x given_ids given_weights w1"},
    "config has 4 bytes, wanted up to": {"config": np.zeros(4, np.uint8)},
    "config.size = 0, wanted 64": {"config": np.zeros(64, np.uint8)},
    "the first buffer has no two dimensions": {"x": np.zeros(33 * 32, np.float32)},
}


@pytest.mark.parametrize("sentence", HANDLER_REFUSALS)
def test_handler_refuses_what_does_not_fit(device, sentence):
    """Programs may come from elsewhere: no address reaches the library unchecked."""
    given = HANDLER_REFUSALS[sentence]
    if "operands" in given and given["operands"] == sentence:
        sentence = 'buffer 4 is "", wanted a known name'
    with pytest.raises(Exception) as caught:
        jax.block_until_ready(raw_call(Problem(), **given))
    assert sentence in str(caught.value)


def test_handler_takes_what_fits(device):
    problem = Problem()
    assert_same(raw_call(problem)[0], moe_jax.experts(ids=problem.ids, **problem.arrays))


def test_cuda_handler_hands_on_the_errors_of_xla():
    """On a platform without streams it says so, rather than run on none."""
    handler = jax.ffi.pycapsule(_layer._native.moe_xla_forward_cuda)
    jax.ffi.register_ffi_target("moeblas_misplaced", handler, platform="cpu")
    with jax.default_device(CPU), pytest.raises(Exception, match="not available"):
        x = jnp.zeros((1, 16), jnp.float32)
        call = jax.ffi.ffi_call("moeblas_misplaced", jax.ShapeDtypeStruct(x.shape, x.dtype))
        jax.block_until_ready(jax.jit(call)(x))


LOADED = """
import sys, numpy as np, jax, moeblas.jax
jax.config.update("jax_platforms", "cpu")
given = dict(np.load(sys.argv[1]))
run = jax.export.deserialize(bytearray(open(sys.argv[2], "rb").read()))
np.save(sys.argv[3], run.call(given))
"""


def test_exported_program_runs_in_another_process(tmp_path):
    """The program carries the configuration, not an address of the process that made it."""
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers")
    with jax.default_device(CPU):
        problem = Problem()
        program = jax.jit(problem.call(moe_jax.experts))
        checks = [jax.export.DisabledSafetyCheck.custom_call("moeblas_forward")]
        exported = jax.export.export(program, platforms=["cpu"], disabled_checks=checks)(
            problem.arrays
        )
        wanted = program(problem.arrays)
    np.savez(tmp_path / "arrays.npz", **problem.arrays)
    (tmp_path / "program").write_bytes(exported.serialize())
    names = [tmp_path / "arrays.npz", tmp_path / "program", tmp_path / "out.npy"]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run([sys.executable, "-c", LOADED, *names], check=True, env=environment, timeout=120)
    assert_same(np.load(tmp_path / "out.npy"), wanted)


def test_many_threads(device):
    """Threads that run the same and other plans at once get the bits of a lone one."""
    problems = [Problem(tokens=tokens, inter=inter) for tokens in (5, 33) for inter in (8, 24)]
    grads = [jax.jit(jax.grad(problem.loss(moe_jax.experts))) for problem in problems]
    wanted = [grad(problem.arrays) for grad, problem in zip(grads, problems)]
    found = [None] * 8

    def work(i):
        with jax.default_device(device):
            for _ in range(5):
                found[i] = grads[i % 4](problems[i % 4].arrays)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(8):
        assert_same(found[i], wanted[i % 4])


def test_data_parallel():
    """Each device has its tokens; the gradients of the weights are summed over the devices."""
    devices = jax.devices("cpu")[:2]
    assert len(devices) == 2
    with jax.default_device(CPU):
        problem = Problem(tokens=32)
    mesh, part = jax.sharding.Mesh(np.array(devices), ("data",)), jax.sharding.PartitionSpec("data")
    arrays = {**problem.arrays, "ids": problem.ids}
    specs = {
        name: part if name in ("x", "weights", "ids") else jax.sharding.PartitionSpec()
        for name in arrays
    }
    layer = jax.shard_map(
        lambda a: moe_jax.experts(**a),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=part,
        check_vma=False,
    )

    def loss(run, floats):
        return (run({**floats, "ids": problem.ids}) * problem.dout).sum()

    found = jax.jit(jax.grad(lambda floats: loss(layer, floats)))(problem.arrays)
    wanted = jax.grad(lambda floats: loss(lambda a: moe_jax.experts(**a), floats))(problem.arrays)
    for name in wanted:
        assert_close(found[name], wanted[name], problem.dtype, name)


@pytest.mark.skipif(gpu() is None, reason="no CUDA device for JAX, or a library without CUDA")
def test_command_buffers():
    """Replays of captured programs with other ids have the bits of the eager calls."""
    problem = Problem(tokens=256, hidden=128, inter=64, count=8, dtype="bfloat16")
    options = {"xla_gpu_graph_min_graph_size": "1"}

    def gradients(arrays, ids):
        return jax.grad(problem.loss(moe_jax.experts, ids))(arrays)

    captured = jax.jit(gradients, compiler_options=options)
    with jax.default_device(gpu()):
        for seed in range(20):
            ids = jax.random.randint(jax.random.key(seed), problem.ids.shape, -1, 9)
            assert_same(captured(problem.arrays, ids), gradients(problem.arrays, ids))
